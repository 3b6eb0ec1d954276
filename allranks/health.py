"""Whether the ranks of this container train: for HEALTHCHECK, and for Kubernetes' probes.

Each rank's watch sets the time of a file of its own to when its training thread has last moved.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from allranks import machine

NAME = "allranks-alive-"
WITHIN = 120.0  # seconds


class Sign:
    """The file of this process."""

    def __init__(self):
        machine.ensure_temporary_directory()
        self._path = Path(tempfile.gettempdir(), f"{NAME}{os.getpid()}")
        for path in self._path.parent.glob(f"{NAME}*"):
            if not _is_there(path):  # it was killed
                with contextlib.suppress(OSError):
                    path.unlink()

    def moved(self, still: float) -> None:
        """The training thread has last moved `still` seconds ago."""
        with contextlib.suppress(OSError):  # no room: the watch goes on without
            self._path.touch()
            os.utime(self._path, (time.time() - still,) * 2)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def problem(within: float = WITHIN) -> str | None:
    """One line about a rank of this container that has not moved for more than `within` seconds, or None."""
    machine.ensure_temporary_directory()
    for path in Path(tempfile.gettempdir()).glob(f"{NAME}*"):
        with contextlib.suppress(OSError):  # it has just ended
            still = time.time() - path.stat().st_mtime
            if still > within and _is_there(path):
                return f"process {_pid(path)} has not moved for {still:.0f} s, of {within:.0f} allowed"
    return None


def _pid(path: Path) -> int:
    return int(path.name.removeprefix(NAME))


def _is_there(path: Path) -> bool:
    """Whether the process whose file this is still runs."""
    try:
        os.kill(_pid(path), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        pass
    return True
