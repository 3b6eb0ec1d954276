"""What the doctor tries between all nodes: a collective on each backend, the clocks, every pair."""

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from allranks import handshake, interfaces, machine
from allranks.checks import OK, WARNING, Finding, Member, first_line
from allranks.errors import CollectiveMismatch, GpuUnusable, PeerUnreachable, RankFailed

GROUP = 10.0  # seconds for one call of gloo
POLL = 0.01  # seconds between two looks into the store
MEASURE = 10.0  # seconds after which no further pair is measured
PAIRS = 16  # members whose pairs are measured
LARGE = 4 << 20  # bytes of a message whose bandwidth is measured


def meet(me: Member, timeout: float, met: list) -> tuple[str, str]:
    """Meet the others; the handshake has each host reach every other."""
    met.append(handshake.meet(me.world, me.nproc, timeout))
    count = len(met[0].hosts)
    me.shape = shape(count, me.size * me.nproc if me.kind == "node" else me.size)
    reached = "each reaches every other" if 1 < count <= handshake.PEERS + 1 else "which reach each other in part"
    return OK, f"all {me.size} {me.kind}s on {count} host{'s' * (count > 1)}" + (f", {reached}" if count > 1 else "")


def shape(hosts: int, ranks: int) -> str:
    return f"{hosts} host{'s' * (hosts > 1)}, {ranks} rank{'s' * (ranks > 1)}"


def names(hosts: list[str], patience: float = 5.0) -> tuple[str, str]:
    """Whether every host's name resolves here within `patience` seconds; all are looked up at once."""
    found: dict[str, bool] = {}

    def look_up(name: str) -> None:
        try:
            found[name] = bool(socket.getaddrinfo(name, None))
        except (OSError, UnicodeError):
            found[name] = False

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in set(hosts)]
    end = time.monotonic() + patience
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    unknown = [name for name in dict.fromkeys(hosts) if not found.get(name)]
    if unknown:
        return WARNING, f"{', '.join(unknown[:8])} does not resolve here; allranks goes by address, others may not"
    return OK, f"resolved: {', '.join(list(found)[:8])}" + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def try_backends(me: Member, store, peer: str | None, local: int, no_nccl: str) -> None:
    """One collective on each backend, the clocks, the pairs; ends at the first that fails.

    local: the index of this member's GPU. no_nccl: why nccl cannot work, or empty.
    """
    import torch.distributed as dist

    line, mended = interfaces.choose(peer, os.environ)
    me.findings.append(Finding("interface", WARNING if mended else OK, line.removeprefix("interface: ")))
    if not me.look("gloo", _open_gloo, me, dist.PrefixStore("doctor", store)):
        return
    if me.size > 1 and not (me.look("clock", clock, me) and me.look("gloo pairs", _pairs, me, "gloo", "cpu", None)):
        return
    opened: list = []
    if me.look("nccl collective", _open_nccl, me, local, no_nccl, opened) and opened and me.size > 1:
        me.look("nccl pairs", _pairs, me, "nccl", f"cuda:{local}", opened[0])


def _open_gloo(me: Member, store) -> tuple[str, str]:
    import torch.distributed as dist

    store.set(f"here/{me.index}", "1")
    if not wait(lambda: store.check([f"here/{index}" for index in range(me.size)]), GROUP):
        gone = [index for index in range(me.size) if not store.check([f"here/{index}"])]
        words = f"{me.kind} {', '.join(map(str, gone[:8]))} met the others and did not go on (killed, or cut off?)"
        raise RankFailed(words, f"all {me.size} {me.kind}s in one collective", "see what its log ends with")
    try:
        longest = timedelta(seconds=GROUP)
        dist.init_process_group("gloo", store=store, rank=me.index, world_size=me.size, timeout=longest)
    except RuntimeError as error:
        raise PeerUnreachable(f"gloo: {first_line(error)}", "connections between all hosts on any port") from None
    return _all_reduce(me, "cpu", None)


def _open_nccl(me: Member, local: int, no_nccl: str, opened: list) -> tuple[str, str]:
    """For as long as our watchdog lets it: NCCL's own would end the process without a word of ours."""
    import torch
    import torch.distributed as dist

    able = torch.tensor([int(dist.is_nccl_available() and local < machine.gpu_count())])
    dist.all_reduce(able, op=dist.ReduceOp.MIN)  # all of them, or none
    if no_nccl or not able.item():
        return WARNING if no_nccl else OK, f"not tried: {no_nccl or f'not every {me.kind} has a GPU'}"
    torch.cuda.set_device(local)
    try:
        opened.append(dist.new_group(backend="nccl", timeout=timedelta(minutes=5)))
        return _all_reduce(me, f"cuda:{local}", opened[0])
    except RuntimeError as error:
        raise GpuUnusable(f"nccl: {first_line(error)}", "one all_reduce", "see NCCL_DEBUG=INFO, or use gloo") from None


def _all_reduce(me: Member, device: str, group) -> tuple[str, str]:
    import torch
    import torch.distributed as dist

    for _ in range(2):  # connections are made by the first
        began, total = time.perf_counter(), torch.ones(1, device=device)
        dist.all_reduce(total, group=group)
        seen = total.item()
    if seen != me.size:
        raise CollectiveMismatch(f"all_reduce of ones over {me.size} gave {seen:g}", str(me.size))
    return OK, f"all_reduce over {me.size} in {(time.perf_counter() - began) * 1e3:.1f} ms"


def clock(me: Member) -> tuple[str, str]:
    """How far this clock is from rank 0's: the answer with the shortest way counts, as in NTP."""
    import torch
    import torch.distributed as dist

    stamp = torch.zeros(1, dtype=torch.float64)
    if me.index:
        for _ in range(5):
            dist.recv(stamp, 0)
            stamp[0] = time.time()
            dist.send(stamp, 0)
        dist.recv(stamp, 0)
        seconds = stamp.item()
        seen = f"{abs(seconds) * 1e3:.1f} ms {'ahead of' if seconds > 0 else 'behind'} {me.kind} 0's"
        return (WARNING, f"{seen}: let the hosts keep time (NTP)") if abs(seconds) > 1 else (OK, seen)
    for other in range(1, me.size):
        offsets = []
        for _ in range(5):
            began = time.time()
            dist.send(stamp, other)
            dist.recv(stamp, other)
            ended = time.time()
            offsets.append((ended - began, stamp.item() - (began + ended) / 2))
        stamp[0] = min(offsets)[1]
        dist.send(stamp, other)
    return OK, "the others compare theirs with this one"


def _pairs(me: Member, backend: str, device: str, group) -> tuple[str, str]:
    """Measure each pair of members, one after the other, so that none slows another down."""
    import torch
    import torch.distributed as dist

    size, end, measured = min(me.size, PAIRS), time.monotonic() + MEASURE, 0
    go, rows = torch.ones(1, device=device), me.pairs.setdefault(backend, [])
    todo = [(one, other) for one in range(size) for other in range(one + 1, size)]
    for one, other in todo:
        go[0] = time.monotonic() < end
        dist.broadcast(go, 0, group)
        if not go.item():
            break
        measured += 1
        if me.index == one:
            rows.append([one, other, *_ping_pong(other, True, device, group)])
        elif me.index == other:
            _ping_pong(one, False, device, group)
    left = f"; the first {PAIRS} of {me.size} members only" if me.size > PAIRS else ""
    return OK, f"{measured} of {len(todo)} measured within {MEASURE:.0f} s{left}"


def _ping_pong(peer: int, leads: bool, device: str, group) -> tuple[float, float]:
    """Microseconds of a small message one way, GB/s of large ones, as the leader sees them."""
    import torch
    import torch.distributed as dist

    small, large = torch.zeros(1, device=device), torch.zeros(LARGE // 4, device=device)
    ours, answer = (dist.send, dist.recv) if leads else (dist.recv, dist.send)

    def exchange(tensor, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            ours(tensor, peer, group)
        answer(small, peer, group)
        small.item()  # waits for a GPU
        return time.perf_counter() - began

    exchange(small, 1)
    latency = statistics.median(exchange(small, 1) for _ in range(20)) / 2
    times = torch.tensor([4.0 if exchange(large, 1) < 0.2 else 1.0], device=device)
    ours(times, peer, group)  # the leader's count
    return latency * 1e6, LARGE * times.item() / exchange(large, int(times.item())) / 1e9


def wait(done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(POLL)
    return True
