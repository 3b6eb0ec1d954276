"""What this host offers a job: CPUs, GPUs, a place for temporary files, a parent to live and die with."""

import os
import signal
import sys


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


def gpu_count() -> int:
    """How many GPUs this process may use, without waking CUDA: a forked rank could not use it any more."""
    if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg")):
        return 0
    import torch

    return torch.cuda.device_count()  # asks the driver's management library, not CUDA


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
