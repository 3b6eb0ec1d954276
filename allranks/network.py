"""The way to the master: its name, its port, and whether the port is ours to open."""

import contextlib
import errno
import os
import socket
import struct
import sys
import time

from allranks.errors import AllranksError, MasterRefused, MasterSilent, MasterUnresolved, PortTaken

SAY_EVERY = 10.0  # seconds between two lines of waiting
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.25  # seconds between two tries


def say(line: str) -> None:
    """One line of ours on standard error."""
    print(f"allranks: {line}", file=sys.stderr, flush=True)


def own_name() -> str:
    """A name or address under which this host can at least reach itself."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
        return socket.gethostname()
    except OSError:
        return "localhost"


def check_port_free(port: int) -> None:
    """Raise PortTaken where another process of this host listens on the port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise port_taken(port, error.strerror) from None


def port_taken(port: int, why: str) -> PortTaken:
    return PortTaken(
        f"port {port} of {socket.gethostname()} cannot be opened ({why})",
        "a free port for rank 0 to meet the others on",
    )


def free_port() -> int:
    """A port that was free a moment ago, chosen by the kernel."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_master(address: str, port: int, timeout: float) -> None:
    """Return once rank 0's store answers at address:port; say every 10 s what is waited for.

    timeout: seconds. Raises MasterUnresolved, MasterRefused, MasterSilent or PortTaken at the deadline.
    """
    start = time.monotonic()
    next_word, pause = start + SAY_EVERY, FIRST_PAUSE
    while problem := _try(address, port, min(2.0, timeout)):
        now = time.monotonic()
        if now - start >= timeout:
            raise problem
        if now >= next_word:
            next_word += SAY_EVERY
            say(f"waiting for the master {address}:{port} ({now - start:.0f} of {timeout:.0f} s): {_state(problem)}")
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE)


def _try(address: str, port: int, timeout: float) -> AllranksError | None:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        return MasterUnresolved(
            f"the master's name {address!r} does not resolve ({error})", "a name that every node can look up"
        )
    where = ", ".join(dict.fromkeys(entry[4][0] for entry in found))
    try:
        with socket.create_connection((address, port), timeout) as probe:
            probe.settimeout(timeout)
            if _is_store(probe):
                return None
    except ConnectionRefusedError:
        return MasterRefused(f"{address} ({where}) refuses connections on port {port}", "rank 0 listening there")
    except OSError as error:
        return MasterSilent(f"{address} ({where}) does not answer on port {port} ({error})", "rank 0 listening there")
    return PortTaken(f"what answers at {address}:{port} ({where}) is another program", "rank 0's store")


def _is_store(probe: socket.socket) -> bool:
    """Whether a torch TCPStore answers: its client would wait for ever for a program that only accepts.

    The bytes: https://github.com/pytorch/pytorch/blob/v2.5.1/torch/csrc/distributed/c10d/TCPStoreBackend.hpp
    """
    nonce = struct.pack("=I", os.getpid())
    try:
        probe.sendall(struct.pack("=BIB", 0, 0x3C85F7CE, 13) + nonce)  # VALIDATE, PING
        return probe.recv(4, socket.MSG_WAITALL) == nonce
    except OSError:
        return False


def parent_was_hung_up_on(port: int) -> bool:
    """Whether the process that started this one has a connection to that port of a host which that host has ended.

    False where this cannot be seen. Source: https://docs.kernel.org/networking/proc_net_tcp.html (8 is CLOSE_WAIT).
    """
    with contextlib.suppress(OSError, ValueError):
        folder = f"/proc/{os.getppid()}/fd"
        held = {os.readlink(f"{folder}/{number}") for number in os.listdir(folder)}
        for table in ("tcp", "tcp6"):
            with open(f"/proc/net/{table}") as file:
                for line in file.readlines()[1:]:
                    _, _, remote, state, *_, inode = line.split()[:10]
                    if state == "08" and int(remote.rpartition(":")[2], 16) == port and f"socket:[{inode}]" in held:
                        return True
    return False


def _state(problem: AllranksError) -> str:
    return {
        MasterUnresolved: "its name does not resolve yet",
        MasterRefused: "its host is up, its port is not open yet",
        MasterSilent: "its host does not answer yet",
        PortTaken: "another program answers on its port",
    }[type(problem)]
