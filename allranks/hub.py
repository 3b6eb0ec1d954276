"""The hub of the watch: keeps a line to every rank, decides once who failed first or holds up the others, tells all.

It runs beside the store of the handshake: in rank 0, or in node 0's parent. A rank's end closes its line; a frozen or
cut off one stays silent; one that keeps the others waiting has called fewer collectives than they have.
"""

import json
import os
import selectors
import socket
import threading
import time

TICK = 0.2  # seconds between two looks at all lines
SETTLE = 0.7  # seconds until the end of a line, or an error that others may have caused, is taken for the cause
SETTLE_PARENT = 3.0  # the same where the rank's parent can be expected to say how it ended
HELLO = 30.0  # seconds for whoever connects to say who it is
ASLEEP = 5.0  # a pause of our own as long as this means that this process was stopped, and not the others


class _Member:
    """One line, as the hub sees it."""

    def __init__(self, sock: socket.socket):
        self.sock, self.buffer = sock, b""
        self.heard = time.monotonic()
        self.who: dict = {}  # rank or node, host, name, oom: how many memory kills its container had seen
        self.beat: dict = {}  # sequence, at, inside, still
        self.left = False

    @property
    def rank(self) -> int | None:
        return self.who.get("rank")


class Hub:
    """Greets whoever connects; once told a token, keeps the lines of those who know it."""

    GREETING = b"allranks 1\n"

    def __init__(self, for_this_host: bool = False):
        if for_this_host:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        else:  # which address the others will take is not known yet
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._listener = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=dual)
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="allranks hub", daemon=True)
        self._token: str | None = None
        self._members: list[_Member] = []
        self._gone: list[tuple[float, _Member]] = []  # lines that ended without a farewell
        self._departed: list[_Member] = []
        self._doubtful: list[tuple[float, dict]] = []  # failures that another rank's may have caused
        self._batches: dict[int, dict[int, int]] = {}
        self._first: dict | None = None
        self._ending = False
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def watch(self, token: str) -> "Hub":
        """Take lines from now on from those who know the token."""
        self._token = token
        self.start()
        return self

    def close(self) -> None:
        self._ending = True
        if self._thread.is_alive():
            self._thread.join()
        self._tell({"bye": 1})
        for member in self._members:
            member.sock.close()
        self._listener.close()
        self._selector.close()

    def _forget(self) -> None:
        """In a fork of this process: lines must end when this process does, and not later."""
        if self._listener.fileno() >= 0:
            for sock in (self._listener, *(member.sock for member in self._members)):
                os.close(sock.detach())

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ending:
            for key, _ in self._selector.select(TICK):
                self._accept() if key.fileobj is self._listener else self._receive(key.data)
            now = time.monotonic()
            if now - last > ASLEEP:
                for member in self._members:
                    member.heard = now
            if int(now) != int(last):
                self._tell({"beat": 1})
            last = now
            for member in [one for one in self._members if not one.who and now - one.heard > HELLO]:
                self._drop(member)
            if self._token and not self._first:
                self._decide(now)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            sock.sendall(self.GREETING)
        except OSError:  # it has left already
            return
        sock.setblocking(False)
        member = _Member(sock)
        self._members.append(member)
        self._selector.register(sock, selectors.EVENT_READ, member)

    def _receive(self, member: _Member) -> None:
        try:
            data = member.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        member.heard = time.monotonic()
        member.buffer += data
        lines: list[bytes] = []
        if self._token:  # a rank may be here before this process has been told it: its next word is soon
            *lines, member.buffer = member.buffer.split(b"\n")
        for line in lines:
            try:
                self._take(member, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError):
                data = b""  # a stranger
        if not data or (len(member.buffer) > 65536):
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        if member in self._members:
            self._members.remove(member)
            self._selector.unregister(member.sock)
            member.sock.close()
            if member.left:
                self._departed.append(member)
            elif member.who:
                self._gone.append((time.monotonic(), member))

    def _take(self, member: _Member, message: dict) -> None:
        if not member.who:
            if message["token"] != self._token:
                raise ValueError("a stranger")
            member.who = message
            if self._first:
                self._send(member, {"first": self._first})
        elif "failed" in message:
            if message["doubtful"]:
                self._doubtful.append((time.monotonic(), message["failed"]))
            else:
                self._declare(message["failed"])
        elif "left" in message:
            member.left = bool(message["left"])
        elif "batches" in message:
            self._compare_batches(member, message["loader"], message["batches"])
        else:
            member.beat = message

    def _compare_batches(self, member: _Member, loader: int, batches: int) -> None:
        counts = self._batches.setdefault(loader, {})
        counts[member.rank] = batches
        if len(counts) == member.who["world_size"]:
            if len(set(counts.values())) > 1:
                few, many = min(counts, key=counts.get), max(counts, key=counts.get)
                self._tell(
                    {
                        "warning": f"uneven inputs: rank {few} has {counts[few]} batches, rank {many} has "
                        f"{counts[many]}; expected as many on every rank, since all wait for each other in every step; "
                        "use DistributedSampler, drop_last=True, or torch's Join"
                    }
                )
            self._tell({"loader": loader})

    def _decide(self, now: float) -> None:
        for since, member in self._gone:
            parents = [other.who.get("node") for other in self._members if other.rank is None]
            wait = SETTLE_PARENT if member.who.get("node") in parents and member.rank is not None else SETTLE
            if now - since >= wait:
                return self._declare(self._ended_without_a_word(member))
        if self._doubtful and not self._gone and now - self._doubtful[0][0] >= SETTLE:
            return self._declare(self._suspect(self._doubtful[0][1], now))
        stalled = find_stalled([self._view(member, now) for member in self._members if member.rank is not None])
        if stalled:
            self._declare(stalled)
        return None

    def _view(self, member: _Member, now: float) -> dict:
        return member.beat | member.who | {"silent": 0.0 if member.left else now - member.heard, "left": member.left}

    def _ended_without_a_word(self, member: _Member) -> dict:
        name, host = member.who["name"], member.who["host"]
        neighbours = [one for one in self._members if one.who.get("host") == host]
        if any(one.beat.get("oom", 0) > one.who["oom"] for one in neighbours):
            return {"code": "out-of-memory", "rank": member.rank, "seen": f"{name} was killed for want of memory"}
        return {"code": "rank-failed", "rank": member.rank, "seen": f"{name} ended without a word (killed?)"}

    def _suspect(self, failed: dict, now: float) -> dict:
        """Whose fault a lost connection or a time-out is, seen from the rank that had it."""
        ranks = [self._view(member, now) for member in self._members if member.rank is not None]
        mine = next((one for one in ranks if one["rank"] == failed["rank"]), {})
        silent = [one for one in ranks if one["silent"] > ASLEEP]
        behind = [one for one in ranks if one.get("sequence", 0) < mine.get("sequence", 0) and one is not mine]
        departed = [self._view(member, now) for member in self._departed if member.rank is not None]
        for others, how in ((silent, "does not answer"), (departed, "has left already"), (behind, "has not joined in")):
            if others:
                return {
                    "code": "stalled",
                    "rank": others[0]["rank"],
                    "seen": f"{_names(others)} {how}; {failed['seen']}",
                    "expected": "all ranks in the same collective",
                }
        return failed

    def _declare(self, record: dict) -> None:
        if self._first is None:
            self._first = record
            self._tell({"first": record})

    def _tell(self, message: dict) -> None:
        for member in list(self._members):
            if member.who:
                self._send(member, message)

    def _send(self, member: _Member, message: dict) -> None:
        try:
            member.sock.sendall(json.dumps(message).encode() + b"\n")
        except BlockingIOError:
            pass  # it has not read for long: it is frozen, and will be found silent
        except OSError:
            self._drop(member)


def find_stalled(ranks: list[dict]) -> dict | None:
    """The record of a rank that holds up the others, or None.

    ranks: of each what it has said (`Line`, `Position`), silent (seconds since it has been heard) and left.
    A rank waits when its main thread has been in one torch.distributed call, at the same place, for its stall time-out.
    """
    silent = [one for one in ranks if one["silent"] >= one["stall"]]
    if silent:
        has = "has" if len(silent) == 1 else "have"
        seen = f"{_names(silent)} {has} not been heard of for {silent[0]['silent']:.0f} s (stopped, or cut off)"
        return {
            "code": "stalled",
            "rank": silent[0]["rank"],
            "seen": seen,
            "expected": f"a sign of life within {silent[0]['stall']:.0f} s",
            "pids": [(one["host"], one["pid"]) for one in silent],
        }
    waiting = [one for one in ranks if one.get("inside") and one["still"] >= one["stall"]]
    if not waiting:
        return None
    called = max(one["sequence"] for one in waiting)
    behind = [one for one in ranks if one.get("sequence", called) < called and not one["left"]]
    if not behind and len(waiting) < len(ranks):
        return None
    late = behind or waiting
    shown = [*behind[:2], *waiting[: 2 if behind else 4]]
    where = "; ".join(f"rank {one['rank']} is {_doing(one)}" for one in shown)
    how = ("keeps" if len(behind) == 1 else "keep") + " the others waiting" if behind else "wait for each other in vain"
    return {
        "code": "stalled",
        "rank": late[0]["rank"],
        "seen": f"{_names(late)} {how} ({where})",
        "expected": f"all ranks in the same collective within {waiting[0]['stall']:.0f} s",
        "todo": None if behind else "TORCH_DISTRIBUTED_DEBUG=DETAIL compares the calls before they are made",
    }


def _names(ranks: list[dict]) -> str:
    return ", ".join(one["name"] for one in ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _doing(rank: dict) -> str:
    return f"in {rank['inside']} at {rank['at']}" if rank.get("inside") else f"at {rank.get('at', 'its start')}"
