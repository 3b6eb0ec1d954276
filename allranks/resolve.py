"""Environment in, World out: one meaning for what any launcher says. Pure: reads nothing but its arguments."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from allranks.errors import InvalidVariable, LauncherConflict, MasterIsLoopback, MissingVariable
from allranks.launchers import BY_NAME, LAUNCHERS, Launcher

DEFAULT_PORT = 29500
THIS_HOST = "127.0.0.1"
NODE, PROCESS = ("node_rank", "nnodes"), ("rank", "world_size")


class World(NamedTuple):
    """Where this process stands in its job; None where the launcher does not say.

    level is "node" where this process stands for a node that is to start one process per GPU, and "process" where
    it is one of the ranks. sources maps each field to the variable (or "argv", "default") that it came from.
    """

    launcher: str
    level: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    nnodes: int | None = None
    master_addr: str | None = None
    master_port: int = DEFAULT_PORT
    host_addr: str | None = None
    sources: Mapping[str, str] = MappingProxyType({})


def resolve(environ: Mapping[str, str], argv: Sequence[str] = (), needs_master: bool = True) -> World:
    """Read what the launcher said.

    environ: the environment variables. argv: the command line, where older launchers put `--local-rank=N`.
    needs_master: False where ranks that were started one by one will meet without a MASTER_ADDR.
    Raises MissingVariable, InvalidVariable, LauncherConflict or MasterIsLoopback.
    """
    row = _choose(environ)
    known: dict[str, int | str] = {}
    sources: dict[str, str] = {}
    for field, variable in (row.fields | row.optional).items():
        if variable in environ and field not in ("master_addr", "master_port"):
            text = _read(row, field, environ)
            if text is not None:
                least = 1 if "size" in field or field == "nnodes" else 0
                known[field], sources[field] = _number({variable: text}, variable, least), variable
    if row.level == "process" and "local_rank" not in known:
        _read_local_rank(argv, known, sources)
    if row.level == "node" and "NPROC_PER_NODE" in environ:
        known["local_world_size"], sources["local_world_size"] = _number(environ, "NPROC_PER_NODE", 1), "NPROC_PER_NODE"
    _require(row, environ, known, needs_master and known.get("world_size") != 1)
    _derive(row, known)
    _check_ranges(known, sources)
    _read_master(row, environ, known, sources)
    _read_host_addr(row, environ, known, sources)
    return World(launcher=row.name, level=row.level, sources=sources, **known)


def overlooked(world: World, environ: Mapping[str, str]) -> str | None:
    """One line where a platform around this launcher speaks of another number of nodes, else None."""
    allocated = environ.get("SLURM_NNODES", "")
    if world.launcher == "none" and allocated.isdecimal() and int(allocated) > 1:
        return (
            f"Slurm has given this job {allocated} nodes (SLURM_NNODES), but this process is not one of srun's tasks "
            "and trains alone: start it with srun --ntasks-per-node=1"
        )
    own = BY_NAME[world.launcher].fields.values()
    for row in LAUNCHERS:
        size, index = row.fields.get("nnodes", ""), row.fields.get("node_rank", "")
        around = row.level == "node" and size not in own and environ.get(size, "").isdecimal()
        if around and world.nnodes and int(environ[size]) != world.nnodes:
            return (
                f"{row.title} has {size}={environ[size]} nodes, but {world.launcher} was started with {world.nnodes}: "
                f"if one job over all of them is meant, start it with --nnodes=${size} --node-rank=${index} "
                f"--master-addr={'HOST' if 'master_addr' in row.read else '$' + row.fields['master_addr']}"
            )
    return None


def visible(environ: Mapping[str, str]) -> list[Launcher]:
    """The rows whose marks are there, in order of precedence; not all of them need be meant."""
    return [row for row in LAUNCHERS if len(row.marks_in(environ)) >= row.marks_seen]


def _choose(environ: Mapping[str, str]) -> Launcher:
    named = environ.get("ALLRANKS_LAUNCHER")
    if named is not None:
        if named not in BY_NAME:
            raise InvalidVariable(f"ALLRANKS_LAUNCHER={named!r}", f"one of {', '.join(BY_NAME)}", "correct or unset it")
        return BY_NAME[named]
    seen = [row for row in visible(environ) if row.when(environ)]
    for row in seen:
        if row.certain:
            return row
    if "LOCAL_RANK" in environ:  # only what has started this very process can have given it a local rank
        for row in seen:
            if (row.fields | row.optional).get("local_rank") == "LOCAL_RANK":
                return row
    covered = {name for row in seen for name in row.covers}
    first, *others = [row for row in seen if row.name not in covered]
    for other in others:
        if other.marks:
            _agree(first, other, environ)
    return first


def _agree(row: Launcher, other: Launcher, environ: Mapping[str, str]) -> None:
    """Two launchers that are visible at once must say the same of this process."""
    for (mine, my_text), (theirs, their_text) in zip(_place(row, environ), _place(other, environ), strict=True):
        if None not in (my_text, their_text) and my_text != their_text:
            raise LauncherConflict(
                f"{row.title} says {mine}={environ[mine]} and {other.title} says {theirs}={environ[theirs]}",
                "one launcher, or two that agree",
                f"unset the variables of one, or set ALLRANKS_LAUNCHER={row.name} or ={other.name}",
            )


def _place(row: Launcher, environ: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """The variables that say which one of how many this process is, and what they mean, None where they do not tell."""
    variables = [(row.fields[field], field) for field in (NODE if row.level == "node" else PROCESS)]
    return [(variable, _read(row, field, environ) if variable in environ else None) for variable, field in variables]


def _read(row: Launcher, field: str, environ: Mapping[str, str]) -> str | None:
    """The text that the field's variable means, which must be there."""
    variable = (row.fields | row.optional)[field]
    if field not in row.read:
        return environ[variable]
    try:
        return row.read[field](environ[variable], environ)
    except (ValueError, KeyError, IndexError, TypeError):
        raise InvalidVariable(
            f"{variable}={environ[variable]!r} cannot be read",
            f"what {row.title} writes there",
            "correct or unset it where the job is started",
        ) from None


def _number(environ: Mapping[str, str], variable: str, least: int, most: int | None = None) -> int:
    text = environ[variable]
    expected = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"
    # isdecimal alone would let other scripts' digits through
    if not (text.isascii() and text.removeprefix("-").isdecimal()) or len(text) > 9:
        seen = f"{variable} is empty" if not text.strip() else f"{variable}={text!r} is not a number"
        raise InvalidVariable(seen, expected, "correct it where the job is started")
    if int(text) < least or (most is not None and int(text) > most):
        raise InvalidVariable(f"{variable}={text}", expected, "correct it where the job is started")
    return int(text)


def _read_local_rank(argv: Sequence[str], known: dict, sources: dict) -> None:
    for index, option in enumerate(argv):
        name, equals, value = option.partition("=")
        if name in ("--local-rank", "--local_rank"):
            following = "".join(argv[index + 1 : index + 2])
            known["local_rank"], sources["local_rank"] = (
                _number({name: value if equals else following}, name, 0),
                "argv",
            )


def _require(row: Launcher, environ: Mapping[str, str], known: dict, needs_master: bool) -> None:
    needless = () if needs_master or row.name != "bare" else ("master_addr",)
    if "MASTER_ADDR" in environ and "master_addr" in row.read:
        needless = ("master_addr",)
    needed = list(dict.fromkeys(variable for field, variable in row.fields.items() if field not in needless))
    if row.host_addr:  # every variable that the address of this node is made of
        needed += [mark for mark in row.marks if mark not in needed]
    if row.name == "thd" and known.get("rank") != 0:
        needed.append("MASTER_ADDR")
    missing = [variable for variable in needed if variable not in environ]
    if missing:
        given = dict.fromkeys((*row.marks_in(environ), *filter(environ.__contains__, needed)))
        there = ", ".join(f"{name}={environ[name]}" for name in given)
        raise MissingVariable(
            f"{', '.join(missing)} not set, though {there} {'is' if there.count('=') == 1 else 'are'}",
            f"all variables of the launcher {row.name!r} ({row.title})",
            "set the missing one, or unset the others for a job of one node",
        )


def _derive(row: Launcher, known: dict) -> None:
    """What follows from the rest, without asking the machine."""
    if row.name == "none":
        known |= {"node_rank": 0, "nnodes": 1}
    if row.level == "process":
        if known["world_size"] == 1:
            known |= {"local_rank": 0, "local_world_size": 1, "node_rank": 0, "nnodes": 1}
    elif "local_world_size" in known:
        known["world_size"] = known["nnodes"] * known["local_world_size"]
        if known["local_world_size"] == 1:
            known |= {"rank": known["node_rank"], "local_rank": 0}


def _check_ranges(known: dict, sources: dict) -> None:
    for index, count in (("rank", "world_size"), ("node_rank", "nnodes"), ("local_rank", "local_world_size")):
        if index in known and count in known and known[index] >= known[count]:
            seen, limit = sources.get(index, index), sources.get(count, count)
            raise InvalidVariable(
                f"{seen}={known[index]} with {limit}={known[count]}",
                f"{seen} from 0 to {known[count] - 1}",
                "correct whichever is wrong where the job is started",
            )
    if known.get("local_world_size", 0) > known.get("world_size", known.get("local_world_size", 0)):
        raise InvalidVariable(
            f"{sources['local_world_size']}={known['local_world_size']} with "
            f"{sources.get('world_size', 'world_size')}={known['world_size']}",
            "no more ranks on one node than in the whole job",
            "correct whichever is wrong where the job is started",
        )


def _read_master(row: Launcher, environ: Mapping[str, str], known: dict, sources: dict) -> None:
    variable = (row.fields | row.optional).get("master_addr", "")
    if "master_addr" in row.read and "MASTER_ADDR" in environ:
        variable = "MASTER_ADDR"
    ignored = row.name == "thd" and known["rank"] == 0  # it is the master, whatever it is told
    address, port = None, None
    if variable in environ and not ignored:
        text = environ[variable] if variable == "MASTER_ADDR" else _read(row, "master_addr", environ)
        address, port = split_address(text, variable)
    elif not ignored and not (row.meets and known["world_size"] > 1):
        address, variable = THIS_HOST, "default"
    if address is not None:
        known["master_addr"], sources["master_addr"] = address, variable
    ports = [(row.fields | row.optional).get("master_port", ""), "MASTER_PORT"]
    if "master_port" in row.read:
        ports.reverse()
    given = [name for name in ports if name in environ]
    if port is not None:
        known["master_port"], sources["master_port"] = port, variable
    elif given:
        text = environ[given[0]] if given[0] == "MASTER_PORT" else _read(row, "master_port", environ)
        known["master_port"], sources["master_port"] = _number({given[0]: text}, given[0], 1, 65535), given[0]
    else:
        sources["master_port"] = "default"
    # torchrun has met its nodes at this address already; a simulated cluster lives on one host
    one_host = known.get("nnodes", 1) == 1 or row.name == "torchrun" or "ALLRANKS_SIMULATED" in environ
    if not one_host and is_loopback(address):
        raise MasterIsLoopback(
            f"{variable}={environ[variable]} with {known['nnodes']} nodes: each of them would call itself",
            "an address of node 0 that the other nodes can reach",
            f"set {variable} to node 0's name or address",
        )


def _read_host_addr(row: Launcher, environ: Mapping[str, str], known: dict, sources: dict) -> None:
    if row.host_addr:
        variable, template = row.host_addr
        known["host_addr"] = environ.get(variable) or template.format_map(environ)
        sources["host_addr"] = variable


def split_address(text: str, variable: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[v6]:port` or a bare IPv6 literal -> (host, port or None). variable: for the message."""
    host, port = text.strip(), None
    if host.startswith("["):
        host, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":") or None
    elif host.count(":") == 1:
        host, port = host.split(":")
    host = host.removesuffix(".")  # of an absolute name: /etc/hosts does not know it so
    if not host or any(c.isspace() for c in host):
        seen = f"{variable}={text!r}" if text else f"{variable} is empty"
        raise InvalidVariable(seen, "a host name or an address", "set it to the address of rank 0's node")
    return host, None if port is None else _number({variable: port}, variable, 1, 65535)


def is_loopback(address: str | None) -> bool:
    """Whether the text alone shows that an address means "this host": no name is looked up."""
    host = (address or "").lower().rstrip(".")
    return host in ("localhost", "localhost.localdomain", "::1", "0.0.0.0", "::") or (
        host.startswith("127.") and host.count(".") == 3
    )
