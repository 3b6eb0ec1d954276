"""The images, through the Docker SDK: what is in them, who runs, what may be taken away from them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import time

import pytest
from conftest import IMAGES, ROOT, done_lines, run, wait_until

BASE, IMAGE, DDP = IMAGES
HARDENED = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"], "user": "12345:0"}


@pytest.fixture
def start(engine):
    """Start a container without a network; whatever it does, it is gone after the test."""
    started = []

    def start(command=None, image=IMAGE, **options):
        options = {"network_mode": "none"} | options
        started.append(engine.containers.run(image, command, detach=True, **options))
        return started[-1]

    yield start
    for container in started:
        container.remove(force=True)


@pytest.fixture
def output(start):
    """Run a command to its end; return (exit status, standard output and error)."""

    def output(*args, **options):
        container = start(*args, **options)
        status = container.wait(timeout=300)["StatusCode"]
        return status, container.logs(stderr=False).decode(), container.logs(stdout=False).decode()

    return output


def versions():
    lines = (ROOT / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("image", IMAGES)
def test_labels_say_what_is_inside(engine, output, image):
    labels = engine.images.get(image).labels
    inside = {"bind": "/versions.py", "mode": "ro"}
    seen = json.loads(output("python /versions.py", image, volumes={str(ROOT / "images/base/versions.py"): inside})[1])
    for name, version in seen.items():
        assert labels[f"ai.allranks.{name.replace('_', '-')}"] == version
    known = versions()
    assert labels["ai.allranks.torch"] == known["TORCH_VERSION"]
    kind = f"cuda{known['CUDA_VERSION']}" if seen["torch_cuda"] else "cpu"
    assert labels["org.opencontainers.image.version"] == f"{known['TORCH_VERSION']}-{kind}"
    assert labels["org.opencontainers.image.title"] == image
    for name in ("revision", "created", "description", "vendor", "base.name", "base.digest"):
        assert labels[f"org.opencontainers.image.{name}"], name
    environ = dict(entry.split("=", 1) for entry in engine.images.get(image).attrs["Config"]["Env"])
    asks = [environ[f"NVIDIA_{name}"] for name in ("REQUIRE_CUDA", "VISIBLE_DEVICES", "DRIVER_CAPABILITIES")]
    assert asks == (["", "", ""] if kind == "cpu" else ["cuda>=12.2", "all", "compute,utility"])


def test_a_label_that_is_not_true_fails_the_build(output):
    inside = {str(ROOT / "images/base/versions.py"): {"bind": "/versions.py", "mode": "ro"}}
    status, _, err = output("python /versions.py torch=2.5.1 nccl=2.99.0", BASE, volumes=inside)
    assert (status, err.count("\n")) == (1, 1) and "holds nccl 2.21.5; expected 2.99.0" in err


def test_sizes_keep_to_their_budget(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/sizes.sh", tmp_path / "scripts")
    budgets = (ROOT / ".env").read_text()
    for text, status in ((budgets, 0), (budgets.replace("BASE_BUDGET=5200", "BASE_BUDGET=52"), 1)):
        (tmp_path / ".env").write_text(text)
        done = run(tmp_path / "scripts/sizes.sh", *IMAGES)
        assert done.returncode == status, done.stdout + done.stderr
    assert f"{BASE} has grown by" in done.stderr


COMPILED = """
import torch, torchvision
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
torch.testing.assert_close(torch.compile(model)(torch.ones(2, 8)), model(torch.ones(2, 8)))
if torch.version.cuda:
    import triton.runtime.driver, triton.compiler
print("compiled", torchvision.ops.nms(torch.tensor([[0., 0, 1, 1]]), torch.ones(1), 0.5).tolist())
"""


def test_torch_compile_works(output):
    status, out, err = output(["python", "-c", COMPILED], BASE)
    assert (status, out) == (0, "compiled [0]\n"), err
    # on a GPU Triton compiles a launcher against Python's headers
    headers = "import sysconfig; print(sysconfig.get_path('include'))"
    build = f'gcc -xc -c - -o /dev/null -I"$(python -c "{headers}")" <<<"#include <Python.h>"'
    assert output(["bash", "-c", build], BASE)[0] == 0


STRANGER = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print("trained", os.environ["LOCAL_RANK"], dist.get_world_size())
dist.destroy_process_group()
"""


def test_the_readmes_dockerfile_runs_a_strangers_script(engine, output, tmp_path):
    [recipe] = re.findall(r"```dockerfile\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "Dockerfile").write_text(recipe)
    (tmp_path / "train.py").write_text(STRANGER)
    tag = f"allranks-stranger-{os.getpid()}"
    assert run("docker", "build", "-q", "-t", tag, tmp_path).returncode == 0
    try:
        status, out, err = output(None, tag, **HARDENED)
        assert (status, sorted(out.splitlines())) == (0, ["trained 0 2", "trained 1 2"]), err
    finally:
        engine.images.remove(tag, force=True)


def test_health_tells_a_rank_that_trains_from_one_that_does_not(start):
    container = start("python dist.py --epochs 1000", environment={"NPROC_PER_NODE": "2"})
    assert container.attrs["Config"]["Healthcheck"]["Test"] == ["CMD", "python", "-m", "allranks", "health"]
    wait_until(lambda: b"epoch 1 " in container.logs(), timeout=120)
    ask = ["python", "-c", "from allranks.health import problem; print(problem(within=4))"]
    assert container.exec_run("python -m allranks health") == (0, b"ok\n")
    assert container.exec_run(ask).output == b"None\n"
    rank = (
        container.exec_run(["bash", "-c", "ls /tmp | sed -n 's/allranks-alive-//p' | tail -1"]).output.decode().strip()
    )
    container.exec_run(["kill", "-STOP", rank])
    wait_until(lambda: f"process {rank} has not moved for".encode() in container.exec_run(ask).output, timeout=30)


def test_no_file_is_setuid(output):
    assert output(["find", "/", "-xdev", "-perm", "/6000", "-type", "f"], BASE, user="0")[1] == ""


def test_no_layer_has_keys_caches_or_tokens():
    """Also those that a later layer hides: on the layers as they are saved and pushed."""
    secret = re.compile(
        r"ssh_host_|id_(rsa|ed25519|ecdsa)|authorized_keys|\.netrc|\.pypirc|\.docker/config|\.git/|(^|/)\.?token$|"
        r"(^|/)root/\.cache/.|home/[^/]+/\.cache/.|var/lib/apt/lists/.*Packages"
    )
    found, layers = [], 0
    saved = subprocess.Popen(["docker", "save", *IMAGES], stdout=subprocess.PIPE)
    with saved, tarfile.open(fileobj=saved.stdout, mode="r|") as archive:
        for blob in archive:
            if not blob.isfile() or blob.size <= 1024 or blob.name.endswith(".json"):
                continue
            with (
                contextlib.suppress(tarfile.ReadError),  # a manifest
                tarfile.open(fileobj=archive.extractfile(blob), mode="r|*") as layer,
            ):
                found += [member.name for member in layer if secret.search(member.name)]
                layers += 1
    assert layers > 8 and [name for name in found if not name.startswith("etc/ssl/certs")] == []


@pytest.mark.parametrize("image", IMAGES[1:])
def test_the_torch_layer_is_stored_once(engine, image):
    base, child = (engine.images.get(name).attrs["RootFS"]["Layers"] for name in (BASE, image))
    assert child[: len(base)] == base
    added = sum(layer["Size"] for layer in engine.images.get(image).history()[: len(child) - len(base) + 5])
    assert added < 25_000_000


def test_the_entry_command_of_the_guide(output):
    status, out, err = output("python dist.py --epochs 1")
    assert status == 0, err
    assert float(done_lines(out)[0]["accuracy"]) > 0.98


def test_the_default_command_without_a_gpu_trains_and_says_what_to_do(output):
    status, out, err = output()
    assert status == 0 and float(done_lines(out)[0]["accuracy"]) > 0.98, err
    hint, instead = err.splitlines()[:2]
    assert hint.startswith("allranks: no GPU here: gloo on the CPU (GPUs: docker run --gpus all")
    assert instead.startswith("mnist.py: --backend nccl needs a GPU")


def test_options_alone_are_for_the_images_script(output):
    status, out, err = output("--backend gloo --epochs 1")
    assert status == 0, err
    assert "weights" in done_lines(out)[0]


@pytest.mark.parametrize("command", [None, "--steps 5", "serve.sh example.py", "python example.py"])
def test_pytorch_ddp_trains_by_default_and_says_what_its_example_needs(output, command):
    status, out, err = output(command, DDP)
    if command == "python example.py":
        assert (status, out) == (1, "") and err.startswith("example.py: RANK, WORLD_SIZE, LOCAL_RANK")
        return
    assert status == 0, err
    ranks = done_lines(out)
    assert [rank["rank"] for rank in ranks] == ["0", "1"] and ranks[0]["weights"] == ranks[1]["weights"]


def test_serve_in_the_base_image_runs_a_strangers_script(output):
    code = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    script = f'echo "{code}" >/dev/shm/train.py; exec serve.sh /dev/shm/train.py'
    status, out, err = output(["bash", "-c", script], BASE, environment={"NPROC_PER_NODE": "3"}, **HARDENED)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_any_command_works_and_is_not_root(output):
    assert output(["bash", "-c", "id -u; python -c 'import torch'; exit 3"])[:2] == (3, "1000\n")


@pytest.mark.parametrize(("image", "command"), [(IMAGE, "python dist.py --epochs 1"), (DDP, None)])
def test_read_only_without_rights_under_an_unknown_uid(output, image, command):
    status, out, err = output(command, image, environment={"NPROC_PER_NODE": "2"}, shm_size="64m", **HARDENED)
    assert status == 0, err
    assert len({rank["weights"] for rank in done_lines(out)}) == 1


@pytest.mark.parametrize("entrypoint", [None, []], ids=["entrypoint", "replaced entrypoint"])
def test_sigterm_is_answered(start, entrypoint):
    container = start(["python", "dist.py", "--epochs", "1000"], entrypoint=entrypoint)
    assert stop(container) == 143


@pytest.mark.parametrize("entrypoint", [None, []], ids=["entrypoint", "replaced entrypoint"])
def test_sigterm_reaches_the_ranks_that_serve_has_started(start, entrypoint):
    container = start(["./serve.sh", "example.py", "--steps", "1000000000"], DDP, entrypoint=entrypoint)
    assert stop(container) not in (0, 137)  # torchrun's status is 1


def stop(container):
    """Stop a container once it has said something; return its exit status."""
    wait_until(container.logs, timeout=60)
    began = time.monotonic()
    container.stop(timeout=30)
    assert time.monotonic() - began < 15
    return container.wait()["StatusCode"]


def test_no_ssh_server_without_a_key(output):
    code = "import socket; print(socket.socket().connect_ex(('127.0.0.1', 22)))"
    assert output(["python", "-c", code])[1].strip() == "111"


@pytest.fixture
def network(engine):
    made = engine.networks.create(f"allranks-test-{os.getpid()}", internal=True)
    yield made.name
    made.remove()


def test_ssh_with_a_key_and_never_with_a_password(network, start, output, tmp_path):
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    on = {"image": BASE, "network_mode": None, "network": network}
    start("sleep 300", environment={"SSH_PUBLIC_KEY": key.with_suffix(".pub").read_text()}, name="ssh-node", **on)
    prepare = (
        "for i in $(seq 100); do (echo >/dev/tcp/ssh-node/22) 2>/dev/null && break; sleep 0.1; done; "
        "(umask 077; printenv KEY >~/key); "
        "ssh() { command ssh -o StrictHostKeyChecking=no -o BatchMode=yes -o LogLevel=ERROR ssh-node $@; }; "
    )
    ask = {"environment": {"KEY": key.read_text()}, **on}
    status, out, err = output(["bash", "-c", prepare + "ssh -i ~/key python -m allranks explain"], **ask)
    assert (status, out.split()[:2]) == (0, ["launcher", "none"]), err
    status, _, err = output(["bash", "-c", prepare + "ssh true"], **ask)
    assert status == 255 and "Permission denied (publickey)" in err


@pytest.mark.parametrize("image", IMAGES)
def test_no_key_or_password_is_in_the_image(output, image):
    look = "ls /etc/ssh/ssh_host_* /root/.ssh /home/*/.ssh /home/*/.cache /root/.cache/* 2>/dev/null; "
    look += "awk -F: '$2 !~ /^[*!]/' /etc/shadow"
    assert output(["bash", "-c", look], image, user="0")[1] == ""
