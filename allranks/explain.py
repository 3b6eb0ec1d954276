"""What `python -m allranks explain` tells a person: the launcher, why, what else was seen, the ranks, torchrun."""

import shlex
from collections.abc import Iterator, Mapping

from allranks.launch import torchrun_command
from allranks.launchers import BY_NAME
from allranks.resolve import World, overlooked, visible

NODES_SHOWN = 8


def explain(world: World, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield lines of three columns: a field, its value, where that comes from. Raises AllranksError."""
    for name, value, source in _rows(world, environ):
        yield f"{name:17}{value:45} {source}".rstrip()


def _rows(world: World, environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    row = BY_NAME[world.launcher]
    marks = ["ALLRANKS_LAUNCHER"] if "ALLRANKS_LAUNCHER" in environ else row.marks_in(environ)
    yield "launcher", f"{row.name} ({row.title})", ", ".join(marks) or "no launcher's variables"
    yield "level", row.level, f"its rank counts {'nodes' if row.level == 'node' else 'processes'}"
    for field, value in world._asdict().items():
        if field not in ("launcher", "level", "sources"):
            yield field, "not known yet" if value is None else str(value), world.sources.get(field, "")
    for other in visible(environ):
        if other.name not in (world.launcher, "none"):
            yield "seen, not meant", other.name, ", ".join(other.marks_in(environ))
    if world.level == "node" and world.local_world_size:
        for node in range(min(world.nnodes, NODES_SHOWN)):
            first = node * world.local_world_size
            here = "  <- this one" if node == world.node_rank else ""
            yield f"node {node}", f"ranks {first} to {first + world.local_world_size - 1}{here}", ""
        if world.nnodes > NODES_SHOWN:
            yield "...", f"{world.nnodes} nodes", ""
    if line := overlooked(world, environ):
        yield "warning", line, ""
    yield "torchrun", shlex.join(torchrun_command(["train.py"], None)), ""
