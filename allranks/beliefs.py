"""What each member believes about the job, and what follows when all of it is put side by side.

A belief is a dict that its member makes and sends as JSON to the host of the handshake's store, which compares.
"""

import os
import socket
from collections.abc import Mapping

from allranks import interfaces, machine
from allranks.errors import AllranksError, JobMismatch, RankTwice, VersionMismatch, WorldMismatch
from allranks.launchers import BY_NAME
from allranks.resolve import World


def belief_of(world: World, index: int, size: int, nproc: int, port: int, environ: Mapping[str, str]) -> dict:
    """What this member believes. index, size: its rank and world_size, or node_rank and nnodes; port: its hub's."""
    import torch

    variable = BY_NAME[world.launcher].job
    gpus = machine.gpus()
    return {
        "index": index,
        "size": size,
        "size_name": world.sources.get("nnodes" if world.level == "node" else "world_size", "WORLD_SIZE"),
        "level": world.level,
        "nproc": nproc if world.level == "node" else None,
        "host": socket.gethostname(),
        "identity": interfaces.identity() + (f" {index}" if "ALLRANKS_SIMULATED" in environ else ""),
        "address": interfaces.own_address(world.master_addr),
        "port": port,
        "pid": os.getpid(),
        "job": environ.get(variable, "") if variable else "",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else "",
        "gpu_count": len(gpus),
        "gpus": [gpus[local_rank % len(gpus)].uuid for local_rank in _local_ranks(world, nproc, len(gpus))],
    }


def _local_ranks(world: World, nproc: int, gpus: int) -> range | tuple[int, ...]:
    """The local ranks that this member stands for, as far as it can be told which GPU is whose."""
    if not gpus:
        return ()
    if world.level == "node":
        return range(nproc)
    if world.local_rank is not None:
        return (world.local_rank,)
    return (0,) if gpus == 1 else ()


def disagreement(beliefs: list[dict], kind: str = "rank") -> AllranksError | None:
    """The error that these beliefs amount to, or None: the first of them is compared with the others."""

    def who(belief: dict) -> str:
        return f"{kind} {belief['index']} on {belief['host']}"

    by_index: dict[int, dict] = {}
    for one in sorted(beliefs, key=lambda belief: belief["index"]):
        other = by_index.setdefault(one["index"], one)
        if other is not one:
            return RankTwice(
                f"{kind} {one['index']} is there twice: process {other['pid']} on {other['host']} and process "
                f"{one['pid']} on {one['host']}",
                f"each {kind} once",
            )
    first = next(iter(by_index.values()), None)
    for other in list(by_index.values())[1:]:
        for field, name in (("level", "what a rank counts"), ("size", first["size_name"]), ("nproc", "ranks per node")):
            if first[field] != other[field]:
                return WorldMismatch(
                    f"{name} differs: {first[field]} for {who(first)}, {other[field]} for {who(other)}",
                    "the same everywhere",
                )
        for field, name in (("torch", "torch"), ("nccl", "NCCL")):
            if first[field].split(".")[:2] != other[field].split(".")[:2] and (first[field] and other[field]):
                return VersionMismatch(
                    f"{name} differs: {first[field]} for {who(first)}, {other[field]} for {who(other)}",
                    "the same major and minor version everywhere",
                )
    return None


def by_host(beliefs: list[dict]) -> list[dict]:
    """The hosts in rank order: name, address, port, and the members and tickets that are there."""
    hosts: dict[str, dict] = {}
    for belief in sorted(beliefs, key=lambda belief: belief["index"]):
        place = {"name": belief["host"], "address": belief["address"], "port": belief["port"], "members": []}
        hosts.setdefault(belief["identity"], place | {"tickets": []})
        hosts[belief["identity"]]["members"].append(belief["index"])
        hosts[belief["identity"]]["tickets"].append(belief["ticket"])
    first, *others = hosts.values()
    if others:  # the others know it as MASTER_ADDR, which may be a Service's and lead to that one port only
        first["address"] = interfaces.own_address(others[0]["address"])
    return [first, *others]


def why_no_nccl(beliefs: list[dict], kind: str) -> str:
    """Why nccl cannot work between these members; empty where it can, or where no GPU is anywhere."""
    return _shared(beliefs) or _lacking(beliefs, kind)


def _shared(beliefs: list[dict]) -> str:
    """Which two ranks would use the same GPU; empty where none do."""
    users: dict[str, str] = {}
    for belief in beliefs:
        for gpu in belief["gpus"]:
            who = f"a rank of {belief['host']} (process {belief['pid']})"
            if users.setdefault(gpu, who) != who or belief["gpus"].count(gpu) > 1:
                return f"{users[gpu]} and {who} share {gpu}"
    return ""


def _lacking(beliefs: list[dict], kind: str) -> str:
    """Who sees no GPU while another does; empty where all or none do."""
    without, most = min(beliefs, key=lambda one: one["gpu_count"]), max(beliefs, key=lambda one: one["gpu_count"])
    if without["gpu_count"] or not most["gpu_count"]:
        return ""
    one, other = (f"{kind} {belief['index']} on {belief['host']}" for belief in (without, most))
    return f"{one} sees no GPU, {other} sees {most['gpu_count']}"


def other_job(belief: dict, here: dict) -> AllranksError:
    return JobMismatch(
        f"this is job {belief['job']!r}, and job {here['job']!r} meets at this address and port (rank 0: process "
        f"{here['pid']} on {here['host']})",
        "an address and port for each job",
    )
