"""Environment in, World or error out: one row per case."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks import AllranksError, resolve
from allranks.errors import InvalidVariable, LauncherConflict, MasterIsLoopback, MissingVariable
from allranks.launchers import BY_NAME, LAUNCHERS
from allranks.readings import slurm_first_host
from allranks.resolve import split_address
from allranks.simulate import environments, launcher_variables

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
# captured from Open MPI 4.1.4 and MPICH 4.0.2
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "7",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# from its launcher's source
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "4",
}
# what Kubeflow's PyTorchJob adds: WORLD_SIZE counts processes there, RANK nodes
PYTORCHJOB = PET | {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "job-node-0-0.job", "MASTER_PORT": "29400"}
# captured from Slurm 22.05: srun -N2 --ntasks-per-node=2, its last task, in its first step
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[0-1]",
}
SLURM_NODES = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}
# captured: the script of sbatch is no step, and SLURM_PROCID=0 in it says nothing
SBATCH = {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}
# captured: the shell of salloc -N2 with LaunchParameters=use_interactive_step is a step, of one task on one node
SALLOC = {
    "SLURM_JOB_ID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "node0",
}
# captured: srun -N2 --mpi=pmi2 adds these
PMI2 = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "10"}
# from the launchers' documentation
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "LSB_MCPU_HOSTS": "batch1 1 host1 42 host2 42",
}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
VOLCANO = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0.job",
    "MASTER_PORT": "23456",
    "VC_TASK_INDEX": "0",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "job-0.svc"}
PAI_DLC = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456", "NPROC_PER_NODE": "8"}
LOCAL = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
DEEPSPEED = LOCAL | {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"}
AZUREML = LOCAL | {"AZUREML_RUN_ID": "run", "NODE_RANK": "1"}
COMPOSER = LOCAL | {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
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
        (BARE | {"MASTER_ADDR": "node0.lan."}, {"master_addr": "node0.lan"}),
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
        (MVAPICH, {"launcher": "mvapich", "rank": 3, "local_rank": 1, "local_world_size": 2, "master_addr": "node0"}),
        (MPICH | MVAPICH, {"launcher": "mpich", "rank": 3}),  # MVAPICH's other launcher is MPICH's
        (PET, {"launcher": "pet", "level": "node", "node_rank": 1, "nnodes": 2, "world_size": 8, "master_port": 29400}),
        (PET | {"PET_NPROC_PER_NODE": "auto"}, {"world_size": None, "local_world_size": None}),
        (PET | {"PET_NPROC_PER_NODE": "xpu"}, {"local_world_size": None}),
        (PET | {"PET_NNODES": "2:2"}, {"nnodes": 2}),  # as an elastic PyTorchJob with a master has it
        (PET | {"NPROC_PER_NODE": "2"}, {"world_size": 4}),
        (PYTORCHJOB | {"PET_STANDALONE": ""}, {"launcher": "pet", "node_rank": 1, "world_size": 8}),
        (PYTORCHJOB | {"POD_NAMESPACE": "default"}, {"launcher": "pet"}),
        (SLURM, {"launcher": "slurm", "level": "process", "rank": 3, "world_size": 4, "local_rank": 1}),
        (SLURM, {"local_world_size": 2, "node_rank": 1, "nnodes": 2, "master_addr": "node0", "master_port": 10001}),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}, {"local_world_size": 1}),
        (SLURM | {"MASTER_ADDR": "given", "MASTER_PORT": "1234"}, {"master_addr": "given", "master_port": 1234}),
        (SLURM_NODES, {"launcher": "slurm-nodes", "level": "node", "node_rank": 1, "nnodes": 2, "world_size": None}),
        (SLURM_NODES, {"master_addr": "gpu08", "master_port": 10000 + (70123 + 1009) % 20000}),
        (SLURM_NODES | {"NPROC_PER_NODE": "4"}, {"world_size": 8}),
        (SLURM_NODES | PMI2, {"launcher": "slurm-nodes"}),
        (SLURM_NODES | MPICH, {"launcher": "mpich", "rank": 3}),  # an mpirun inside the step
        (SLURM_NODES | TORCHRUN, {"launcher": "torchrun", "rank": 3}),
        (SLURM_NODES | LOCAL, {"launcher": "bare", "rank": 3}),  # whatever runs in the task has started this
        (SLURM | LOCAL, {"rank": 3, "local_rank": 1}),
        (SLURM | {"RANK": "3", "WORLD_SIZE": "4"}, {"launcher": "slurm"}),  # exported by the job's script, and right
        # mpirun's own proxies are the tasks of a step: with one rank per node the two count alike
        (SLURM_NODES | MPICH | PMI2, {"launcher": "mpich", "rank": 1, "local_world_size": 2}),
        (SBATCH, {"launcher": "none"}),
        (SALLOC, {"launcher": "none"}),
        (JSRUN, {"launcher": "lsf", "rank": 3, "local_rank": 1, "master_addr": "host1"}),
        (JSRUN | {"LSB_JOBID": "70123"}, {"master_port": 20123}),
        (JSRUN | {"LSB_MCPU_HOSTS": "host1 42 host2 42"}, {"master_addr": "host1"}),  # no batch host
        (SKYPILOT, {"launcher": "skypilot", "node_rank": 1, "nnodes": 2, "master_addr": "10.0.0.1"}),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}, {"world_size": 16}),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, {"world_size": None}),
        (SAGEMAKER, {"launcher": "sagemaker", "node_rank": 1, "nnodes": 2, "world_size": 16, "master_addr": "algo-1"}),
        (SAGEMAKER | {"RANK": "1", "WORLD_SIZE": "2"}, {"launcher": "sagemaker"}),
        (VOLCANO, {"launcher": "volcano", "level": "node", "node_rank": 1, "master_port": 23456}),
        (BARE | {"VC_CHIEF_HOSTS": "job-chief-0.job"}, {"launcher": "volcano", "node_rank": 1}),  # tasks of any name
        (VOLCANO | {"POD_NAMESPACE": "lab", "NPROC_PER_NODE": "2"}, {"launcher": "volcano", "world_size": 4}),
        (INDEXED_JOB, {"launcher": "indexed-job", "node_rank": 1, "nnodes": 2, "master_addr": "job-0.svc"}),
        ({"JOB_COMPLETION_INDEX": "1"}, {"launcher": "none"}),  # pods that know nothing of each other
        (PET | {"JOB_COMPLETION_INDEX": "1"}, {"launcher": "pet"}),
        (PAI_DLC, {"launcher": "pai-dlc", "level": "node", "node_rank": 1, "world_size": 16}),
        (PODS | {"NPROC_PER_NODE": "4"}, {"launcher": "pods", "world_size": 8}),
        (DEEPSPEED, {"launcher": "deepspeed", "rank": 3, "local_world_size": 2, "node_rank": 1, "nnodes": 2}),
        (AZUREML, {"launcher": "azureml", "rank": 3, "node_rank": 1}),
        (COMPOSER, {"launcher": "composer", "rank": 3, "local_world_size": 2, "node_rank": 1}),
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


EVERY_ROW = [
    *(TORCHRUN, OPENMPI, MPICH, MVAPICH, JSRUN, SLURM, SLURM_NODES, PET, SING, SKYPILOT, SAGEMAKER, VOLCANO, PODS),
    *(INDEXED_JOB, PAI_DLC, DEEPSPEED, AZUREML, COMPOSER, THD, BARE),
]


def row_name(environ):
    return resolve(environ).launcher


def test_every_row_has_an_example_here():
    assert [*map(row_name, EVERY_ROW), "none"] == [row.name for row in LAUNCHERS]


@pytest.mark.parametrize("environ", EVERY_ROW, ids=row_name)
def test_a_variable_left_out_is_named_or_not_needed(environ):
    row = BY_NAME[row_name(environ)]
    for variable in environ:
        less = {name: value for name, value in environ.items() if name != variable}
        try:
            world = resolve(less)
        except AllranksError as error:
            assert type(error) in (MissingVariable, InvalidVariable), error
            assert variable in str(error) or (variable in row.marks and row.name not in str(error)), error
        else:  # it was optional, or what told this launcher from another one
            assert variable not in row.fields.values() or world.launcher != row.name


@pytest.mark.parametrize("value", ["", "x", "-1", "1000000000000", "4096"])
@pytest.mark.parametrize("environ", EVERY_ROW, ids=row_name)
def test_a_wrong_value_is_named_or_harmless(environ, value):
    row = BY_NAME[row_name(environ)]
    counts = {"rank": "world_size", "local_rank": "local_world_size", "node_rank": "nnodes"}
    for field, variable in row.fields.items():
        if (field.startswith("master") and value) or variable not in environ:
            continue  # a host may have any name; a wrong port has a test of its own
        if value == "4096" and counts.get(field) not in row.fields:
            continue  # there may be that many
        with pytest.raises(AllranksError) as raised:
            resolve(environ | {variable: value, "ALLRANKS_LAUNCHER": row.name})
        assert variable in str(raised.value) and "\n" not in str(raised.value)


VARIABLES = sorted(launcher_variables() | {name for environ in EVERY_ROW for name in environ})
VALUES = sorted({value for environ in EVERY_ROW for value in environ.values()})
VALUES += ["", " ", "-1", "[", "[1", "²", "{}", "2(x9"]


@given(
    st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(VALUES) | st.text(), max_size=14), st.integers(0, 30)
)
@settings(max_examples=600, deadline=None, derandomize=True)
def test_whatever_the_environment_there_is_a_world_or_an_error_of_ours(environ, base):
    environ = (EVERY_ROW[base] if base < len(EVERY_ROW) else {}) | environ
    try:
        world = resolve(environ)
    except AllranksError as error:
        assert "\n" not in str(error)
    else:
        assert world.rank is None or 0 <= world.rank < world.world_size
        assert world.node_rank is None or world.nnodes is None or 0 <= world.node_rank < world.nnodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node[0-1]", "node0"),
        ("c7", "c7"),
        ("gpu[08-10,12]", "gpu08"),
        ("a1,b[2-3]", "a1"),
        ("rack[01-04]n[1,3],gpu7", "rack01n1"),
        ("n[3,1]", "n3"),
        ("[1-2]x", "1x"),
    ],
)
def test_the_first_host_of_a_compressed_list(text, expected):
    assert slurm_first_host(text, {}) == expected


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
        (PET | {"PET_NNODES": "1:4"}, InvalidVariable, "PET_NNODES=1:4: an elastic job.*start it as `torchrun SCRIPT`"),
        ({"PET_NNODES": "2:2"}, InvalidVariable, "PET_NNODES=2:2: an elastic job"),
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
