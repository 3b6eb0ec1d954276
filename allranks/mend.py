"""What would go wrong in a rank, mended or said before the script goes on. Nothing here imports torch by itself."""

import atexit
import contextlib
import os
import sys
import threading
import time
from datetime import timedelta

from allranks import last_words, machine
from allranks.errors import AllranksError, GpuUnusable

OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}  # by CUDA's major version: the release notes' minor-version table


def mend() -> None:
    """Once in each rank: whole lines on standard output, torch's thread count, its process groups and loaders."""
    _write_whole_lines()
    atexit.register(_let_threads_finish)
    if torch := sys.modules.get("torch"):
        _apply_omp_threads(torch)
        if "torch.distributed" in sys.modules and torch.distributed.is_available():
            _keep_gloo_groups(torch.distributed)
            _check_groups(torch.distributed)
            _count_batches(torch.utils.data.DataLoader)


def _write_whole_lines() -> None:
    """Lines of several ranks must not mix, and must appear when they are written, also under PYTHONUNBUFFERED."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = open(sys.stdout.fileno(), "w", 1, encoding, errors, closefd=False)  # noqa: SIM115


def _apply_omp_threads(torch) -> None:
    """OpenMP read OMP_NUM_THREADS when torch was imported, before we set it."""
    threads = os.environ["OMP_NUM_THREADS"].split(",")[0]
    if threads.isdecimal() and torch.get_num_threads() != int(threads):
        torch.set_num_threads(int(threads))


def _keep_gloo_groups(dist) -> None:
    """Let destroy_process_group() forget gloo's groups without freeing them; the end of the process closes them.

    Freed, a group joins its threads while it holds Python's lock, and one of them may need that lock to free the last
    tensor it reduced: about one job in twenty hung at its very end (seen with torch 2.5.1, 4 ranks on 2 CPUs).
    """
    c10d = dist.distributed_c10d
    destroy = c10d.destroy_process_group
    if getattr(destroy, "keeps_gloo_groups", False):
        return

    def destroy_process_group(group=None):
        leaving = c10d._world.pg_map if group in (None, c10d.GroupMember.WORLD) else [group]
        _kept.extend(one for one in leaving if "gloo" in str(dist.get_backend_config(one)))
        if group in (None, c10d.GroupMember.WORLD) and (line := last_words.line()):
            line.leave()
        destroy(group)

    destroy_process_group.keeps_gloo_groups = True
    destroy_process_group.__doc__ = destroy.__doc__
    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group


_kept: list = []


def _check_groups(dist) -> None:
    """Let init_process_group() say at once what nccl would fail with, and work a second time.

    torch 2.5 keeps the store of torchrun's agent, and with it the addresses of a group that has been destroyed: the
    next one of the process would call those (seen: one rank "no error", the other waiting).
    """
    c10d = dist.distributed_c10d
    init = c10d.init_process_group
    if getattr(init, "checks", False):
        return
    groups = iter(range(1 << 30))

    def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, **options):
        try:
            if "nccl" in str(backend):
                check_nccl(os.environ)
        except AllranksError as error:
            last_words.end_with(error)
        if line := last_words.line():
            line.leave(False)
            if timeout is not None and "ALLRANKS_STALL_TIMEOUT" not in os.environ:
                line.stall = timeout.total_seconds()
        if store is None and init_method in (None, "env://") and (number := next(groups)):
            longest = timeout or timedelta(minutes=30)
            store, rank, world_size = next(dist.rendezvous("env://", rank, world_size, timeout=longest))
            store, init_method = dist.PrefixStore(f"again/{number}", store), None
        return init(backend, init_method, timeout, world_size, rank, store, **options)

    init_process_group.checks = True
    init_process_group.__doc__ = init.__doc__
    c10d.init_process_group = dist.init_process_group = init_process_group


def check_driver(offered: tuple[str, int] | None, cuda: str | None) -> None:
    """Raise GpuUnusable where the driver (its version, its CUDA's major version) is older than torch's CUDA needs."""
    needed = int((cuda or "0").split(".")[0])
    if offered and offered[1] < needed:
        raise GpuUnusable(
            f"the NVIDIA driver {offered[0]} offers CUDA {offered[1]}, and this torch is built for CUDA {cuda}",
            f"a driver of {OLDEST_DRIVER.get(needed, 'a later release')} or newer",
            "renew the driver of the host, or set CUDA_VISIBLE_DEVICES= to train on the CPU",
        )


def check_nccl(environ) -> None:
    """Raise GpuUnusable where nccl cannot work: no GPU for this rank, or one for two, or none on another node."""
    seen = machine.gpus()
    rank, local_rank = environ["RANK"], int(environ["LOCAL_RANK"])
    if not seen:
        hidden = machine.driver() is not None
        why = "CUDA_VISIBLE_DEVICES hides them" if hidden else "the container was started without --gpus all"
        raise GpuUnusable(f"nccl asked for, and rank {rank} sees no GPU ({why}?)", "a GPU for each rank")
    why_not = environ.get("ALLRANKS_NO_NCCL")
    if local_rank >= len(seen) and (why_not or len(seen) > 1):  # one, not shared: its launcher shows each rank its own
        raise GpuUnusable(
            f"nccl asked for, and rank {rank} has LOCAL_RANK={local_rank} with {len(seen)} GPU(s) in sight",
            "a GPU for each local rank",
        )
    if why_not:
        raise GpuUnusable(f"nccl asked for, and {why_not}", "a GPU for each rank")


def _count_batches(loader_class) -> None:
    """Have the lengths of the ranks' loaders compared before the first step: all wait for each other in each."""
    iterate = loader_class.__iter__
    if getattr(iterate, "counts", False):
        return
    loaders = iter(range(1 << 30))

    def __iter__(self):
        dist, line = sys.modules["torch.distributed"], last_words.line()
        if line and line.rank is not None and dist.is_initialized() and not hasattr(self, "_allranks_counted"):
            self._allranks_counted = True
            with contextlib.suppress(TypeError):  # an iterable dataset without a length
                line.count_batches(next(loaders), len(self))
        return iterate(self)

    __iter__.counts = True
    loader_class.__iter__ = __iter__


def _let_threads_finish(longest: float = 1.0) -> None:
    """Give gloo's threads the time to free the tensors of the last call; at most `longest` seconds.

    Python ends a thread that asks for its lock while the interpreter is being torn down, in the middle of C++: the
    process dies of "terminate called without an active exception", status 134, after all its work is done.
    """
    if "torch.distributed" not in sys.modules:
        return
    idle, deadline = 0, time.monotonic() + longest
    while idle < 2 and time.monotonic() < deadline:  # twice: the first time one of them may be waiting for our lock
        time.sleep(0.005)  # without the lock
        idle = 0 if _a_thread_runs() else idle + 1


def _a_thread_runs() -> bool:
    """Whether the kernel has another thread of this process running or about to; False where it cannot be asked."""
    try:
        others = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
        return any(_state(thread) in "RD" for thread in others)
    except OSError:  # not Linux, or the thread has ended meanwhile
        return False


def _state(thread: str) -> str:
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
