"""What would go wrong in a rank, mended before the script goes on. Nothing here imports torch by itself."""

import atexit
import os
import sys
import threading
import time


def mend() -> None:
    """Once in each rank: whole lines on standard output, torch's thread count, the end of its gloo groups."""
    _write_whole_lines()
    atexit.register(_let_threads_finish)
    if torch := sys.modules.get("torch"):
        _apply_omp_threads(torch)
        if "torch.distributed" in sys.modules and torch.distributed.is_available():
            _keep_gloo_groups(torch.distributed)


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
        destroy(group)

    destroy_process_group.keeps_gloo_groups = True
    destroy_process_group.__doc__ = destroy.__doc__
    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group


_kept: list = []


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
