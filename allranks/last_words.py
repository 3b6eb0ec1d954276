"""How a rank ends: its own exception once, with a traceback; on every other rank one line, about who was first."""

import atexit
import os
import re
import socket
import sys
import threading
import time

from allranks.errors import AllranksError, CollectiveMismatch, GpuUnusable, OutOfMemory, RankFailed
from allranks.hub import Hub
from allranks.network import say
from allranks.watch import GRACE, Line, error_of

# what torch says on a rank whose peer has gone, or keeps it waiting: the cause is elsewhere
_DOUBTFUL = re.compile(
    r"closed by peer|reset by peer|[Bb]roken pipe|[Tt]imed? ?out|[Cc]onnection refused|connectFullMesh|"
    r"remote process exited|unhandled system error|failed to recv|recvValue|no error|heartbeat"
)
_KNOWN = (
    (OutOfMemory, re.compile(r"out of memory|can't allocate memory|DefaultCPUAllocator")),
    (CollectiveMismatch, re.compile(r"Detected mismatch between collectives")),
    (GpuUnusable, re.compile(r"invalid device ordinal|No CUDA GPUs|no NVIDIA driver|driver on your system is too old")),
)
LINGER = 0.5  # seconds by which a rank outlives the one that failed first, whose status the launcher should see first

_line: Line | None = None
_hub: Hub | None = None
_quiet = False
_said = threading.Lock()


def keep_watch(hub: tuple[str, int, str, str], who: dict, own_hub: Hub | None = None, quiet: bool = False) -> None:
    """Let the others know when this rank fails, and end it when another has; quiet: its parent says so, once."""
    global _line, _hub, _quiet
    if _line is not None:
        return
    try:
        _line = Line(hub, who | {"host": socket.gethostname(), "pid": os.getpid()}, _stop, _warn(who))
    except OSError as error:
        say(f"warning: no watch over the other ranks: {hub[0]}:{hub[1]} does not answer ({error})")
        return
    _hub, _quiet = own_hub, quiet
    sys.excepthook = _excepthook
    atexit.register(leave)


def line() -> Line | None:
    """The line of this process, where there is one."""
    return _line


def fail(error: BaseException, status: int = 1) -> int:
    """Say how this rank fails; return its exit status: that of whoever was first, where that was another."""
    code, seen, doubtful = _describe(error, status)
    first = {"code": code, "seen": seen, "rank": None}
    if _line is not None:
        seen = f"{_line.name} {seen}"
        first = _line.report(seen, code, doubtful)
        echo = doubtful and first["seen"] != seen  # of what the others did about this rank's stall
        if first["rank"] != _line.rank or echo:
            if not _quiet:
                _say_once(first)
            time.sleep(LINGER)
            return error_of(first).status
    if not isinstance(error, SystemExit | KeyboardInterrupt):
        _print_traceback(error)
    if _line is not None and not _quiet:
        _say_once(first)
    return status if code == RankFailed.code else error_of(first).status


def end_with(error: AllranksError) -> None:
    """Say one of our own errors, here and to the others; never return."""
    say(str(error))
    if _line is not None:
        _said.acquire(blocking=False)
        _line.report(f"{_line.name}: {error.parts[0]}", error.code, expected=error.parts[1], todo=error.parts[2])
    sys.exit(error.status)


def _describe(error: BaseException, status: int) -> tuple[str, str, bool]:
    """(code, what is seen, whether the cause may be another rank) of an exception."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return RankFailed.code, f"exited with status {status}", False
    text = str(error).strip().splitlines()
    what = type(error).__name__ + (f": {text[0][:200]}" if text else "")
    if isinstance(error, MemoryError):
        return OutOfMemory.code, f"raised {what}", False
    if isinstance(error, RuntimeError):
        for kind, pattern in _KNOWN:
            if pattern.search(str(error)):
                calls = re.findall(r"Rank (\d+) is running.*?OpType=(\w+)(?:, TensorShape=(\[[^\]]*\]))?", str(error))
                told = ", ".join(f"rank {rank} calls {call} {shape}".strip() for rank, call, shape in calls)
                return kind.code, (told and f"found that {told}") or f"raised {what}", False
    return RankFailed.code, f"raised {what}", isinstance(error, RuntimeError) and bool(_DOUBTFUL.search(str(error)))


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error.with_traceback(_without_our_frames(error.__traceback__)))


def _without_our_frames(tb):
    """The part of a traceback that is the user's."""
    import runpy

    ours = (os.path.dirname(__file__), "<frozen runpy>", runpy.__file__)
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(ours):
        tb = tb.tb_next
    return tb


def _excepthook(kind, error, tb) -> None:
    """For a rank that is no fork of ours: what `fail` says, and its status."""
    sys.stderr = sys.__stderr__  # torch's hook, which calls this one, has put a buffer there
    status = fail(error.with_traceback(tb), 130 if kind is KeyboardInterrupt else 1)
    atexit._run_exitfuncs()
    _end(status)


def _end(status: int) -> None:
    leave()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _say_once(record: dict) -> None:
    if _said.acquire(blocking=False):
        say(str(error_of(record)))


def _stop(record: dict, ended: threading.Event) -> None:
    """Another rank was first, or this one is what the others wait for: end, if need be from outside."""
    if ended.wait(GRACE):
        return
    if not _quiet:
        _say_once(record)
    _end(error_of(record).status)


def _warn(who: dict):
    return (lambda text: say(f"warning: {text}")) if who.get("rank") == 0 else None


def leave() -> None:
    """This process needs nobody any more, and nobody needs it."""
    global _hub
    if _line is not None:
        _line.close()
    if _hub is not None:
        hub, _hub = _hub, None
        hub.close()
