"""THE TABLE: which variables each launcher sets, and what its rank counts.

One row per launcher, in order of precedence: see `resolve` for what happens where several are visible.
"""

import fnmatch
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from allranks import readings
from allranks.readings import Environ

NOTHING: Mapping = MappingProxyType({})


class Launcher(NamedTuple):
    """One row.

    name:       what ALLRANKS_LAUNCHER, `--launcher` and messages call it
    title:      for people
    level:      "node": its rank counts nodes, and every node starts one process per GPU;
                "process": it has already started every rank
    marks:      the variables that give it away; a * stands for any characters
    marks_seen: how many of them must be visible before it is recognised
    fields:     field of World -> its variable; all of them must be there
    docs:       where this is documented
    optional:   as fields, for those that may be absent
    when:       environ -> whether it is meant, where its marks are not enough to tell
    read:       field -> (value, environ) -> the text meant, None for "not said"; ValueError, KeyError, IndexError or
                TypeError where it cannot be read. A master or port read so gives way to MASTER_ADDR and MASTER_PORT
    certain:    it has started this very process: nothing that is visible, too, can be meant
    covers:     rows that its variables look like, and that are not meant where it is recognised
    meets:      its ranks find their master by the launcher's own means (`mpi.find_master`) where MASTER_ADDR is not set
    job:        the variable that tells one job from another
    host_addr:  (variable, template): the address of this node, which the guides let scripts rely on
    example:    World's fields -> the variables besides fields and optional that `simulate` wears
    """

    name: str
    title: str
    level: str
    marks: tuple[str, ...]
    marks_seen: int
    fields: Mapping[str, str]
    docs: str
    optional: Mapping[str, str] = NOTHING
    when: Callable[[Environ], bool] = lambda environ: True
    read: Mapping[str, Callable[[str, Environ], str | None]] = NOTHING
    certain: bool = False
    covers: tuple[str, ...] = ()
    meets: bool = False
    job: str = ""
    host_addr: tuple[str, str] | None = None
    example: Callable[[dict], Mapping[str, str]] = lambda world: NOTHING

    def marks_in(self, environ: Environ) -> list[str]:
        """Those of the variables that give it away."""
        return [name for mark in self.marks for name in fnmatch.filter(environ, mark)]


_PROCESS = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
_NODE = {"node_rank": "RANK", "nnodes": "WORLD_SIZE", "master_addr": "MASTER_ADDR"}
_SLURM = {"master_addr": "SLURM_STEP_NODELIST", "master_port": "SLURM_JOB_ID"}
_SLURM_EXAMPLE = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "node[00-63]"}

LAUNCHERS = (
    Launcher(
        name="torchrun",
        title="torchrun, torch.distributed.launch",
        level="process",
        marks=("TORCHELASTIC_RUN_ID",),
        marks_seen=1,
        fields=_PROCESS
        | {"local_world_size": "LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK", "nnodes": "GROUP_WORLD_SIZE"}
        | {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"},
        certain=True,
        job="TORCHELASTIC_RUN_ID",
        docs="https://pytorch.org/docs/2.5/elastic/run.html#environment-variables",
        example=lambda world: {"TORCHELASTIC_RUN_ID": "simulated"},
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
        certain=True,
        meets=True,
        job="PMIX_NAMESPACE",
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
        when=readings.not_slurms,
        certain=True,
        meets=True,
        docs="https://github.com/pmodels/mpich/blob/main/src/pm/hydra/proxy/pmip_cb.c",
    ),
    Launcher(
        name="mvapich",
        title="MVAPICH2's mpirun_rsh",
        level="process",
        marks=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        marks_seen=2,
        fields={"rank": "MV2_COMM_WORLD_RANK", "world_size": "MV2_COMM_WORLD_SIZE"}
        | {"local_rank": "MV2_COMM_WORLD_LOCAL_RANK", "local_world_size": "MV2_COMM_WORLD_LOCAL_SIZE"}
        | {"master_addr": "MASTER_ADDR"},
        certain=True,
        docs="https://mvapich.cse.ohio-state.edu/userguide/",
    ),
    Launcher(
        name="lsf",
        title="LSF's jsrun",
        level="process",
        marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        marks_seen=1,
        fields={"rank": "JSM_NAMESPACE_RANK", "world_size": "JSM_NAMESPACE_SIZE"}
        | {"local_rank": "JSM_NAMESPACE_LOCAL_RANK", "master_addr": "LSB_MCPU_HOSTS"},
        optional={"local_world_size": "JSM_NAMESPACE_LOCAL_SIZE", "master_port": "LSB_JOBID"},
        read={"master_addr": readings.lsf_first_host, "master_port": readings.job_port},
        job="LSB_JOBID",
        docs="https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=SSWRJV_10.1.0/jsm/jsm_kickoff.htm",
        example=lambda world: {"LSB_MCPU_HOSTS": "batch1 1 host1 42 host2 42", "LSB_JOBID": "4711"},
    ),
    Launcher(
        name="slurm",
        title="Slurm's srun, one task per rank",
        level="process",
        # an allocation alone is no launcher: `sbatch` and `salloc` set SLURM_PROCID=0 for a script that is no step
        marks=("SLURM_STEP_ID", "SLURM_PROCID"),
        marks_seen=2,
        fields={"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID"}
        | {"node_rank": "SLURM_NODEID", "nnodes": "SLURM_STEP_NUM_NODES"}
        | {"local_world_size": "SLURM_STEP_TASKS_PER_NODE"}
        | _SLURM,
        read={
            "local_world_size": readings.slurm_tasks_here,
            "master_addr": readings.slurm_first_host,
            "master_port": readings.slurm_port,
        },
        when=lambda environ: readings.slurms_tasks(environ) == "rank",
        job="SLURM_JOB_ID",
        docs="https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES",
        example=lambda world: (
            _SLURM_EXAMPLE | {"SLURM_STEP_TASKS_PER_NODE": f"{world['local_world_size']}(x{world['nnodes']})"}
        ),
    ),
    Launcher(
        name="slurm-nodes",
        title="Slurm's srun, one task per node",
        level="node",
        marks=("SLURM_STEP_ID", "SLURM_PROCID"),
        marks_seen=2,
        fields={"node_rank": "SLURM_NODEID", "nnodes": "SLURM_STEP_NUM_NODES"} | _SLURM,
        read={"master_addr": readings.slurm_first_host, "master_port": readings.slurm_port},
        when=lambda environ: readings.slurms_tasks(environ) == "node",
        job="SLURM_JOB_ID",
        docs="https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES",
        example=lambda world: (
            _SLURM_EXAMPLE | {"SLURM_PROCID": str(world["node_rank"]), "SLURM_STEP_NUM_TASKS": str(world["nnodes"])}
        ),
    ),
    Launcher(
        name="pet",
        title="torchrun's PET_ variables, as Kubeflow sets them for each node",
        level="node",
        marks=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
        marks_seen=1,
        when=lambda environ: "PET_NODE_RANK" in environ or environ.get("PET_NNODES") != "1",
        fields={"node_rank": "PET_NODE_RANK", "nnodes": "PET_NNODES", "master_addr": "PET_MASTER_ADDR"},
        optional={"local_world_size": "PET_NPROC_PER_NODE", "master_port": "PET_MASTER_PORT"},
        read={"local_world_size": readings.number_or_all, "nnodes": readings.torchruns_nodes},
        # PyTorchJob sets RANK and WORLD_SIZE, too: the one counts nodes, the other processes
        covers=("indexed-job", "volcano", "pods", "pai-dlc", "thd", "bare"),
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
        job="SING_JOB_NAME",
        docs="images/pytorch-dist-mnist/README.md",
        example=lambda world: {
            "SING_JOB_NAME": "test",
            "SING_HOSTNAME_SUFFIX": "test-service.demo-project.svc.cluster.local",
        },
    ),
    Launcher(
        name="skypilot",
        title="SkyPilot",
        level="node",
        marks=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
        marks_seen=1,
        fields={"node_rank": "SKYPILOT_NODE_RANK", "nnodes": "SKYPILOT_NUM_NODES", "master_addr": "SKYPILOT_NODE_IPS"},
        optional={"local_world_size": "SKYPILOT_NUM_GPUS_PER_NODE"},
        read={"master_addr": readings.first_line, "local_world_size": readings.some},
        job="SKYPILOT_TASK_ID",
        docs="https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html",
        example=lambda world: {"SKYPILOT_NODE_IPS": "203.0.113.1\n203.0.113.2"},
    ),
    Launcher(
        name="sagemaker",
        title="Amazon SageMaker",
        level="node",
        marks=("SM_HOSTS", "SM_CURRENT_HOST"),
        marks_seen=1,
        fields={"nnodes": "SM_HOSTS", "node_rank": "SM_CURRENT_HOST", "master_addr": "SM_HOSTS"},
        optional={"local_world_size": "SM_NUM_GPUS"},
        read={
            "node_rank": readings.host_index,
            "nnodes": lambda text, environ: str(len(json.loads(text))),
            "master_addr": lambda text, environ: str(json.loads(text)[0]),
            "local_world_size": readings.some,
        },
        docs="https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md",
        example=lambda world: {
            "SM_HOSTS": json.dumps([f"algo-{host + 1}" for host in range(world["nnodes"])]),
            "SM_CURRENT_HOST": f"algo-{world['node_rank'] + 1}",
        },
    ),
    Launcher(
        name="volcano",
        title="Volcano's pytorch plugin",
        level="node",
        marks=("VC_*_HOSTS", "VC_TASK_INDEX", "VK_TASK_INDEX"),  # of its plugins svc (tasks have any name) and env
        marks_seen=1,
        fields=_NODE,
        optional={"master_port": "MASTER_PORT"},
        when=lambda environ: "RANK" in environ and "LOCAL_RANK" not in environ,
        covers=("pods", "pai-dlc", "thd", "bare"),
        docs="https://github.com/volcano-sh/volcano/blob/master/pkg/controllers/job/plugins/distributed-framework/pytorch/pytorch.go",
        example=lambda world: {"VC_TASK_INDEX": str(world["node_rank"])},
    ),
    Launcher(
        name="pods",
        title="pods behind a headless Service",
        level="node",
        # JOB_NAME or POD_NAMESPACE alone mean nothing (Jenkins sets the one, many pods have the other)
        marks=("RANK", "WORLD_SIZE", "MASTER_ADDR", "JOB_NAME", "SVC_NAME", "POD_NAMESPACE"),
        marks_seen=4,
        fields=_NODE,
        when=lambda environ: "LOCAL_RANK" not in environ,  # with one RANK counts processes, which are started already
        covers=("pai-dlc", "thd", "bare"),
        host_addr=("POD_ADDR", "{JOB_NAME}-{RANK}.{SVC_NAME}.{POD_NAMESPACE}.svc.cluster.local"),
        job="JOB_NAME",
        docs="images/pytorch-dist-mnist/README.md",
        example=lambda world: {"JOB_NAME": "test", "SVC_NAME": "test-service", "POD_NAMESPACE": "demo-project"},
    ),
    Launcher(
        name="indexed-job",
        title="Kubernetes Indexed Job, JobSet",
        level="node",
        marks=("JOB_COMPLETION_INDEX",),
        marks_seen=1,
        fields={"node_rank": "JOB_COMPLETION_INDEX", "nnodes": "NNODES", "master_addr": "MASTER_ADDR"},
        # pods of an Indexed Job that know nothing of each other are jobs of one node each
        when=lambda environ: "NNODES" in environ and "LOCAL_RANK" not in environ,
        docs="https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/",
    ),
    Launcher(
        name="pai-dlc",
        title="RANK and WORLD_SIZE of nodes, with NPROC_PER_NODE (Alibaba PAI-DLC)",
        level="node",
        marks=("RANK", "WORLD_SIZE", "NPROC_PER_NODE"),
        marks_seen=3,
        fields=_NODE,
        when=lambda environ: "LOCAL_RANK" not in environ,
        covers=("thd", "bare"),
        docs="https://www.alibabacloud.com/help/en/pai/general-environment-variables",
    ),
    Launcher(
        name="deepspeed",
        title="DeepSpeed's launcher",
        level="process",
        marks=("CROSS_RANK", "CROSS_SIZE"),
        marks_seen=2,
        fields=_PROCESS
        | {"local_world_size": "LOCAL_SIZE", "node_rank": "CROSS_RANK", "nnodes": "CROSS_SIZE"}
        | {"master_addr": "MASTER_ADDR"},
        when=lambda environ: "LOCAL_RANK" in environ,
        docs="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/launch.py",
    ),
    Launcher(
        name="azureml",
        title="Azure Machine Learning",
        level="process",
        marks=("AZUREML_RUN_ID",),
        marks_seen=1,
        fields=_PROCESS | {"master_addr": "MASTER_ADDR"},
        optional={"node_rank": "NODE_RANK"},
        when=lambda environ: "LOCAL_RANK" in environ and "RANK" in environ,
        job="AZUREML_RUN_ID",
        docs="https://learn.microsoft.com/en-us/azure/machine-learning/how-to-train-distributed-gpu",
        example=lambda world: {"AZUREML_RUN_ID": "simulated"},
    ),
    Launcher(
        name="composer",
        title="Composer, Ray Train",
        level="process",
        marks=("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        marks_seen=4,
        fields=_PROCESS
        | {"local_world_size": "LOCAL_WORLD_SIZE", "node_rank": "NODE_RANK", "master_addr": "MASTER_ADDR"},
        docs="https://github.com/mosaicml/composer/blob/main/composer/cli/launcher.py",
    ),
    Launcher(
        name="thd",
        title="THD style: MASTER_ADDR=host:port",
        level="process",
        marks=("RANK", "WORLD_SIZE"),
        marks_seen=1,
        fields={"rank": "RANK", "world_size": "WORLD_SIZE"},
        optional={"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE", "master_addr": "MASTER_ADDR"},
        when=readings.is_thd,
        docs="https://pytorch.org/docs/2.5/distributed.html#environment-variable-initialization",
    ),
    Launcher(
        name="bare",
        title="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set by hand",
        level="process",
        marks=("RANK", "WORLD_SIZE"),
        marks_seen=1,
        fields={"rank": "RANK", "world_size": "WORLD_SIZE", "master_addr": "MASTER_ADDR"},
        optional={"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"},
        when=lambda environ: not readings.is_thd(environ),
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
