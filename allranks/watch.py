"""While the ranks train: each has a line (a TCP connection) to the hub, kept by a thread outside of training."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable

from allranks import machine
from allranks.errors import BY_CODE, AllranksError, RankFailed
from allranks.health import Sign
from allranks.hub import ASLEEP, SETTLE_PARENT, Hub
from allranks.position import Position

BEAT = 1.0  # seconds between two words on a line
GRACE = 2.0  # seconds for a rank to end by itself when another has failed
STALL = 600.0  # seconds, unless ALLRANKS_STALL_TIMEOUT or the process group's own time-out says otherwise


def error_of(record: dict) -> AllranksError:
    """What the hub decided, as an error."""
    kind = BY_CODE[record["code"]]
    return kind(record["seen"], record.get("expected", "every rank to run to its end"), record.get("todo"))


class Line:
    """This process's end: says that it lives, and hears who failed first.

    who: name (for people), host, and rank or node, world_size. on_first: called in the line's
    thread, once, with what the hub decided and an event that this process's own end sets.
    on_warning: what the hub has to say to people. hub: (address, port, token, host).
    """

    def __init__(
        self,
        hub: tuple[str, int, str, str],
        who: dict,
        on_first: Callable[[dict, threading.Event], None],
        on_warning=None,
    ):
        self._hub, self._on_first, self._on_warning = hub, on_first, on_warning
        self.stall = float(os.environ.get("ALLRANKS_STALL_TIMEOUT", STALL))
        self._who = who | {"token": hub[2], "oom": machine.out_of_memory_kills()}
        self._position = Position()
        self._sign = Sign() if "rank" in who else None  # a parent only waits
        self._lock = threading.Lock()
        self.first: dict | None = None
        self.known = threading.Event()
        self._loaders: dict[int, threading.Event] = {}
        self._left = self._reporting = False
        self._closed = threading.Event()
        self._sock = socket.create_connection(hub[:2], 10.0)
        os.register_at_fork(after_in_child=self._forget)
        self._say(self._who | {"stall": self.stall})  # before anything else, also before a failure that comes at once
        self._thread = threading.Thread(target=self._run, name="allranks watch", daemon=True)
        self._thread.start()

    def report(self, seen: str, code: str = RankFailed.code, doubtful: bool = False, **more) -> dict:
        """Tell the hub how this process failed; return who was first, as far as that is known within seconds."""
        self._reporting = True
        mine = {"code": code, "rank": self.rank, "seen": seen} | more
        if self.first is None:
            self._say({"failed": mine, "doubtful": doubtful})
            self.known.wait(SETTLE_PARENT + GRACE if doubtful else GRACE)
        return self.first or mine

    @property
    def rank(self) -> int | None:
        return self._who.get("rank")

    @property
    def name(self) -> str:
        return self._who["name"]

    def leave(self, left: bool = True) -> None:
        """From here on this process needs nobody, and nobody needs it; or, left=False, it does again."""
        if self._left != left:
            self._left = left
            self._say({"left": left})

    def close(self) -> None:
        self.leave()
        self._closed.set()
        if self._sign:
            self._sign.remove()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE)
        with self._lock:
            self._sock.close()

    def _forget(self) -> None:
        """In a fork of this process: the line is its parent's, and ends when that does."""
        self._left = True
        self._closed.set()
        if self._sock.fileno() >= 0:
            os.close(self._sock.detach())

    def count_batches(self, loader: int, batches: int) -> None:
        """Have the number of batches of this process's n-th loader compared; wait a moment for the answer."""
        self._loaders[loader] = threading.Event()
        self._say({"loader": loader, "batches": batches})
        self._loaders[loader].wait(BEAT / 2)

    def _say(self, message: dict) -> None:
        with contextlib.suppress(OSError), self._lock:  # the thread finds out
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def _run(self) -> None:
        try:
            self._sock.settimeout(10.0)
            self._sock.recv(len(Hub.GREETING), socket.MSG_WAITALL)
            buffer, heard, woke = b"", time.monotonic(), time.monotonic()
            next_beat = 0.0
            while not self._closed.is_set() and self.first is None:
                now = time.monotonic()
                if now - woke > ASLEEP:
                    heard = now
                woke = now
                if now >= next_beat:
                    next_beat = now + BEAT
                    position = self._position.now()
                    if self._sign:
                        self._sign.moved(position["still"])
                    self._say(position | {"oom": machine.out_of_memory_kills(), "stall": self.stall})
                if now - heard > self.stall:
                    return self._hear(self._silence(now - heard))
                self._sock.settimeout(max(0.01, next_beat - now))
                try:
                    data = self._sock.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    break
                heard = time.monotonic()
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        except (OSError, ValueError):
            pass
        if not self._left and self.first is None:
            self._hear({"code": "rank-failed", "rank": 0, "seen": f"rank 0 on {self._hub[3]} ended without a word"})
        return None

    def _silence(self, seconds: float) -> dict:
        return {
            "code": "stalled",
            "rank": 0,
            "seen": f"rank 0 on {self._hub[3]} has not been heard of for {seconds:.0f} s (stopped, or cut off)",
            "expected": f"a sign of life within {self.stall:.0f} s",
        }

    def _take(self, message: dict) -> None:
        if "first" in message:
            self._hear(message["first"])
        elif "loader" in message and message["loader"] in self._loaders:
            self._loaders[message["loader"]].set()
        elif "bye" in message:
            self._left = True
            self._closed.set()
        elif "warning" in message and self._on_warning:
            self._on_warning(message["warning"])

    def _hear(self, record: dict) -> None:
        if self._left:
            return
        self.first = record
        self.known.set()
        if not self._reporting:
            self._on_first(record, self._closed)
