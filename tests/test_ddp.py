"""example.py, start.py, master_worker.py and serve.sh, run as a user would. main.py has a file of its own."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from conftest import DDP, ROOT, clean_environ, done_lines, python, run, start, wait_until

from allranks.launchers import LAUNCHERS
from allranks.network import free_port

BIN = Path(sys.executable).parent
EXPECTED = Path(__file__).parent / "expected"
WITH_TORCHRUN = {"PATH": f"{BIN}:{os.environ['PATH']}"}


def torchrun(*args, **options):
    port = {"MASTER_PORT": str(free_port())}
    return python("-m", "torch.distributed.run", "--master-port", port["MASTER_PORT"], *args, cwd=DDP, **options)


def simulate(*command, launcher="sing", nnodes=2, nproc=2, **environ):
    shape = ["--launcher", launcher, "--nnodes", nnodes, "--nproc-per-node", nproc]
    return python("-m", "allranks", "simulate", *shape, *command, cwd=DDP, **environ)


# --- example.py ------------------------------------------------------------------------------------------------------


def test_example_ends_with_equal_weights_and_a_smaller_loss():
    done = torchrun("--nproc-per-node", 3, "example.py")
    assert done.returncode == 0, done.stderr
    ranks = done_lines(done.stdout)
    assert [rank["rank"] for rank in ranks] == ["0", "1", "2"]
    assert len({rank["weights"] for rank in ranks}) == 1 and len({rank["loss"] for rank in ranks}) == 3
    for rank in ranks:
        before, after = map(float, rank["loss"].split("->"))
        assert after < before / 4


@pytest.mark.parametrize(
    "left_out", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_example_says_what_is_missing(left_out):
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    given |= {"MASTER_PORT": str(free_port())}
    done = python("example.py", cwd=DDP, **{name: value for name, value in given.items() if name != left_out})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"example.py: {left_out} not set: ") and done.stderr.count("\n") == 1


def test_example_fails_where_the_loss_does_not_fall_or_the_weights_differ(tmp_path):
    text = (DDP / "example.py").read_text()
    for right, wrong, words in (
        ("lr=0.03", "lr=0.0", "the loss did not fall"),
        ("ddp = DistributedDataParallel(model)", "ddp = model", "the ranks ended with different weights"),
    ):
        assert right in text
        (tmp_path / "broken.py").write_text(text.replace(right, wrong))
        done = torchrun("--nproc-per-node", 2, tmp_path / "broken.py")
        assert done.returncode == 1 and words in done.stderr and "done " not in done.stdout


# --- start.py --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("how", ["alone", "torchrun", "torch.distributed.launch"])
def test_start_shows_what_each_call_does(how, nproc):
    if how == "alone":
        done = python("start.py", cwd=DDP, NPROC_PER_NODE=str(nproc))
    elif how == "torchrun":
        done = torchrun("--nproc-per-node", nproc, "start.py")
    else:
        options = ["--nproc-per-node", nproc, "--master-port", free_port()]
        done = python("-m", how, *options, "start.py", cwd=DDP)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if not line.startswith("done")]
    assert shown == (EXPECTED / f"start-{nproc}.txt").read_text().splitlines()
    assert [(rank["rank"], rank["calls"]) for rank in done_lines(done.stdout)] == [(str(i), "10") for i in range(nproc)]


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_start_meets_under_every_launcher(row):
    nnodes = 1 if row.name == "none" else 2
    done = simulate(sys.executable, "start.py", launcher=row.name, nnodes=nnodes, nproc=2)
    assert done.returncode == 0, done.stderr
    assert len(done_lines(done.stdout)) == nnodes * 2


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_a_script_without_our_line_trains_under_every_launcher(row):
    nnodes = 1 if row.name == "none" else 2
    run = [sys.executable, "-m", "allranks", "run", "example.py"]
    done = simulate(*run, launcher=row.name, nnodes=nnodes, nproc=2)
    assert done.returncode == 0, done.stderr
    ranks = done_lines(done.stdout)
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [
        (str(i), str(nnodes * 2)) for i in range(nnodes * 2)
    ]
    assert len({rank["weights"] for rank in ranks}) == 1


@pytest.mark.parametrize("launcher", ["torchrun", "pods", "bare"])
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_start_meets_at_an_address_and_in_a_file(tmp_path, method, launcher):
    url = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path}/meet"
    if launcher == "torchrun":
        done = torchrun("--nproc-per-node", 2, "start.py", "--init-method", url)
    else:
        done = simulate(sys.executable, "start.py", "--init-method", url, launcher=launcher, nproc=1)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if not line.startswith("done")]
    assert shown == (EXPECTED / "start-2.txt").read_text().splitlines()


def test_rank_and_world_size_are_enough_for_an_address():
    url, done = f"tcp://127.0.0.1:{free_port()}", []
    command = [sys.executable, "start.py", "--init-method", url]
    ranks = [start(*command, cwd=DDP, WORLD_SIZE="2", RANK=rank) for rank in "01"]
    for rank in ranks:
        done += done_lines(rank.communicate(timeout=60)[0])
    assert [rank["world_size"] for rank in done] == ["2", "2"]


def test_start_fails_when_a_result_is_wrong(tmp_path):
    text = (DDP / "start.py").read_text()
    for right, wrong in (
        ("dist.all_reduce(out)", "None"),
        ("dist.barrier()", "None"),
        ("dist.broadcast(out, src=0)", "None"),
    ):
        assert text.count(right)
        (tmp_path / "broken.py").write_text(text.replace(right, wrong, 1))
        done = python(tmp_path / "broken.py", NPROC_PER_NODE="2")
        assert done.returncode == 1 and "AssertionError" in done.stderr, right


def test_the_bench_is_a_table_and_a_picture(tmp_path):
    picture = tmp_path / "bandwidth.png"
    done = python("start.py", "--bench", picture, cwd=DDP, NPROC_PER_NODE="3")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"(all|reduce|broadcast)\w*  ", line)]
    assert {row[0] for row in rows} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    factors = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_to_all": 2 / 3, "broadcast": 1}
    for call, size, microseconds, algorithm, bus in rows:
        if int(size) > 1_000_000:  # of the small ones the table has too few digits
            assert float(algorithm) == pytest.approx(int(size) / float(microseconds) / 1e3, rel=0.02)
            assert float(bus) == pytest.approx(float(algorithm) * factors[call], rel=0.02)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


# --- master_worker.py ------------------------------------------------------------------------------------------------


def test_the_master_plans_for_its_workers():
    done = simulate(sys.executable, "master_worker.py", launcher="thd", nnodes=3, nproc=1)
    assert (done.returncode, done.stderr) == (0, "")
    master, *workers = done_lines(done.stdout)
    assert master["role"] == "master" and [worker["role"] for worker in workers] == ["worker", "worker"]
    assert master["eigenvalue"] == master["expected"]
    assert int(master["jobs"]) == sum(int(worker["jobs"]) for worker in workers) > 6


def test_the_master_and_two_workers_by_default_and_never_alone():
    done = python("master_worker.py", cwd=DDP)
    assert done.returncode == 0 and len(done_lines(done.stdout)) == 3
    done = python("master_worker.py", cwd=DDP, NPROC_PER_NODE="1")
    assert done.returncode == 1 and done.stderr.startswith("master_worker.py: WORLD_SIZE is 1")


# --- serve.sh --------------------------------------------------------------------------------------------------------


def serve(*args, cwd=DDP, **environ):
    return run("./serve.sh", *args, cwd=cwd, **WITH_TORCHRUN | environ)


def test_serve_runs_the_example_without_a_gpu():
    done = serve()
    assert done.returncode == 0, done.stderr
    assert len({rank["weights"] for rank in done_lines(done.stdout)}) == 1
    assert [rank["world_size"] for rank in done_lines(done.stdout)] == ["2", "2"]
    assert "no GPU here: 2 ranks on the CPU" in done.stderr


def test_serve_passes_arguments_and_takes_a_count(tmp_path):
    script = tmp_path / "train me.py"
    script.write_text("import os, sys; print('args', sys.argv[1:], os.environ['LOCAL_WORLD_SIZE'])")
    done = serve(script, "--lr", "0.1", "two words", "$HOME", NPROC_PER_NODE="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["args ['--lr', '0.1', 'two words', '$HOME'] 3"] * 3
    assert "no GPU" not in done.stderr


@pytest.mark.parametrize("launcher", ["pet", "sing", "pods", "thd", "bare", "torchrun"])
def test_serve_takes_nodes_and_master_from_the_launcher(launcher):
    done = simulate("./serve.sh", launcher=launcher, nproc=2, PET_STANDALONE="", **WITH_TORCHRUN)
    assert done.returncode == 0, done.stderr
    ranks = done_lines(done.stdout)
    assert [rank["rank"] for rank in ranks] == ["0", "1", "2", "3"]
    assert len({rank["weights"] for rank in ranks}) == 1


def test_serve_leaves_an_elastic_job_to_torchrun():
    endpoint = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"localhost:{free_port()}", "PET_RDZV_ID": "x"}
    elastic = {"PET_NNODES": "2:2", "PET_NPROC_PER_NODE": "1", "PET_STANDALONE": "", **endpoint}
    nodes, done = [start("./serve.sh", cwd=DDP, **WITH_TORCHRUN | elastic) for _ in range(2)], []
    for node in nodes:
        done += done_lines(node.communicate(timeout=100)[0])
    assert sorted((rank["rank"], rank["world_size"]) for rank in done) == [("0", "2"), ("1", "2")]


def test_serve_forwards_a_signal_and_leaves_nobody_behind(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    served = start("./serve.sh", script, cwd=DDP, **WITH_TORCHRUN)
    ranks = [int(served.stdout.readline()) for _ in range(2)]
    served.send_signal(signal.SIGTERM)
    served.communicate(timeout=60)
    assert served.returncode not in (0, None)
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def test_serve_hands_on_a_failure_and_says_what_it_cannot_do(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit('out of luck')")
    done = serve(script)
    assert done.returncode == 1 and "out of luck" in done.stderr
    done = serve("nowhere.py", SING_RANK="0")
    assert done.returncode == 65 and "allranks: missing-variable: SING_WORLD_SIZE" in done.stderr
    lonely = tmp_path / "serve.sh"
    lonely.write_bytes((ROOT / "scripts/serve.sh").read_bytes())
    done = run("bash", lonely, PATH="/usr/bin:/bin")
    assert done.returncode == 127 and done.stderr.startswith("serve.sh: torchrun is not on PATH")


def test_serve_works_in_a_checkout_without_an_active_environment():
    if not (ROOT / ".venv/done").exists():
        pytest.skip("no .venv here: make demo")
    path = ":".join(part for part in clean_environ()["PATH"].split(":") if not Path(part, "torchrun").exists())
    done = run("./serve.sh", "--steps", "5", cwd=ROOT / "scripts", PATH=path)
    assert done.returncode == 0 and len(done_lines(done.stdout)) == 2, done.stderr


def test_dry_run_is_a_torchrun_command():
    where = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "1234"}
    done = python("-m", "allranks", "run", "--nproc-per-node", 4, "--dry-run", "train.py", "a b", **where)
    options = "--nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr=node0 --master-port=1234"
    assert re.fullmatch(rf"env OMP_NUM_THREADS=\d+ torchrun {options} train.py 'a b'\n", done.stdout)
