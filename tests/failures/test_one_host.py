"""The cases of the catalogue that one host can show; those about GPUs on recorded answers of the driver (driver/)."""

import re
from pathlib import Path

import pytest
from conftest import done_lines, python, start_python

from allranks.network import free_port

HERE = Path(__file__).parent
JOB = HERE / "job.py"
DRIVER = {"PYTHONPATH": f"{HERE / 'driver'}:{HERE.parents[1]}"}
TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        pytest.param(TWO | {"RANK": "2"}, 66, "invalid-variable: RANK=2 with WORLD_SIZE=2", id="7: out of range"),
        pytest.param(TWO | {"RANK": "-1"}, 66, "invalid-variable: RANK=-1", id="7: negative"),
        pytest.param(TWO | {"RANK": "one"}, 66, "invalid-variable: RANK='one'", id="7: not a number"),
        pytest.param(TWO | {"RANK": ""}, 66, "invalid-variable: RANK is empty", id="7: empty"),
        pytest.param({"SING_RANK": "0"}, 65, "missing-variable: SING_WORLD_SIZE, .*'sing'", id="8: missing"),
        pytest.param(
            {"SING_RANK": "0", "SING_WORLD_SIZE": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
            67,
            "launcher-conflict: SING Cloud says SING_RANK=0 and SkyPilot says SKYPILOT_NODE_RANK=1",
            id="9: two launchers",
        ),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost"},
            68,
            "master-is-loopback: PET_MASTER_ADDR=localhost with 2 nodes",
            id="15: loopback",
        ),
        pytest.param(TWO | {"NCCL_SOCKET_IFNAME": "ib"}, 79, "no-interface: NCCL_SOCKET_IFNAME=ib", id="14: NCCL's"),
    ],
)
def test_said_at_once_before_any_network(environ, status, words):
    done = python(JOB, **environ)
    assert done.returncode == status and done.stderr.count("\n") == 1
    assert re.match(f"allranks: {words}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param({}, "rank [01] sees no GPU .the container was started without --gpus all", id="19: no GPU"),
        pytest.param(
            {"GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}, "sees no GPU .CUDA_VISIBLE_DEVICES hides", id="19: hidden"
        ),
        pytest.param({"GPUS": "1"}, "rank 1 has LOCAL_RANK=1 with 1 GPU", id="19: LOCAL_RANK >= GPUs"),
        pytest.param(
            {"GPUS": "2", "DRIVER": "470.256.02 11040"},
            r"the NVIDIA driver 470.256.02 offers CUDA 11, and this torch is built for CUDA 1\d.*a driver of 5\d\d",
            id="19: driver too old",
        ),
    ],
)
def test_nccl_that_cannot_work_is_said_at_once_recorded_driver(environ, words):
    if "DRIVER" in environ:
        import torch

        if torch.version.cuda is None:
            pytest.skip("this torch is built without CUDA")
    done = python(JOB, NPROC_PER_NODE="2", BACKEND="nccl", **DRIVER, **environ)
    assert done.returncode == 81 and "Traceback" not in done.stderr, done.stderr
    assert re.search(f"allranks: gpu-unusable: .*{words}", done.stderr), done.stderr


def test_19_a_gpu_of_its_own_for_each_rank_is_no_error_recorded_driver():
    """Slurm's --gpus-per-task: every task sees one GPU, its own, and has another local rank."""
    check = "import os; from allranks import mend; mend.check_nccl(os.environ); print('fine')"
    environ = {"RANK": "1", "LOCAL_RANK": "1", "GPUS": "2", "CUDA_VISIBLE_DEVICES": "1"}
    assert python("-c", check, **DRIVER, **environ).stdout == "fine\n"


@pytest.mark.parametrize("backend", ["", "nccl"])
@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        pytest.param("1", "a rank of .* share GPU-5a1b0000", id="20: one GPU for two"),
        pytest.param(
            None, "node 1 on .* sees no GPU, node 0 on .* sees 1|rank 1 sees no GPU", id="one for the first only"
        ),
    ],
)
def test_ranks_without_a_gpu_each_train_with_gloo_unless_nccl_was_asked_for_recorded_driver(gpus, words, backend):
    one = {"NPROC_PER_NODE": "1", "SING_WORLD_SIZE": "2", "SING_MASTER_ADDR": "localhost", "ALLRANKS_SIMULATED": "1"}
    one |= {"SING_JOB_NAME": "t", "SING_HOSTNAME_SUFFIX": "s", "MASTER_PORT": str(free_port())} | DRIVER
    one |= {"BACKEND": backend} if backend else {}
    nodes = [start_python(JOB, SING_RANK="0", GPUS="1", **one)]
    nodes.append(start_python(JOB, SING_RANK="1", **one | ({"GPUS": gpus} if gpus else {})))
    ends = [(node.communicate(timeout=60), node.returncode) for node in nodes]
    for (_, said), status in ends:
        assert status == (81 if backend else 0), said
        assert re.search(words, said), said
        assert ("BACKEND=gloo" in said) != bool(backend)


def test_21_a_small_dev_shm_is_said_with_the_flag_that_mends_it_recorded_driver(engine):
    logs = engine.containers.run(
        "allranks-base",
        ["python", "/failures/job.py"],
        environment={"NPROC_PER_NODE": "2", "GPUS": "2", "PYTHONPATH": "/failures/driver", "OMP_NUM_THREADS": "1"},
        volumes={str(HERE): {"bind": "/failures", "mode": "ro"}},
        network_mode="none",
        stderr=True,
        remove=True,
    )
    assert b"warning: /dev/shm has 64 MiB for 2 ranks" in logs and b"--shm-size=1g" in logs


def test_22_more_local_ranks_than_cores():
    done = python(JOB, NPROC_PER_NODE="16")
    ranks = done_lines(done.stdout)
    assert done.returncode == 0 and len(ranks) == 16, done.stderr
    assert {rank["threads"] for rank in ranks} == {"1"}


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "::1", "[::1]:{port}", "localhost."])
def test_23_forms_of_an_address(address):
    port = str(free_port())
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": address.format(port=port), "LOCAL_RANK": "0"}
    environ |= {} if "{port}" in address else {"MASTER_PORT": port}
    first = {"MASTER_PORT": port} if address[0] != "[" and "{port}" in address else {}
    nodes = [start_python(JOB, RANK=str(rank), **environ, **(first if rank == 0 else {})) for rank in range(2)]
    said = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said


def test_a_hundred_starts_leave_nothing_behind(tmp_path):
    """100 jobs of 4 local ranks, one after the other, from one interpreter that has imported torch."""
    starts, scratch = tmp_path / "starts.py", tmp_path / "scratch"
    starts.write_text(STARTS)
    scratch.mkdir()
    environ = {"NPROC_PER_NODE": "4", "OMP_NUM_THREADS": "1", "STEPS": "1", "TMPDIR": str(scratch)}
    done = python(starts, JOB, timeout=400, **environ)
    assert done.stdout.splitlines()[-1:] == ["0 failed, 0 left"], done.stderr[-2000:]
    assert done.stdout.count("done rank=") == 400 and list(scratch.iterdir()) == []


STARTS = """
import os, runpy, sys
import torch, torch._dynamo
failed = left = 0
sys.argv = sys.argv[1:]
for number in range(100):
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        runpy.run_path(sys.argv[0], run_name="__main__")
    failed += os.waitpid(child, 0)[1] != 0
    try:
        os.killpg(child, 0)  # is any process of its group still there?
        left += 1
    except ProcessLookupError:
        pass
print(failed, "failed,", left, "left")
"""
