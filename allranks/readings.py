"""What a launcher's variable means that is not simply its value: the small functions of `launchers.py`.

Those that read one take (its text, the environment) and return the text meant, None for "not said".
"""

import json
import re
from collections.abc import Mapping

from allranks.errors import InvalidVariable

Environ = Mapping[str, str]


def number_or_all(text: str, environ: Environ) -> str | None:
    """torchrun takes words besides numbers, all of which mean "as many as there are"."""
    return None if text in ("auto", "gpu", "cpu", "xpu") else text


def some(text: str, environ: Environ) -> str | None:
    """0 GPUs say nothing about the number of ranks."""
    return None if text == "0" else text


def torchruns_nodes(text: str, environ: Environ) -> str:
    """torchrun takes MIN:MAX, too, which Kubeflow writes for an elastic job."""
    least, colon, most = text.partition(":")
    if colon and (most != least or "PET_NODE_RANK" not in environ):
        raise InvalidVariable(
            f"PET_NNODES={text}: an elastic job, whose nodes get their ranks from torchrun",
            "a script that torchrun starts",
            "start it as `torchrun SCRIPT` or `serve.sh SCRIPT`",
        )
    return least


def first_line(text: str, environ: Environ) -> str:
    return text.split()[0]


def slurm_first_host(text: str, environ: Environ) -> str:
    """`rack[01-04]n[1,3],gpu7` -> `rack01n1`: the host of task 0."""
    first = re.match(r"(?:[^\[\],]|\[[^\[\]]+\])+", text)
    if not first or text[first.end() : first.end() + 1] not in ("", ","):
        raise ValueError(text)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])


def slurm_tasks_here(text: str, environ: Environ) -> str | None:
    """`2(x3),1` on node 3 (from 0) -> `1`; None where the node is not one of the step's, which is said elsewhere."""
    counts = []
    for part in text.split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        counts += [str(int(count))] * min(int(times or 1), 100_000)
    node, nnodes = environ.get("SLURM_NODEID", ""), environ.get("SLURM_STEP_NUM_NODES", "")
    if not (node.isdecimal() and nnodes.isdecimal() and int(node) < int(nnodes)):
        return None
    return counts[int(node)]


def job_port(text: str, environ: Environ) -> str:
    """One that jobs on the same hosts do not share: 10000 to 29999, below those that kernels hand out."""
    return str(10_000 + int(text) % 20_000)


def slurm_port(text: str, environ: Environ) -> str:
    """As of a job, and not shared by its steps."""
    return job_port(str(int(text) + 1_009 * int(environ.get("SLURM_STEP_ID", "0"))), environ)


def slurms_tasks(environ: Environ) -> str:
    """What the tasks of this step stand for: "node", "rank", or nothing where it is the shell of `salloc`.

    Source: SLURM_INTERACTIVE_STEP, https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h.in
    """
    if environ.get("SLURM_STEP_ID") == str(0xFFFF_FFFA):
        return ""
    return "node" if environ.get("SLURM_STEP_NUM_TASKS") == environ.get("SLURM_STEP_NUM_NODES") else "rank"


def not_slurms(environ: Environ) -> bool:
    """Slurm, too, sets PMI's variables (srun --mpi=pmi2), and mpirun starts its proxies as the tasks of a step."""
    return "MPI_LOCALNRANKS" in environ or any(
        environ.get(mpis) != environ.get(slurms)
        for mpis, slurms in (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    )


def host_index(text: str, environ: Environ) -> str:
    return str(list(json.loads(environ["SM_HOSTS"])).index(text))


def lsf_first_host(text: str, environ: Environ) -> str:
    """`batch1 1 host1 42 host2 42` -> `host1`: one with one slot before the others is where the job's script runs."""
    hosts, slots = text.split()[::2], text.split()[1::2]
    return hosts[1] if len(hosts) > 1 and slots[0] == "1" else hosts[0]


def is_thd(environ: Environ) -> bool:
    """MASTER_ADDR=host:port on the workers; a port and no address on rank 0."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"].count(":") == 1
    return environ.get("RANK") == "0" and "MASTER_PORT" in environ
