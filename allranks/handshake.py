"""Before any backend: do all ranks agree, and who is missing? One TCPStore, on the master's port, which stays.

Each member (a node, or a rank where the launcher has started every one) posts what it believes. The host of the store
compares, and all are told the same: an error, or who is where. Then each host tries to reach every other.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

from allranks.beliefs import belief_of, by_host, disagreement, other_job, why_no_nccl
from allranks.errors import BY_CODE, AllranksError, PeerUnreachable, RankTwice, RendezvousFailed
from allranks.hub import Hub
from allranks.network import SAY_EVERY, parent_was_hung_up_on, port_taken, say, wait_for_master
from allranks.resolve import World

POLL = 0.01  # seconds between two looks into the store
LINGER = 5.0  # seconds that an error is kept for those who have not heard it yet
REACH = 10.0  # seconds for a connection between two hosts: four tries of TCP where packets are lost
PEERS = 64  # hosts that each host tries to reach: all of them in clusters that small


class Met(NamedTuple):
    """What all members know after the handshake.

    hosts: one dict per host, in rank order: name, address, members. hub: (address, port, token, host) of the watch,
    which this process runs where own_hub is not None. place: the index of this member's host. local: (index, number)
    of this member among those of its host. peer: the address of another host, None where there is but one.
    no_nccl: why nccl cannot work, or nothing. store: on rank 0 it serves the others for as long as it is kept.
    """

    hosts: list[dict]
    hub: tuple[str, int, str, str]
    own_hub: Hub | None
    place: int
    local: tuple[int, int]
    peer: str | None
    no_nccl: str
    store: object


def meet(world: World, nproc: int, timeout: float, environ: Mapping[str, str] = os.environ) -> Met:
    """Meet all members of the job; nproc: the ranks of this node, where its rank counts nodes. timeout: seconds.

    Raises MasterUnresolved, MasterRefused, MasterSilent, PortTaken, RendezvousFailed, RankTwice, WorldMismatch,
    VersionMismatch, JobMismatch or PeerUnreachable, on every member alike where that is possible.
    """
    hub = Hub()
    index, size = (world.node_rank, world.nnodes) if world.level == "node" else (world.rank, world.world_size)
    agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agents and index:
        wait_for_master(world.master_addr, world.master_port, timeout)
    belief = belief_of(world, index, size, nproc, hub.port, environ)
    try:
        store = _agents_store(world, environ) if agents else _prefixed(_open_store(world, hosts_it=index == 0))
        ticket = store.add("tickets", 1)
        store.set(f"belief/{ticket}", json.dumps(belief))
        if index == 0:
            _Host(store, belief, timeout).decide()
        hosts, token, no_nccl = _hear(store, ticket, belief, timeout)
        if index == 0:
            hub.watch(token)
        own = next(host for host in hosts if index in host["members"])
        leads = own["members"][0] == index
        if len(hosts) > 1:
            _reach(store, hosts, own, hub if leads else None, world, index == 0)
        _part(store, size, index == 0)
    except AllranksError:
        hub.close()
        raise
    except RuntimeError as error:  # the store's client: its server has gone
        hub.close()
        raise RendezvousFailed(
            f"lost rank 0's store at {world.master_addr}:{world.master_port} ({str(error).splitlines()[0]})",
            f"all {size} to meet there",
            "see what the log of rank 0 ends with",
        ) from None
    if index:
        hub.close()
    place, first = hosts.index(own), hosts[0]
    return Met(
        hosts=hosts,
        hub=(first["address"] if place else "127.0.0.1", first["port"], token, first["name"]),
        own_hub=None if index else hub,
        place=place,
        local=(own["members"].index(index), len(own["members"])),
        peer=None if len(hosts) == 1 else hosts[0 if place else 1]["address"],
        no_nccl=no_nccl,
        store=store,
    )


def _open_store(world: World, hosts_it: bool):
    """The TCPStore that the ranks' init_process_group() will join, too."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(
            "localhost" if hosts_it else world.master_addr,
            world.master_port,
            None,
            hosts_it,
            timedelta(seconds=60),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        if hosts_it and "EADDRINUSE" in str(error):
            raise port_taken(world.master_port, "Address already in use") from None
        raise


def _agents_store(world: World, environ: Mapping[str, str]):
    """The store that torchrun's agents have met at; ranks that it starts again have their own keys there."""
    store = _open_store(world, hosts_it=False)
    if parent_was_hung_up_on(world.master_port):
        raise RendezvousFailed(
            f"node {world.node_rank}'s torchrun met the others at {world.master_addr}:{world.master_port}, "
            "and that store has gone: another answers there",
            "the store of rank 0's node to stay",
            "start torchrun again on this node too, as has been done on rank 0's",
        )
    return _prefixed(store, environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _prefixed(store, attempt: str = ""):
    from torch.distributed import PrefixStore

    return PrefixStore(f"allranks/{attempt}", store)


class _Host:
    """The member that runs the store (rank 0, node 0) compares what the others believe with what it believes."""

    def __init__(self, store, own: dict, timeout: float):
        self.store, self.own, self.size, self.timeout = store, own, own["size"], timeout
        self.kind = "node" if own["level"] == "node" else "rank"
        self.beliefs: list[dict] = []
        self.tickets = 0
        self.unread: list[int] = []  # tickets whose holders have not said anything yet

    def decide(self) -> None:
        """Wait for all, and write the verdict; an error stays until all have heard it."""
        start = time.monotonic()
        next_word = start + SAY_EVERY
        while True:
            self._read()
            error = disagreement(self.beliefs, self.kind)
            if error or len(self.beliefs) == self.size:
                break
            now = time.monotonic()
            if now - start >= self.timeout:
                error = self._absent()
                break
            if now >= next_word:
                next_word += SAY_EVERY
                words = f"({now - start:.0f} of {self.timeout:.0f} s): {self._missing()}"
                self.store.set("waiting", words)
                say(f"waiting for the others {words}")
            time.sleep(POLL)
        if not error:
            no_nccl = why_no_nccl(self.beliefs, self.kind)
            verdict = {"hosts": by_host(self.beliefs), "token": os.urandom(8).hex(), "no_nccl": no_nccl}
            self.store.set("verdict", json.dumps(verdict))
            return
        self.store.set("verdict", _as_json(error))
        heard_by = max(belief["size"] for belief in [self.own, *self.beliefs])
        end = time.monotonic() + LINGER
        while self.store.add("heard", 0) < heard_by - 1 and time.monotonic() < end:
            time.sleep(POLL)
        raise error

    def _read(self) -> None:
        """Take in the beliefs that have come since; those of another job are told so, and are not our affair."""
        before, self.tickets = self.tickets, self.store.add("tickets", 0)
        self.unread += range(before + 1, self.tickets + 1)
        for ticket in [one for one in self.unread if self.store.check([f"belief/{one}"])]:
            self.unread.remove(ticket)
            belief = json.loads(self.store.get(f"belief/{ticket}"))
            belief["ticket"] = ticket
            if belief["job"] == self.own["job"]:
                self.beliefs.append(belief)
            else:
                self.store.set(f"verdict/{ticket}", _as_json(other_job(belief, self.own)))

    def _missing(self) -> str:
        here = {belief["index"]: belief["host"] for belief in self.beliefs}
        absent = [index for index in range(self.size) if index not in here]
        return f"{_names(self.kind, absent)} missing, here {'is' if len(here) == 1 else 'are'} " + ", ".join(
            f"{self.kind} {index} on {here[index]}" for index in sorted(here)[:8]
        )

    def _absent(self) -> AllranksError:
        return RendezvousFailed(self._missing(), f"{self.size} {self.kind}s within {self.timeout:.0f} s")


def _names(kind: str, indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
    return f"{kind} {shown} is" if len(indices) == 1 else f"{kind}s {shown} are"


def _as_json(error: AllranksError) -> str:
    return json.dumps({"code": error.code, "parts": error.parts})


def _hear(store, ticket: int, belief: dict, timeout: float) -> tuple[list[dict], str, str]:
    """Wait for the verdict: the hosts, the watch's token, why nccl cannot work. Raises the error that all are told."""
    start = time.monotonic()
    next_word = start + SAY_EVERY
    while True:
        key = next((key for key in ("verdict", f"verdict/{ticket}") if store.check([key])), None)
        if key:
            break
        now = time.monotonic()
        if now - start > timeout + LINGER:
            raise RendezvousFailed(f"rank 0 has not answered for {now - start:.0f} s", "its verdict")
        if now >= next_word:
            next_word += SAY_EVERY
            if store.check(["waiting"]):
                say(f"waiting for the others {store.get('waiting').decode()}")
            else:
                say(f"waiting for rank 0 ({now - start:.0f} of {timeout:.0f} s)")
        time.sleep(POLL)
    verdict = json.loads(store.get(key))
    store.add("heard", 1)
    if "code" in verdict:
        raise BY_CODE[verdict["code"]](*verdict["parts"])
    if not any(ticket in host["tickets"] for host in verdict["hosts"]):
        where = next((host["name"] for host in verdict["hosts"] if belief["index"] in host["members"]), "another host")
        raise RankTwice(
            f"the job that meets here is complete, and its rank {belief['index']} is on {where}",
            "to be one of its ranks",
            "end the older job, or give this one another MASTER_PORT",
        )
    return verdict["hosts"], verdict["token"], verdict["no_nccl"]


def _reach(store, hosts: list[dict], own: dict, hub: Hub | None, world: World, decides: bool) -> None:
    """The first member of each host connects to all others; raise PeerUnreachable on every member where one cannot."""
    place = hosts.index(own)
    if hub:
        hub.start()
        others = [hosts[(place + step) % len(hosts)] for step in range(1, min(len(hosts), PEERS + 1))]
        with ThreadPoolExecutor(min(len(others), 16)) as pool:
            problems = list(pool.map(_connect, others))
        unreachable = [(own["name"], host["name"], why) for host, why in zip(others, problems, strict=True) if why]
        store.set(f"reach/{place}", json.dumps(unreachable))
    if decides:
        store.set("reached", json.dumps(_collect(store, len(hosts))))
    _await_key(store, "reached", 2 * REACH + LINGER)
    pairs = json.loads(store.get("reached"))
    if not pairs:
        return
    _part(store, sum(len(host["members"]) for host in hosts), decides)
    shown = ", ".join(f"{one} to {other} ({why})" for one, other, why in pairs[:4])
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    raise PeerUnreachable(
        f"every host reaches the store at {world.master_addr}:{world.master_port}, but not {shown}{more}",
        "connections between all hosts on any port",
    )


def _part(store, size: int, stays: bool) -> None:
    """The host of the store stays until all know what it had to tell."""
    parted, end = store.add("parted", 1), time.monotonic() + LINGER
    while stays and parted < size and time.monotonic() < end:
        time.sleep(POLL)
        parted = store.add("parted", 0)


def _collect(store, count: int) -> list:
    end, pairs = time.monotonic() + 2 * REACH, []
    for place in range(count):
        while not store.check([f"reach/{place}"]) and time.monotonic() < end:
            time.sleep(POLL)
        if store.check([f"reach/{place}"]):
            pairs += json.loads(store.get(f"reach/{place}"))
    return pairs


def _await_key(store, key: str, timeout: float) -> None:
    end = time.monotonic() + timeout
    while not store.check([key]):
        if time.monotonic() > end:
            raise RendezvousFailed(f"rank 0 has not answered for {timeout:.0f} s", "its verdict")
        time.sleep(POLL)


def _connect(host: dict) -> str | None:
    """Why this host cannot be reached, or None."""
    if not host["address"]:
        return "it has no address on the way to the master"
    try:
        with socket.create_connection((host["address"], host["port"]), REACH) as probe:
            probe.settimeout(REACH)
            greeting = probe.recv(len(Hub.GREETING), socket.MSG_WAITALL)
            return None if greeting == Hub.GREETING else "another program answers"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return error.strerror.lower() if error.strerror else "no answer"
