"""What this host offers a job: CPUs, GPUs, a place for temporary files, a parent to live and die with."""

import contextlib
import functools
import os
import signal
import sys
from typing import NamedTuple


def cpu_limit(cgroup: str = "/sys/fs/cgroup") -> int:
    """How many CPUs this process may keep busy: the smaller of its affinity and its cgroup's quota, at least 1.

    The host's own count is what torch takes, and too many by far in a container with a limit.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max), cgroup-v1/cpusets.html (cpu.cfs_*).
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2, version 1
        try:
            quota, period = map(int, " ".join(_read(f"{cgroup}/{name}") for name in files).split())
        except (OSError, ValueError):  # no such controller, or "max": no limit
            continue
        if quota > 0:
            cpus = min(cpus, quota // period)
    return max(cpus, 1)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


SMALL_SHM = 512 << 20  # bytes; Docker and Kubernetes give 64 MiB


class Gpu(NamedTuple):
    """A GPU that this process may use, as the driver names it."""

    uuid: str
    name: str
    memory: int  # bytes


def gpus() -> list[Gpu]:
    """The GPUs that this process may use, in CUDA's order; wakes no CUDA, which a forked rank could not use any more.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars (CUDA_VISIBLE_DEVICES).
    """
    found = _all_gpus()
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return found
    shown = []
    for word in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        if word.strip().isdecimal():
            gpu = found[int(word)] if int(word) < len(found) else None
        else:  # "GPU-" and the beginning of a UUID; a "MIG-" device is not in the list, and is what it says
            named = [gpu for gpu in found if word.strip() and gpu.uuid.startswith(word.strip())]
            gpu = named[0] if named else Gpu(word, "MIG", 0) if word.startswith("MIG-") else None
        if gpu is None:
            break  # CUDA, too, ignores what follows a device that is not there
        shown.append(gpu)
    return shown


@functools.cache
def _all_gpus() -> list[Gpu]:
    with _driver() as nvml:
        if nvml is None:
            return []
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [
            Gpu(nvml.nvmlDeviceGetUUID(one), nvml.nvmlDeviceGetName(one), nvml.nvmlDeviceGetMemoryInfo(one).total)
            for one in handles
        ]


def small_shared_memory(path: str = "/dev/shm") -> int | None:
    """Bytes of shared memory where they are too few for NCCL's ranks of one host, else None."""
    try:
        there = os.statvfs(path)
    except OSError:
        return None
    size = there.f_blocks * there.f_frsize
    return size if size < SMALL_SHM else None


@functools.cache
def driver() -> tuple[str, int] | None:
    """The NVIDIA driver's version, and the major version of CUDA that it offers; None where there is no driver."""
    with _driver() as nvml:
        if nvml is None:
            return None
        return nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2() // 1000


@contextlib.contextmanager
def _driver():
    """NVIDIA's management library, or None where there is no driver or no GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        yield None
        return
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpu_count() -> int:
    """How many GPUs this process may use."""
    return len(gpus())


def out_of_memory_kills(cgroup: str = "/sys/fs/cgroup") -> int:
    """How many processes of this container the kernel has killed for want of memory; 0 where it does not say.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html.
    """
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in _read(f"{cgroup}/{name}").splitlines())["oom_kill"])
    return 0


def memory_limit(cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this container may use, or None where it has no limit of its own."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit = int(_read(f"{cgroup}/{name}"))
            return limit if limit < 1 << 60 else None
    return None


def ensure_temporary_directory() -> None:
    """Point TMPDIR at /dev/shm where nothing else is writable: torch does not start without such a directory."""
    import tempfile

    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"


def die_with_parent() -> None:
    """Let the kernel end this process when the process of ours that started it is gone, however that ended.

    ALLRANKS_PARENT names that process. Linux only; elsewhere a killed launcher can leave its ranks behind.
    """
    if sys.platform == "linux" and os.environ.get("ALLRANKS_PARENT") == str(os.getppid()):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, see prctl(2)
        if os.environ["ALLRANKS_PARENT"] != str(os.getppid()):
            sys.exit(128 + signal.SIGKILL)
