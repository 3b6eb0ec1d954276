"""Environment in, World or error out: one row per case."""

import pytest

from allranks import resolve
from allranks.errors import InvalidVariable, LauncherConflict, MasterIsLoopback, MissingVariable
from allranks.launchers import LAUNCHERS
from allranks.resolve import split_address
from allranks.simulate import environments

SUFFIX = "test-service.demo-project.svc.cluster.local"
SING = {
    "SING_RANK": "1",
    "SING_WORLD_SIZE": "2",
    "SING_JOB_NAME": "test",
    "SING_HOSTNAME_SUFFIX": SUFFIX,
    "SING_MASTER_ADDR": f"test-0.{SUFFIX}",
}
PODS = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "JOB_NAME": "test",
    "SVC_NAME": "test-service",
    "POD_NAMESPACE": "demo-project",
    "MASTER_ADDR": f"test-0.{SUFFIX}",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
BARE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
THD = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "node0:29500"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "7",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "4",
}
# what Kubeflow's PyTorchJob adds: WORLD_SIZE counts processes there, RANK nodes
PYTORCHJOB = PET | {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "job-node-0-0.job", "MASTER_PORT": "29400"}
THD_MASTER = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SING, {"launcher": "sing", "level": "node", "node_rank": 1, "nnodes": 2, "rank": None, "world_size": None}),
        (SING, {"master_addr": f"test-0.{SUFFIX}", "master_port": 29500, "host_addr": f"test-1.{SUFFIX}"}),
        (SING | {"NPROC_PER_NODE": "4"}, {"world_size": 8, "local_world_size": 4, "rank": None, "local_rank": None}),
        (SING | {"NPROC_PER_NODE": "1"}, {"world_size": 2, "rank": 1, "local_rank": 0}),
        (SING | {"SING_HOST_ADDR": "given"}, {"host_addr": "given"}),
        (PODS, {"launcher": "pods", "level": "node", "node_rank": 1, "nnodes": 2, "host_addr": f"test-1.{SUFFIX}"}),
        (PODS | {"MASTER_PORT": "1234"}, {"master_port": 1234}),
        (PODS | {"LOCAL_RANK": "0"}, {"launcher": "bare", "level": "process", "rank": 1, "world_size": 2}),
        (TORCHRUN, {"launcher": "torchrun", "level": "process", "rank": 3, "world_size": 4, "local_rank": 1}),
        (TORCHRUN, {"node_rank": 1, "nnodes": 2, "local_world_size": 2, "master_port": 29400}),
        (TORCHRUN | {"MASTER_ADDR": "127.0.0.1"}, {"master_addr": "127.0.0.1"}),
        (BARE, {"launcher": "bare", "level": "process", "rank": 1, "local_rank": None, "nnodes": None}),
        (BARE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {"local_rank": 1, "local_world_size": 2}),
        (BARE | {"MASTER_ADDR": "fd00::1"}, {"launcher": "bare", "master_addr": "fd00::1", "master_port": 29400}),
        (BARE | {"MASTER_ADDR": "node0.lan."}, {"master_addr": "node0.lan."}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"launcher": "bare", "master_addr": "127.0.0.1", "local_world_size": 1}),
        (THD, {"launcher": "thd", "level": "process", "rank": 2, "master_addr": "node0", "master_port": 29500}),
        (THD | {"MASTER_PORT": "1"}, {"master_port": 29500}),  # "worker nodes ignore it"
        (THD_MASTER, {"launcher": "thd", "rank": 0, "master_addr": None, "master_port": 29500}),
        (THD_MASTER | {"MASTER_ADDR": "x:1"}, {"master_addr": None, "master_port": 29500}),  # "the master ignores it"
        (OPENMPI, {"launcher": "openmpi", "level": "process", "rank": 3, "world_size": 4, "master_addr": None}),
        (OPENMPI | {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}, {"master_addr": "node0", "master_port": 1234}),
        (OPENMPI, {"local_rank": 1, "local_world_size": 2, "node_rank": None}),
        (MPICH, {"launcher": "mpich", "rank": 3, "world_size": 4, "local_rank": 1, "master_addr": None}),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, {"launcher": "mpich", "master_addr": "127.0.0.1", "nnodes": 1}),
        (PET, {"launcher": "pet", "level": "node", "node_rank": 1, "nnodes": 2, "world_size": 8, "master_port": 29400}),
        (PET | {"PET_NPROC_PER_NODE": "auto"}, {"world_size": None, "local_world_size": None}),
        (PET | {"NPROC_PER_NODE": "2"}, {"world_size": 4}),
        (PYTORCHJOB | {"PET_STANDALONE": ""}, {"launcher": "pet", "node_rank": 1, "world_size": 8}),
        (PYTORCHJOB | {"POD_NAMESPACE": "default"}, {"launcher": "pet"}),
        ({}, {"launcher": "none", "level": "node", "node_rank": 0, "nnodes": 1, "master_port": 29500}),
        ({"JOB_NAME": "jenkins", "POD_NAMESPACE": "ci"}, {"launcher": "none"}),
        # an inner launcher wins over what it runs in
        (SING | TORCHRUN, {"launcher": "torchrun", "rank": 3}),
        (PODS | TORCHRUN, {"launcher": "torchrun", "rank": 3}),
        (SING | BARE | {"LOCAL_RANK": "0"}, {"launcher": "bare", "rank": 1}),
        (PODS | OPENMPI, {"launcher": "openmpi", "rank": 3}),
        (PYTORCHJOB | MPICH, {"launcher": "mpich", "rank": 3}),
        (PET | TORCHRUN, {"launcher": "torchrun", "rank": 3}),
        # two that agree
        (SING | PODS, {"launcher": "sing", "node_rank": 1}),
        (SING | BARE, {"launcher": "sing", "level": "node"}),
        # the user decides
        (SING | PODS | {"RANK": "0", "ALLRANKS_LAUNCHER": "pods"}, {"launcher": "pods", "node_rank": 0}),
    ],
)
def test_world(environ, expected):
    world = resolve(environ)._asdict()
    assert {field: world[field] for field in expected} == expected


@pytest.mark.parametrize("option", [["--local-rank=1"], ["--local_rank=1"], ["--local-rank", "1"]])
def test_local_rank_in_argv(option):
    world = resolve(BARE, ["train.py", *option, "--lr", "1"])
    assert (world.local_rank, world.sources["local_rank"]) == (1, "argv")
    assert resolve(BARE | {"LOCAL_RANK": "0"}, ["train.py", *option]).local_rank == 0


def test_sources_name_the_variable():
    assert resolve(SING).sources == {
        "node_rank": "SING_RANK",
        "nnodes": "SING_WORLD_SIZE",
        "master_addr": "SING_MASTER_ADDR",
        "master_port": "default",
        "host_addr": "SING_HOST_ADDR",
    }


NOT_NEEDED = {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_NODE_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}
NOT_NEEDED |= {"PET_MASTER_PORT", "PET_NPROC_PER_NODE"}


@pytest.mark.parametrize("environ", [SING, PODS, TORCHRUN, BARE, THD, OPENMPI, MPICH, PET])
def test_each_variable_left_out_is_named(environ):
    row = resolve(environ).launcher
    for variable in environ.keys() - NOT_NEEDED:
        if row == "bare" and variable == "MASTER_PORT":
            continue  # 29500 where nobody gives one
        with pytest.raises(MissingVariable, match=rf"missing-variable: {variable} not set.*'{row}|bare'"):
            resolve({name: value for name, value in environ.items() if name != variable})


@pytest.mark.parametrize(
    ("environ", "error", "words"),
    [
        (SING | {"SING_RANK": ""}, InvalidVariable, "SING_RANK is empty"),
        (SING | {"SING_RANK": "one"}, InvalidVariable, "SING_RANK='one' is not a number"),
        (SING | {"SING_RANK": "-1"}, InvalidVariable, "SING_RANK=-1; expected a whole number of 0 or more"),
        (
            SING | {"SING_RANK": "2"},
            InvalidVariable,
            "SING_RANK=2 with SING_WORLD_SIZE=2; expected SING_RANK from 0 to 1",
        ),
        (SING | {"SING_WORLD_SIZE": "0"}, InvalidVariable, "SING_WORLD_SIZE=0"),
        (SING | {"SING_MASTER_ADDR": ""}, InvalidVariable, "SING_MASTER_ADDR is empty"),
        (SING | {"SING_MASTER_ADDR": "127.0.0.1"}, MasterIsLoopback, "SING_MASTER_ADDR=127.0.0.1 with 2 nodes"),
        (PODS | {"MASTER_ADDR": "localhost"}, MasterIsLoopback, "MASTER_ADDR=localhost with 2 nodes"),
        (PODS | {"MASTER_ADDR": "[::1]:29500"}, MasterIsLoopback, "with 2 nodes"),
        (BARE | {"RANK": "2"}, InvalidVariable, "RANK=2 with WORLD_SIZE=2"),
        (BARE | {"RANK": "1.0"}, InvalidVariable, "RANK='1.0' is not a number"),
        (BARE | {"RANK": "²"}, InvalidVariable, "is not a number"),
        (
            BARE | {"MASTER_PORT": "65536"},
            InvalidVariable,
            "MASTER_PORT=65536; expected a whole number from 1 to 65535",
        ),
        (BARE | {"MASTER_ADDR": "a b"}, InvalidVariable, "MASTER_ADDR='a b'"),
        (BARE | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, InvalidVariable, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        (BARE | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, InvalidVariable, "LOCAL_WORLD_SIZE=3 with WORLD_SIZE=2"),
        (THD | {"MASTER_ADDR": "node0:x"}, InvalidVariable, "MASTER_ADDR='x' is not a number"),
        (SING | {"NPROC_PER_NODE": "gpu"}, InvalidVariable, "NPROC_PER_NODE='gpu'"),
        (SING | PODS | {"RANK": "0"}, LauncherConflict, "SING_RANK=1 and pods .* says RANK=0.*ALLRANKS_LAUNCHER=sing"),
        (SING | BARE | {"WORLD_SIZE": "4"}, LauncherConflict, "SING_WORLD_SIZE=2 and .* says WORLD_SIZE=4"),
        (
            {"ALLRANKS_LAUNCHER": "sling"},
            InvalidVariable,
            "ALLRANKS_LAUNCHER='sling'; expected one of torchrun, openmpi",
        ),
    ],
)
def test_wrong_input_is_named(environ, error, words):
    with pytest.raises(error, match=words) as raised:
        resolve(environ)
    assert str(raised.value).startswith(f"{error.code}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0", ("node0", None)),
        ("node0:1", ("node0", 1)),
        ("[fd00::1]:1", ("fd00::1", 1)),
        ("[fd00::1]", ("fd00::1", None)),
        ("fd00::1", ("fd00::1", None)),
    ],
)
def test_split_address(text, expected):
    assert split_address(text, "MASTER_ADDR") == expected


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_a_simulated_cluster_is_recognised_as_what_it_wears(row):
    nnodes = 1 if row.name == "none" else 2
    worlds = [resolve(worn | {"ALLRANKS_SIMULATED": "1"}) for worn in environments(row, nnodes, 2)]
    assert {world.launcher for world in worlds} == {row.name}
    assert {world.world_size for world in worlds} == {nnodes * 2}
    field = "node_rank" if row.level == "node" else "rank"
    assert [getattr(world, field) for world in worlds] == list(range(len(worlds)))
