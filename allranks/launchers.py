"""THE TABLE: which variables each launcher sets, and what its rank counts.

One row per launcher, in order of precedence: a row of level "process" is the innermost launcher there can be,
so it wins over every "node" row around it; two "node" rows must agree (see `resolve`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Launcher(NamedTuple):
    """One row.

    name:       what ALLRANKS_LAUNCHER, `--launcher` and messages call it
    title:      for people
    level:      "node": its rank counts nodes, and every node starts one process per GPU;
                "process": it has already started every rank
    marks:      the variables that give it away
    marks_seen: how many of them must be visible before it is recognised
    fields:     field of World -> its variable; all of them must be there
    optional:   the same, for those that may be absent
    docs:       where this is documented
    host_addr:  (variable, template): the address of this node, which the guides let scripts rely on
    meets:      its ranks find their master by the launcher's own means (`mpi.find_master`) where MASTER_ADDR is not set
    covers:     rows that its variables look like, and that are not meant where it is recognised
    example:    variables with constant values that `simulate` adds
    """

    name: str
    title: str
    level: str
    marks: tuple[str, ...]
    marks_seen: int
    fields: Mapping[str, str]
    docs: str
    optional: Mapping[str, str] = MappingProxyType({})
    host_addr: tuple[str, str] | None = None
    meets: bool = False
    covers: tuple[str, ...] = ()
    example: Mapping[str, str] = MappingProxyType({})


_POD = {"node_rank": "RANK", "nnodes": "WORLD_SIZE", "master_addr": "MASTER_ADDR"}
_PROCESS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
}

LAUNCHERS = (
    Launcher(
        name="torchrun",
        title="torchrun, torch.distributed.launch",
        level="process",
        marks=("TORCHELASTIC_RUN_ID",),
        marks_seen=1,
        fields=_PROCESS
        | {"node_rank": "GROUP_RANK", "nnodes": "GROUP_WORLD_SIZE"}
        | {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"},
        docs="https://pytorch.org/docs/2.5/elastic/run.html#environment-variables",
        example={"TORCHELASTIC_RUN_ID": "simulated"},
    ),
    Launcher(
        name="openmpi",
        title="Open MPI's mpirun",
        level="process",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        marks_seen=1,
        # not OMPI_COMM_WORLD_NODE_RANK: it counts the ranks of one node over all its jobs
        fields={"rank": "OMPI_COMM_WORLD_RANK", "world_size": "OMPI_COMM_WORLD_SIZE"}
        | {"local_rank": "OMPI_COMM_WORLD_LOCAL_RANK", "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE"},
        optional={"master_addr": "MASTER_ADDR"},
        meets=True,
        docs="https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html",
    ),
    Launcher(
        name="mpich",
        title="mpirun of MPICH and Intel MPI",
        level="process",
        marks=("PMI_RANK", "PMI_SIZE"),
        marks_seen=1,
        fields={"rank": "PMI_RANK", "world_size": "PMI_SIZE"},
        optional={"local_rank": "MPI_LOCALRANKID", "local_world_size": "MPI_LOCALNRANKS", "master_addr": "MASTER_ADDR"},
        meets=True,
        docs="https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md",
    ),
    Launcher(
        name="pet",
        title="torchrun's PET_ variables, as Kubeflow sets them for each node",
        level="node",
        marks=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
        marks_seen=2,
        fields={"node_rank": "PET_NODE_RANK", "nnodes": "PET_NNODES", "master_addr": "PET_MASTER_ADDR"},
        optional={"local_world_size": "PET_NPROC_PER_NODE", "master_port": "PET_MASTER_PORT"},
        # PyTorchJob sets RANK and WORLD_SIZE, too: the one counts nodes, the other processes
        covers=("pods", "thd", "bare"),
        docs="https://github.com/kubeflow/trainer/blob/8c0f505/pkg/runtime/framework/plugins/torch/torch.go",
    ),
    Launcher(
        name="sing",
        title="SING Cloud",
        level="node",
        marks=("SING_RANK", "SING_WORLD_SIZE", "SING_JOB_NAME", "SING_HOSTNAME_SUFFIX", "SING_MASTER_ADDR"),
        marks_seen=1,
        fields={"node_rank": "SING_RANK", "nnodes": "SING_WORLD_SIZE", "master_addr": "SING_MASTER_ADDR"},
        host_addr=("SING_HOST_ADDR", "{SING_JOB_NAME}-{SING_RANK}.{SING_HOSTNAME_SUFFIX}"),
        docs="images/pytorch-dist-mnist/README.md",
        example={
            "SING_JOB_NAME": "test",
            "SING_HOSTNAME_SUFFIX": "test-service.demo-project.svc.cluster.local",
        },
    ),
    Launcher(
        name="pods",
        title="pods behind a headless Service",
        level="node",
        # JOB_NAME or POD_NAMESPACE alone mean nothing (Jenkins sets the one, many pods have the other)
        marks=("RANK", "WORLD_SIZE", "MASTER_ADDR", "JOB_NAME", "SVC_NAME", "POD_NAMESPACE"),
        marks_seen=4,
        fields=_POD,
        covers=("thd", "bare"),
        host_addr=("POD_ADDR", "{JOB_NAME}-{RANK}.{SVC_NAME}.{POD_NAMESPACE}.svc.cluster.local"),
        docs="images/pytorch-dist-mnist/README.md",
        example={"JOB_NAME": "test", "SVC_NAME": "test-service", "POD_NAMESPACE": "demo-project"},
    ),
    Launcher(
        name="thd",
        title="THD style: MASTER_ADDR=host:port",
        level="process",
        marks=("RANK", "WORLD_SIZE"),  # as "bare", told apart by the form of MASTER_ADDR (see resolve)
        marks_seen=1,
        fields={"rank": "RANK", "world_size": "WORLD_SIZE"},
        optional={"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE", "master_addr": "MASTER_ADDR"},
        docs="https://pytorch.org/docs/2.5/distributed.html#environment-variable-initialization",
    ),
    Launcher(
        name="bare",
        title="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set by hand",
        level="process",
        marks=("RANK", "WORLD_SIZE"),
        marks_seen=1,
        fields={"rank": "RANK", "world_size": "WORLD_SIZE", "master_addr": "MASTER_ADDR"},
        optional={"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"}
        | {"node_rank": "NODE_RANK", "nnodes": "NNODES"},
        docs="https://pytorch.org/docs/2.5/distributed.html#environment-variable-initialization",
    ),
    Launcher(
        name="none",
        title="nothing: a job of one node",
        level="node",
        marks=(),
        marks_seen=0,
        fields={},
        docs="README.md",
    ),
)

BY_NAME = {row.name: row for row in LAUNCHERS}
