"""The clusters of compose/, brought up by the real engine."""

import json
import os
import re
import subprocess

import pytest
from conftest import ROOT, done_lines


def compose(*args, timeout=300, **environ):
    # a project of its own: a cluster that somebody has running is left alone
    command = ["docker", "compose", "-p", "allranks-test", *args]
    options = {"cwd": ROOT, "env": os.environ | environ, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=timeout, check=True, **options)


def up(engine, file, **environ):
    """Bring a cluster up and wait for its end; return all that its nodes said. They must all have succeeded."""
    try:
        compose("-f", file, "up", "-d", **environ)
        containers = engine.containers.list(all=True, filters={"label": "com.docker.compose.project=allranks-test"})
        assert len(containers) >= 2
        statuses = [container.wait(timeout=300)["StatusCode"] for container in containers]
        logs = "".join(container.logs().decode() for container in containers)
    finally:
        compose("-f", file, "down", "-t", "2")
    assert not any(statuses), logs
    return logs


@pytest.mark.parametrize("file", ["compose/docker-compose.yml", "compose/pods.yml"])
def test_every_rank_trains_and_says_so(engine, file):
    logs = up(engine, file)
    ranks = done_lines(logs)
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [("0", "2"), ("1", "2")]
    assert len({rank["weights"] for rank in ranks}) == 1
    assert float(ranks[0]["accuracy"]) >= 0.989
    if "pods" in file:
        for rank in (0, 1):
            assert f"rank {rank} of 2 is on test-{rank}.test-service.demo-project.svc.cluster.local cpu" in logs


def test_torchrun_on_two_nodes(engine):
    ranks = done_lines(up(engine, "compose/ddp.yml"))
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [(str(i), "4") for i in range(4)]
    assert len({rank["weights"] for rank in ranks}) == 1


GUIDES_COMMAND = (
    "torchrun --nproc_per_node=2 --master_addr 172.28.176.19 --master_port 15432 --nnodes 2 --node_rank {} start.py"
)


def test_every_call_between_two_nodes_by_the_command_of_the_guide(engine):
    config = compose("-f", "compose/ddp.yml", "config", "--format", "json", SCRIPT="start.py").stdout
    for rank in (0, 1):
        assert " ".join(json.loads(config)["services"][f"node-{rank}"]["command"]) == GUIDES_COMMAND.format(rank)
    lines = up(engine, "compose/ddp.yml", SCRIPT="start.py").splitlines()
    shown = [line for line in lines if re.match(r"(?!allranks)\w+: |  rank \d: ", line)]
    assert shown == (ROOT / "tests/expected/start-4.txt").read_text().splitlines()


@pytest.mark.parametrize("script", ["master_worker.py", "start.py"], ids=["master-worker mode", "process-group mode"])
def test_three_nodes_with_the_variables_of_thd(engine, script):
    ranks = done_lines(up(engine, "compose/thd.yml", SCRIPT=script))
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [(str(i), "3") for i in range(3)]


def submit(file, **environ):
    """Bring up a cluster whose node-0 submits a job and ends with it; return the job's `done` lines."""
    try:
        done = compose("-f", file, "up", "--no-color", "--exit-code-from", "node-0", **environ)
        return done_lines("\n".join(line.partition("| ")[2] for line in done.stdout.splitlines()))
    finally:
        compose("-f", file, "down", "-v", "-t", "2")


MPIRUN = pytest.mark.parametrize("mpirun", ["mpirun -hosts", "mpirun.openmpi --host"], ids=["MPICH", "Open MPI"])


@MPIRUN
def test_mpirun_over_ssh_as_the_guide_has_it(engine, mpirun):
    ranks = submit("compose/mpi.yml", MPIRUN=f"{mpirun} node0,node1,node2 -n 3 python ~jim/project/training.py")
    assert [(rank["rank"], rank["calls"]) for rank in ranks] == [("0", "10"), ("1", "10"), ("2", "10")]


@MPIRUN
def test_mpirun_starts_a_strangers_script(engine, mpirun):
    ranks = submit("compose/mpi.yml", MPIRUN=f"{mpirun} node0,node1 -n 2 python -m allranks run /opt/ddp/example.py")
    assert [rank["rank"] for rank in ranks] == ["0", "1"] and ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.parametrize(
    ("command", "world_size"),
    [
        ("srun -N2 --ntasks-per-node=1 python start.py", 2),
        ("NPROC_PER_NODE=2 srun -N2 --ntasks-per-node=1 python start.py", 4),
        ("srun -N2 --ntasks-per-node=2 python -m allranks run example.py", 4),
        ("srun -N2 --ntasks-per-node=1 --mpi=pmi2 ./serve.sh", 4),
        ("sbatch --wait -N2 --ntasks-per-node=2 -o /tmp/log --wrap 'srun python start.py'; cat /tmp/log", 4),
        ("salloc -N2 srun --ntasks-per-node=1 python start.py", 2),
    ],
    ids=["a task per node", "forked ranks", "a task per rank", "serve.sh", "sbatch", "salloc"],
)
def test_slurm(engine, command, world_size):
    ranks = submit("compose/slurm.yml", SLURM=command)
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [
        (str(i), str(world_size)) for i in range(world_size)
    ]


@pytest.mark.parametrize(
    ("file", "nodes"), [("docker-compose", 2), ("pods", 2), ("ddp", 2), ("thd", 3), ("mpi", 3), ("slurm", 2)]
)
def test_a_gpu_host_gives_every_node_its_gpu(engine, file, nodes):
    files = ["-f", f"compose/{file}.yml", "-f", "compose/gpu.yml"] + ["--profile=node-2"] * (nodes == 3)
    services = json.loads(compose(*files, "config", "--format", "json").stdout)["services"]
    assert sorted(services) == [f"node-{rank}" for rank in range(nodes)]
    for service in services.values():
        device = service["deploy"]["resources"]["reservations"]["devices"][0]
        assert (device["driver"], device["device_ids"]) == ("nvidia", ["0"])
        assert service["environment"]["BACKEND"] == "gloo" and len(service["environment"]) > 1


def test_plain_docker_compose_finds_the_cluster(engine):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
    done = subprocess.run(
        ["docker", "compose", "config", "--services"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.split()) == ["node-0", "node-1"]
