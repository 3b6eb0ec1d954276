"""Which of this host's addresses and interfaces its peers can reach, without being told."""

import contextlib
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping

from allranks.errors import NoInterface


def addresses() -> dict[str, list[str]]:
    """Interface -> its addresses, IPv4 first; on systems other than Linux the names alone."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with contextlib.suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        for name in found:
            with contextlib.suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR, netdevice(7)
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, *_, name = line.split()
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def own_address(toward: str) -> str | None:
    """The address that packets to a name or address leave from; None where there is no way. Sends nothing."""
    try:
        family, *_, where = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    except OSError:
        return None


def own_names_address() -> str | None:
    """What this host's own name resolves to: gloo offers that address to its peers unless it is told an interface."""
    try:
        return socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    except OSError:
        return None


def check_named(environ: Mapping[str, str]) -> None:
    """Raise NoInterface where GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names none that is here."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = environ.get(variable, "")
        if not text or text.startswith("^"):  # NCCL: all but these
            continue
        names = text.removeprefix("=").split(",")
        if variable.startswith("GLOO"):
            absent = [name for name in names if name not in here]  # gloo wants each of them
        else:  # NCCL takes beginnings of names, whole ones after "="
            fits = str.__eq__ if text.startswith("=") else str.startswith
            absent = [] if any(fits(name, wanted) for name in here for wanted in names) else names
        if absent:
            raise NoInterface(f"{variable}={text}: this host has no {', '.join(absent)}", f"one of {', '.join(here)}")


def choose(toward: str | None, environ: MutableMapping[str, str]) -> tuple[str, bool]:
    """Make gloo, torch's rpc and NCCL use the interface on the way to a peer (None: all peers are on this host).

    What is set already is kept. Returns a line that says what was chosen, and whether that mends what would have
    gone wrong without it.
    """
    here = addresses()
    address = own_address(toward or "127.0.0.1")
    name = next((name for name, own in here.items() if address in own), None)
    if name is None or "GLOO_SOCKET_IFNAME" in environ:
        return f"interface: {environ.get('GLOO_SOCKET_IFNAME', 'not set')}", False
    environ["GLOO_SOCKET_IFNAME"] = name
    environ.setdefault("TP_SOCKET_IFNAME", name)
    if toward is None:
        return f"interface: {name}, since all ranks are on this host", False
    others = [other for other, own in here.items() if own and not other.startswith(("lo", "docker"))]
    if others[:1] != [name]:  # NCCL would meet its peers through the first
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    named = own_names_address()
    way = f"{name} ({address}), the way to {toward}"
    if named in here[name]:
        return f"interface: {way}", False
    seen = f"resolves to {named}" if named else "does not resolve"
    return f"this host's own name {socket.gethostname()} {seen}, where no peer finds it: taking {way}", True


def identity() -> str:
    """The same for processes that share a network, GPUs and memory; containers of one host differ."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
    return " ".join(parts)
