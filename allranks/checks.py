"""What the doctor looks at on one node: each check returns (level, what was seen), or raises AllranksError."""

import os
import shutil
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from allranks import interfaces, machine
from allranks.errors import AllranksError, RankFailed, Stalled
from allranks.launchers import BY_NAME
from allranks.mend import check_driver
from allranks.mpi import find_master
from allranks.network import check_port_free
from allranks.resolve import World, overlooked

GIB = 1 << 30
OK, WARNING, ERROR = "ok", "warning", "error"


class Finding(NamedTuple):
    """check: what was looked at; level: ok, warning or error; seen: one line; code: the error's, or empty."""

    check: str
    level: str
    seen: str
    code: str = ""


class Member:
    """This process among those that were started: its place, its rows, and what it measured as the lower of a pair."""

    def __init__(self, world: World | None):
        self.world, self.kind = world, "node" if world is None or world.level == "node" else "rank"
        index, size = (0, 1) if world is None else (world.rank, world.world_size)
        if world is not None and self.kind == "node":
            index, size = world.node_rank, world.nnodes
        self.index, self.size = index, size
        self.nproc = (world and world.local_world_size) or (max(machine.gpu_count(), 1) if self.kind == "node" else 1)
        self.findings: list[Finding] = []
        self.pairs: dict[str, list] = {}  # backend -> [this member, the other, microseconds, GB/s]
        self.shape = ""  # "2 hosts, 4 ranks", once they have met
        self.watchdog = threading.Timer(0, int)  # until there is one

    def look(self, name: str, check: Callable, *args) -> bool:
        """Add the row of a check, which returns (level, seen) or raises; return whether it found no error."""
        try:
            level, seen = check(*args)
        except AllranksError as error:
            self.fail(name, error)
            return False
        except RuntimeError as error:  # torch's
            self.fail(name, of_torch(error))
            return False
        one_line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in seen)  # it may quote any variable
        self.findings.append(Finding(name, level, one_line))
        return True

    def fail(self, name: str, error: AllranksError) -> None:
        """Add the row of an error."""
        self.findings.append(Finding(name, ERROR, str(error).partition(": ")[2], error.code))

    def report(self) -> dict:
        """What rank 0 needs of this member, ready for JSON."""
        name = f"{self.kind} {self.index} on {socket.gethostname()}"
        rows = [found._asdict() for found in self.findings]
        return {"name": name, "index": self.index, "findings": rows, "pairs": self.pairs, "shape": self.shape}


def launcher(me: Member, problem: AllranksError | None) -> tuple[str, str]:
    """Which launcher, which place in the job."""
    if problem is not None:
        raise problem
    if me.world.master_addr is None and BY_NAME[me.world.launcher].meets and me.size > 1:
        me.world = find_master(me.world, os.environ)
    if line := overlooked(me.world, os.environ):
        return WARNING, line
    row = BY_NAME[me.world.launcher]
    names = row.marks_in(os.environ) + ["MASTER_PORT"] * ("MASTER_PORT" in os.environ)
    seen = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return OK, f"{row.name}: {me.kind} {me.index} of {me.size}" + (f" ({seen})" if seen else ", no variables set")


def address(me: Member) -> tuple[str, str]:
    """The address and the interface on the way to the master."""
    interfaces.check_named(os.environ)
    toward = (me.world and me.world.master_addr) or "127.0.0.1"
    own = interfaces.own_address(toward)
    if own is None:
        return WARNING, f"no way to {toward}: its name does not resolve yet, or there is no network"
    name = next((name for name, found in interfaces.addresses().items() if own in found), "an unknown interface")
    return OK, f"{own} of {name}, on the way to {toward}"


def port(me: Member) -> tuple[str, str]:
    """Whether rank 0 can open the port that all meet on."""
    if me.world is None:
        return OK, "not known: see the launcher"
    number, agents = me.world.master_port, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if me.index or agents:
        return OK, f"{number}, opened by {'torchrun' if agents else f'{me.kind} 0'}"
    if me.size == 1 and me.world.sources["master_port"] == "default":
        return OK, "any free one: nobody else has to know it"
    check_port_free(number)
    return OK, f"{number} is free"


def dev_shm(me: Member | None, path: str = "/dev/shm", least: int = machine.SMALL_SHM) -> tuple[str, str]:
    """Shared memory, through which NCCL's ranks and a loader's workers talk. least: bytes."""
    try:
        total, _, free = shutil.disk_usage(path)
    except OSError:
        return (OK if sys.platform != "linux" else WARNING), f"{path} is not there"
    seen = f"{_size(free)} free of {_size(total)}"
    if free < least:
        return WARNING, f"{path}: {seen}; start the container with --shm-size=1g or --ipc=host"
    return OK, seen


def gpus(me: Member) -> tuple[str, str]:
    """The GPUs in sight, and whether they suffice for the local ranks."""
    found = machine.gpus()
    seen = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in found).items())
    if not found:
        return OK, "none in sight: gloo on CPUs"
    if me.nproc > len(found):
        return WARNING, f"{seen}, fewer than the {me.nproc} ranks here: set NPROC_PER_NODE={len(found)}, or take gloo"
    return OK, f"{seen}, {_size(min(gpu.memory for gpu in found))} each"


def driver(me: Member | None, offered: tuple[str, int] | None = None, cuda: str | None = None) -> tuple[str, str]:
    """The driver against the CUDA that torch is built for; both are asked for where they are not given."""
    import torch

    offered, cuda = offered or machine.driver(), cuda or torch.version.cuda
    built = f"torch {torch.__version__} is built for CUDA {cuda}" if cuda else f"torch {torch.__version__} has no CUDA"
    if offered is None:
        return OK, f"no NVIDIA driver; {built}"
    seen = f"the NVIDIA driver {offered[0]} offers CUDA {offered[1]}"
    if not cuda:
        return WARNING, f"{seen}, but {built}"
    check_driver(offered, cuda)
    return OK, f"{seen}; {built}"


def nccl(me: Member) -> tuple[str, str]:
    """Which NCCL torch has, and what it is told by variables."""
    import torch

    if not torch.distributed.is_nccl_available():
        return (WARNING if machine.gpu_count() else OK), "not in this torch"
    told = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_"))
    return OK, ".".join(map(str, torch.cuda.nccl.version())) + (f", {told}" if told else "")


def cpus(me: Member) -> tuple[str, str]:
    """CPUs that this container may use, for its ranks."""
    limit = machine.cpu_limit()
    seen = f"{limit} of the host's {os.cpu_count()}, for {me.nproc} rank{'s' * (me.nproc > 1)}"
    return (WARNING, f"{seen}, which take turns: raise the limit") if limit < me.nproc else (OK, seen)


def memory(me: Member, meminfo: str = "/proc/meminfo") -> tuple[str, str]:
    """Memory that is free, and this container's limit."""
    limit, kills = machine.memory_limit(), machine.out_of_memory_kills()
    seen = f"limit {_size(limit)}" if limit else "no limit of this container's own"
    try:
        with open(meminfo) as file:
            free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # another system
        free = limit or GIB * me.nproc
    else:
        seen = f"{_size(free)} free, {seen}"
    if kills:
        return WARNING, f"{seen}; {kills} processes of this container have been killed for want of memory"
    if min(free, limit or free) < GIB * me.nproc:
        return WARNING, f"{seen}: less than 1 GiB for each of {me.nproc} ranks"
    return OK, seen


def disk(me: Member | None, path: str | None = None) -> tuple[str, str]:
    """Whether the working directory (or path) can be written, and has room."""
    path = path or "."
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x" * 4096)
            file.flush()
        free = shutil.disk_usage(path).free
        path = os.path.abspath(path)
    except OSError as error:
        return WARNING, f"{path} cannot be written ({error.strerror}): checkpoints need a directory that can be"
    return (WARNING if free < GIB else OK), f"{_size(free)} free in {path}"


def temporary(me: Member) -> tuple[str, str]:
    """The directory of temporary files, without which torch does not start."""
    return disk(me, tempfile.gettempdir())


LOCAL: Mapping[str, Callable] = {
    "address": address,
    "port": port,
    "/dev/shm": dev_shm,
    "gpus": gpus,
    "driver": driver,
    "nccl": nccl,
    "cpus": cpus,
    "memory": memory,
    "disk": disk,
    "temporary files": temporary,
}


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count >> 20} MiB"


def of_torch(error: RuntimeError) -> AllranksError:
    """What a failed call between members amounts to."""
    if "timed out" in str(error).lower():
        return Stalled(f"no answer in time ({first_line(error)})", "all members in the same call")
    return RankFailed(f"lost another member ({first_line(error)})", "all members to stay until the end")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
