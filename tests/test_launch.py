"""What launch() promises: torchrun's environment in every rank, the right status, nobody left behind."""

import os
import re
import signal
import socket
import sys

import pytest
from conftest import python, start_python, wait_until

from allranks.launchers import LAUNCHERS
from allranks.network import free_port

REPORT = """
import json, os, sys
import torch
import allranks
allranks.launch()
torch.distributed.init_process_group("gloo")
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK SING_HOST_ADDR POD_ADDR MASTER_ADDR".split()
seen = {name: os.environ.get(name) for name in names}
print(json.dumps(seen | {"pid": os.getpid(), "threads": torch.get_num_threads(), "argv": sys.argv[1:]}))
torch.distributed.destroy_process_group()
"""

MEET = """
import os, sys, time
import torch
import torch.distributed as dist
import allranks
allranks.launch()
dist.init_process_group("gloo")
total = torch.ones(1); dist.all_reduce(total)
print(f"met {dist.get_rank()} of {int(total)}", flush=True)
if dist.get_rank() == int(sys.argv[1]):
    exec(sys.argv[2])
dist.barrier()
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
dist.destroy_process_group()
"""

FAIL_ONCE = """
import os, sys
import torch, torch.distributed as dist
import allranks
allranks.launch()
dist.init_process_group("gloo")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    sys.exit(3)
dist.barrier()
print("ended", dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
"""

LET_GO = """
import sys
import torch, torch.distributed as dist
import allranks
allranks.launch()
sys.setswitchinterval(2)
dist.init_process_group("gloo")
everyone = [None] * dist.get_world_size()
for _ in range(20):
    dist.all_gather_object(everyone, "x" * 1000)
dist.destroy_process_group()
print("ended")
"""

COME_LATE = """
import os, pathlib, sys, time
import allranks
from torch import distributed as dist
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
(folder / f"rank{rank}.new").write_text(str(os.getpid()))
(folder / f"rank{rank}.new").rename(folder / f"rank{rank}")
while not (folder / "come").exists():
    time.sleep(0.01)
allranks.launch()
dist.init_process_group("gloo")
dist.destroy_process_group()
print("ended")
"""


def simulate(script, *args, launcher="sing", nnodes=2, nproc=2, **environ):
    shape = ["--launcher", launcher, "--nnodes", nnodes, "--nproc-per-node", nproc]
    return python("-m", "allranks", "simulate", *shape, sys.executable, script, *args, **environ)


def torchrun(*args, module="run", **options):
    # its own default port may be another job's
    return python("-m", f"torch.distributed.{module}", "--master-port", free_port(), *args, **options)


def reports(done):
    import json

    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda report: int(report["RANK"]))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_every_launcher_gives_every_rank_its_place(script, row):
    nnodes = 1 if row.name == "none" else 2
    ranks = reports(simulate(script(REPORT), launcher=row.name, nnodes=nnodes, OMP_NUM_THREADS="1"))
    assert [report["RANK"] for report in ranks] == [str(rank) for rank in range(nnodes * 2)]
    assert {report["WORLD_SIZE"] for report in ranks} == {str(nnodes * 2)}
    if row.name == "sing":
        suffix = "test-service.demo-project.svc.cluster.local"
        assert [r["SING_HOST_ADDR"] for r in ranks] == [f"test-{i}.{suffix}" for i in (0, 0, 1, 1)]
    if row.name == "pods":
        assert ranks[3]["POD_ADDR"] == "test-1.test-service.demo-project.svc.cluster.local"
    if row.level == "node":
        assert [(r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"], r["GROUP_RANK"]) for r in ranks[-2:]] == [
            ("0", "2", str(nnodes - 1)),
            ("1", "2", str(nnodes - 1)),
        ]


def test_one_local_rank_runs_in_place(script):
    child = start_python(script(REPORT))
    output = child.communicate(timeout=60)[0]
    assert f'"pid": {child.pid}' in output and '"WORLD_SIZE": "1"' in output


def test_cpus_are_shared_among_the_local_ranks(script):
    ranks = reports(python(script(REPORT), NPROC_PER_NODE="2"))
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {report["threads"] for report in ranks} <= set(range(1, share + 1))
    assert {r["threads"] for r in reports(python(script(REPORT), NPROC_PER_NODE="2", OMP_NUM_THREADS="3"))} == {3}


def test_the_cgroup_limits_the_cpus(tmp_path):
    from allranks.machine import cpu_limit

    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert cpu_limit(str(tmp_path)) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_limit(str(tmp_path)) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cpu_limit(str(tmp_path)) == 1


@pytest.mark.parametrize("flags", [(), ("--no-fork",)], ids=["fork", "fresh"])
def test_run_starts_a_script_that_knows_nothing_of_us(script, flags):
    path = script(REPORT.replace("import allranks\n", "").replace("allranks.launch()\n", ""))
    done = python("-m", "allranks", "run", *flags, "--nproc-per-node", "2", path, "--lr", "1", OMP_NUM_THREADS="1")
    assert [(r["RANK"], r["argv"], r["threads"]) for r in reports(done)] == [
        ("0", ["--lr", "1"], 1),
        ("1", ["--lr", "1"], 1),
    ]


def test_run_starts_any_command(tmp_path):
    # rank 1 fails only once rank 0 has spoken: a failure stops the others at once
    speak = "echo rank $RANK of $WORLD_SIZE; touch $RANK; until [ -e 0 ]; do sleep 0.05; done; exit $((RANK * 7))"
    command = ["bash", "-c", f"cd {tmp_path}; {speak}"]
    done = python("-m", "allranks", "run", "--nproc-per-node", "2", *command)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert done.returncode == 7


def test_the_old_launcher_and_its_option(script):
    done = torchrun("--nproc-per-node", "2", script(REPORT), "--lr", "1", module="launch")
    assert [(r["RANK"], r["LOCAL_RANK"], r["argv"]) for r in reports(done)] == [
        ("0", "0", ["--lr", "1"]),
        ("1", "1", ["--lr", "1"]),
    ]


@pytest.mark.parametrize(
    ("crash", "status", "words"),
    [
        ("sys.exit(7)", 7, "exited with status 7"),
        ("sys.exit('no luck')", 1, "no luck"),
        ("1/0", 1, "ZeroDivisionError: division by zero"),
        ("os._exit(5)", 5, "exited with status 5"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ("raise KeyboardInterrupt", 130, "exited with status 130"),
    ],
)
def test_the_first_failing_rank_gives_the_status(script, crash, status, words):
    done = python(script(MEET), "1", crash, NPROC_PER_NODE="3")
    assert done.returncode == status
    assert words in done.stderr
    assert "allranks: rank-failed: rank 1 of 3 (local rank 1 on " in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("shape", ["run", "simulate"])
def test_no_process_is_left_behind(script, number, shape):
    how = ["--nproc-per-node", "2"] if shape == "run" else ["--nnodes", "2", "--nproc-per-node", "2", sys.executable]
    path = script(MEET.replace("met", "{os.getpid()} met"))
    parent = start_python("-m", "allranks", shape, *how, path, "-1", "", "60")
    ranks = [int(parent.stdout.readline().split()[0]) for _ in range(2 if shape == "run" else 4)]
    assert all(map(alive, ranks))
    parent.send_signal(number)
    parent.communicate(timeout=30)
    assert parent.returncode == (128 + number if number == signal.SIGTERM else -number)
    wait_until(lambda: not any(map(alive, ranks)), timeout=15)


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_end_of_a_gloo_group_never_hangs(script, attempt):
    # plain torch hangs in two of three such runs, and once in twenty without the switch interval: see allranks/mend.py
    done = torchrun("--nproc-per-node", "4", script(LET_GO), timeout=60)
    assert done.stdout.split() == ["ended"] * 4


def test_ranks_that_torchrun_has_started_again(script):
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
        script(FAIL_ONCE),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["ended 0 1", "ended 1 1"]


def test_ranks_whose_torchrun_met_at_a_store_that_has_been_started_again(script, tmp_path):
    # between torchrun's own meeting and that of its ranks: the new one would wait for a node that never comes
    port, late = free_port(), script(COME_LATE)

    def node(rank):
        shape = f"--nnodes=2 --node-rank={rank} --master-addr=127.0.0.1 --master-port={port}".split()
        return start_python("-m", "torch.distributed.run", *shape, late, tmp_path)

    with node(0) as first, node(1) as second:
        wait_until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)))
        for pid in (first.pid, int((tmp_path / "rank0").read_text())):
            os.kill(pid, signal.SIGKILL)
        first.communicate()
        with node(0) as first:
            wait_until(lambda: answers(port))
            (tmp_path / "come").touch()
            _, said = second.communicate(timeout=60)
            assert second.returncode
            assert f"node 1's torchrun met the others at 127.0.0.1:{port}, and that store has gone" in said
            with node(1) as second:
                for one in (first, second):
                    stdout, stderr = one.communicate(timeout=60)
                    assert (one.returncode, stdout) == (0, "ended\n"), stderr


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("last_words", ["", "dist.destroy_process_group()"], ids=["left open", "destroyed"])
def test_an_interpreter_ends_while_a_gloo_thread_still_has_a_tensor_to_free(script, last_words):
    done = torchrun("--nproc-per-node", "4", script(LET_GO.partition("dist.destroy")[0] + last_words), timeout=60)
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "this Open MPI does not say where mpirun was started.*-x MASTER_ADDR=HOST"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://203.0.113.1,203.0.113.2:41043"},
            r"rank 0 is on \S+, not where mpirun was started \(203.0.113.1, 203.0.113.2\).*-x MASTER_ADDR=HOST",
        ),
        ({"PMI_RANK": "0", "PMI_FD": "99"}, "its process manager does not answer on PMI_FD.*-genv MASTER_ADDR HOST"),
        ({"PMI_RANK": "0"}, "its process manager offers no PMI_FD.*-genv MASTER_ADDR HOST"),
    ],
)
def test_mpi_ranks_that_cannot_find_their_master_say_so(script, environ, words):
    if "PMI_RANK" in environ:
        environ |= {"PMI_SIZE": "2"}
    else:
        environ |= {f"OMPI_COMM_WORLD_{name}": value for name, value in (("SIZE", "2"), ("LOCAL_SIZE", "1"))}
        environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    done = python(script("import allranks\nallranks.launch()\n"), **environ)
    assert done.returncode == 65 and done.stderr.count("\n") == 1
    assert re.match(f"allranks: missing-variable: MASTER_ADDR not set, and {words}", done.stderr)


def test_a_late_master_is_waited_for(script):
    port = str(free_port())
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path = script("import allranks\nallranks.launch()\n")
    with start_python(path, RANK="1", **address) as waiting:
        said = waiting.stderr.readline()
        assert python(path, RANK="0", **address).returncode == 0
        waiting.communicate(timeout=30)
    where = f"127.0.0.1:{port}"
    assert said.startswith(f"allranks: waiting for the master {where} (10 of 600 s): its host is up, its port is not")
    assert waiting.returncode == 0


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        (
            {"MASTER_ADDR": "nowhere.invalid"},
            69,
            "master-unresolved: the master's name 'nowhere.invalid' does not resolve",
        ),
        ({"MASTER_PORT": "1"}, 70, "master-refused: 127.0.0.1 (127.0.0.1) refuses"),
        ({"RANK": "x"}, 66, "invalid-variable: RANK='x'"),
        ({"ALLRANKS_RENDEZVOUS_TIMEOUT": "0"}, 66, "invalid-variable: ALLRANKS_RENDEZVOUS_TIMEOUT='0'"),
        ({"ALLRANKS_STALL_TIMEOUT": "1m"}, 66, "invalid-variable: ALLRANKS_STALL_TIMEOUT='1m'"),
    ],
)
def test_what_stops_a_start_is_said_in_one_line(script, environ, status, words):
    defaults = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "ALLRANKS_RENDEZVOUS_TIMEOUT": "1"}
    done = python(script("import allranks\nallranks.launch()\n"), **defaults | environ)
    assert done.returncode == status
    assert done.stderr.startswith(f"allranks: {words}") and done.stderr.count("\n") == 1


def test_a_taken_port_is_said_by_rank_0(script):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = python(
            script("import allranks\nallranks.launch()\n"),
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
    assert done.returncode == 72
    assert f"port-taken: port {port} of {socket.gethostname()}" in done.stderr


def test_two_jobs_of_one_node_share_a_host(script):
    path = script(MEET)
    jobs = [start_python(path, "-1", "", NPROC_PER_NODE="2") for _ in range(2)]
    outputs = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert all(sorted(output.splitlines()) == ["met 0 of 2", "met 1 of 2"] for output in outputs)


def test_a_torchrun_that_knows_less_than_the_platform_is_told(script):
    sing = {"SING_RANK": "0", "SING_WORLD_SIZE": "2", "SING_JOB_NAME": "t", "SING_HOSTNAME_SUFFIX": "s"}
    done = torchrun(script(REPORT), **sing, SING_MASTER_ADDR="t-0.s")
    assert done.returncode == 0
    assert "warning: SING Cloud has SING_WORLD_SIZE=2 nodes, but torchrun was started with 1" in done.stderr


def test_scratch_files_are_gone(script, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert python(script(REPORT), NPROC_PER_NODE="2", TMPDIR=str(scratch)).returncode == 0
    assert [path.name for path in scratch.iterdir() if path.name.startswith(("allranks", "torchelastic"))] == []
