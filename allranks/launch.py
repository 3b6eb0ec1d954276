"""launch(): from what the launcher said to the environment that torchrun would have set."""

import os
import sys
from collections.abc import Callable

from allranks import handshake, interfaces, last_words, machine
from allranks.agent import HUB, may_fork, rank_name, supervise, watch_from_environ
from allranks.errors import AllranksError, CannotStart, InvalidVariable, MissingVariable
from allranks.hub import Hub
from allranks.launchers import BY_NAME
from allranks.mend import check_driver, mend
from allranks.mpi import find_master
from allranks.network import check_port_free, free_port, own_name, say
from allranks.resolve import World, overlooked, resolve

_world: World | None = None
_met: handshake.Met | None = None  # with the store that all ranks' init_process_group() joins


def launch(nproc_per_node: int | None = None, *, fork: bool = True, meet: bool = True) -> World:
    """Return in every rank of the job, with the environment that torchrun would have set.

    Call it first in main(), before CUDA is touched. Where the launcher has started one process per node, this one
    becomes the parent of that node's ranks and never comes back; each rank runs the script from its top.

    nproc_per_node: ranks on this node; else NPROC_PER_NODE, else one per GPU, else 1. fork: ranks are forked from
    this process, after its imports; False starts fresh interpreters. meet: False where the script's ranks meet by
    tcp:// or file://: no MASTER_ADDR is needed then, and no master waited for. ALLRANKS_RENDEZVOUS_TIMEOUT: seconds to
    wait for the other nodes (600). An error is one line on standard error and the exit status of its class.
    """
    try:
        return _world or _launch(nproc_per_node, fork, meet=meet)
    except AllranksError as error:
        say(str(error))
        sys.exit(error.status)


def run(command: list[str], nproc_per_node: int | None, fork: bool) -> None:
    """Run a command, unchanged, as every rank of the job; a Python script shares one interpreter's imports.

    Never returns. Raises AllranksError.
    """
    words = command[1:] if os.path.basename(command[0]) in ("python", "python3") and len(command) > 1 else command
    if words[0].endswith(".py"):
        if not os.path.isfile(words[0]):
            raise CannotStart(f"{words[0]} is not there", "a script", "correct its path")
        import torch.distributed  # noqa: F401  (so that it can be mended before the script imports it)

        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        _launch(nproc_per_node, fork, lambda: _run_path(words[0]))
        _run_path(words[0])
        sys.exit(0)
    _launch(nproc_per_node, False)
    last_words.leave()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise CannotStart(f"{command[0]!r}: {error.strerror}", "a script or a program on PATH", "correct it") from None


def torchrun_command(command: list[str], nproc_per_node: int | None) -> list[str]:
    """The torchrun command line that would start this node's ranks; starts nothing.

    The command itself where the launcher has started every rank. Raises AllranksError.
    """
    world = resolve(os.environ)
    if world.level == "process":
        return ["python", *command] if command[0].endswith(".py") else command
    nproc = nproc_per_node or world.local_world_size or max(machine.gpu_count(), 1)
    alone = world.nnodes == 1 and world.sources["master_port"] == "default"
    options = {
        "--nnodes": world.nnodes,
        "--node-rank": world.node_rank,
        "--nproc-per-node": nproc,
        "--master-addr": world.master_addr,
        "--master-port": free_port() if alone else world.master_port,
    }
    if os.path.basename(command[0]) in ("python", "python3"):
        command = command[1:]
    elif not command[0].endswith(".py"):
        command = ["--no-python", *command]
    threads = os.environ.get("OMP_NUM_THREADS") or _threads_per_rank(nproc)
    return [
        "env",
        f"OMP_NUM_THREADS={threads}",
        "torchrun",
        *(f"{name}={value}" for name, value in options.items()),
        *command,
    ]


def _launch(
    nproc_per_node: int | None, fork: bool, script: Callable[[], object] | None = None, meet: bool = True
) -> World:
    _leave_pid_1()
    machine.die_with_parent()
    machine.ensure_temporary_directory()
    world = resolve(os.environ, sys.argv, needs_master=meet)
    if line := overlooked(world, os.environ):
        say(f"warning: {line}")
    _seconds("ALLRANKS_STALL_TIMEOUT", "600")
    _look_at_gpus(world)
    if (world.nnodes, world.world_size) != (1, 1):
        interfaces.check_named(os.environ)
    if world.host_addr:
        os.environ[world.sources["host_addr"]] = world.host_addr
    if world.level == "process":
        _take_local_rank_out_of(sys.argv)
        return _enter(world, meet)
    nproc = nproc_per_node or world.local_world_size or max(machine.gpu_count(), 1)
    if nproc == 1:
        alone = {"rank": world.node_rank, "world_size": world.nnodes, "local_rank": 0, "local_world_size": 1}
        return _enter(world._replace(**alone), meet)
    script = script or _find_script()
    world, hub, own_hub = _meet_nodes(world, nproc)
    _set_omp_threads(nproc)
    supervise(world, nproc, script if fork and may_fork() else None, _rendezvous_timeout(), hub, own_hub)
    raise AssertionError("the parent of the ranks never returns")


def _look_at_gpus(world: World) -> None:
    """Say at once, and once per node, that the driver is too old, or that a container made for GPUs has none."""
    if machine.gpus():
        import torch

        check_driver(machine.driver(), torch.version.cuda)
        return
    for_gpus = os.environ.get("NVIDIA_VISIBLE_DEVICES", "void") not in ("void", "none", "")
    if for_gpus and not world.local_rank and not _is_started_by_us() and machine.driver() is None:
        say("no GPU here: gloo on the CPU (GPUs: docker run --gpus all, on Kubernetes a limit of nvidia.com/gpu)")


def _enter(world: World, meet: bool) -> World:
    """This process is a rank: meet the others, then make the environment torchrun's."""
    global _world
    if _is_started_by_us():
        watch_from_environ()
    elif meet:
        world = _meet_ranks(world)
    if world.local_rank is None and (gpus := machine.gpu_count()) > 1:
        raise MissingVariable(
            f"LOCAL_RANK not set, and this process sees {gpus} GPUs",
            "to be told which of them is this rank's own",
            "set LOCAL_RANK (0 for the first rank on each host), or show each process its own GPU alone",
        )
    nproc = world.local_world_size or 1  # a rank that is not told of others is alone on its host
    world = world._replace(
        local_rank=world.local_rank or 0,
        local_world_size=nproc,
        node_rank=world.rank // nproc if world.node_rank is None else world.node_rank,
        nnodes=world.nnodes or -(-world.world_size // nproc),
    )
    world = world._replace(master_addr=world.master_addr or own_name())
    fixed = {"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "allranks", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    fixed |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    for name, value in fixed.items():
        os.environ.setdefault(name, value)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.world_size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_world_size),
        GROUP_RANK=str(world.node_rank),
        GROUP_WORLD_SIZE=str(world.nnodes),
        ROLE_RANK=str(world.rank),
        ROLE_WORLD_SIZE=str(world.world_size),
        MASTER_ADDR=world.master_addr,
        MASTER_PORT=str(world.master_port),
    )
    _set_omp_threads(world.local_world_size)
    mend()
    _world = world
    return world


def _is_started_by_us() -> bool:
    """Whether this rank's node has met the others already."""
    return os.environ.get("ALLRANKS_PARENT") == str(os.getppid()) and HUB in os.environ


def _meet_nodes(world: World, nproc: int) -> tuple[World, tuple, Hub | None]:
    """Meet the parents of the other nodes' ranks; return the world, and the hub of the watch."""
    seen = machine.gpus()
    if seen and (size := machine.small_shared_memory()):
        say(
            f"warning: /dev/shm has {size >> 20} MiB for {nproc} ranks, and NCCL may need more: docker run "
            "--shm-size=1g, or on Kubernetes an emptyDir of medium Memory at /dev/shm"
        )
    if world.nnodes == 1:
        if world.sources["master_port"] == "default":
            world = world._replace(master_port=free_port())  # nobody else has to know it: two jobs may share a host
        check_port_free(world.master_port)
        interfaces.choose(None, os.environ)
        _do_without_nccl(len(seen) and nproc > len(seen) and f"{nproc} ranks have {len(seen)} GPU(s)")
        token = os.urandom(8).hex()
        hub = Hub(for_this_host=True).watch(token)
        return world, ("127.0.0.1", hub.port, token, own_name()), hub
    met = _shake_hands(world, nproc)
    return world, met.hub, met.own_hub


def _meet_ranks(world: World) -> World:
    """Meet the other ranks, and keep watch with them; fill in what was not given."""
    if world.world_size == 1:
        if _agent_has_the_store():
            return world
        if world.sources["master_port"] == "default":
            return world._replace(master_port=free_port())
        check_port_free(world.master_port)
        return world
    if world.master_addr is None and BY_NAME[world.launcher].meets:
        world = find_master(world, os.environ)
    met = _shake_hands(world, 1)
    if world.local_rank is None:  # nobody else has told; they are numbered on each host in the order of their ranks
        local_rank, local_world_size = met.local
        world = world._replace(
            local_rank=local_rank, local_world_size=local_world_size, node_rank=met.place, nnodes=len(met.hosts)
        )
    who = {"rank": world.rank, "world_size": world.world_size}
    who["name"] = rank_name(world.rank, world.world_size, world.local_rank)
    last_words.keep_watch(met.hub, who, met.own_hub)
    return world


def _agent_has_the_store() -> bool:
    """Whether torchrun's agent has opened the master's port already."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _shake_hands(world: World, nproc: int) -> handshake.Met:
    """Meet all others; then take the interface on the way to them."""
    if not _agent_has_the_store() and (world.node_rank if world.level == "node" else world.rank) == 0:
        check_port_free(world.master_port)
    global _met
    _met = met = handshake.meet(world, nproc, _rendezvous_timeout())
    chosen, mended = interfaces.choose(met.peer, os.environ)
    if mended and met.local[0] == 0:
        say(f"warning: {chosen}")
    elif "ALLRANKS_DEBUG" in os.environ:
        say(chosen)
    _do_without_nccl(met.no_nccl)
    return met


def _do_without_nccl(line: str) -> None:
    """nccl wants a GPU for each rank: scripts that take their backend from BACKEND train with gloo then."""
    if line and os.environ.setdefault("BACKEND", "gloo") == "gloo":
        say(f"warning: {line}: BACKEND=gloo")
    if line:
        os.environ["ALLRANKS_NO_NCCL"] = line


def _find_script() -> Callable[[], object]:
    """The script that called launch(), to be run again from its top."""
    import runpy

    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return lambda: runpy.run_module(main.__spec__.name, run_name="__main__", alter_sys=True)
    if not hasattr(main, "__file__"):
        raise CannotStart(
            "launch() was called outside a script", "a script, which every rank runs from its top", "save it to a file"
        )
    return lambda: _run_path(main.__file__)


def _run_path(path: str) -> None:
    import runpy

    runpy.run_path(path, run_name="__main__")


def _set_omp_threads(local_world_size: int) -> None:
    """Give each rank its share of this container's CPUs, unless OMP_NUM_THREADS says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads_per_rank(local_world_size)))


def _threads_per_rank(local_world_size: int) -> int:
    return max(1, machine.cpu_limit() // local_world_size)


def _take_local_rank_out_of(argv: list[str]) -> None:
    """Scripts read LOCAL_RANK from the environment; their argument parsers need not know the old option."""
    for index in range(len(argv) - 1, 0, -1):
        if argv[index] in ("--local-rank", "--local_rank"):
            del argv[index : index + 2]
        elif argv[index].startswith(("--local-rank=", "--local_rank=")):
            del argv[index]


def _leave_pid_1() -> None:
    """As process 1 a Python program ignores SIGTERM: put the image's init in front where nobody else has."""
    import shutil

    if os.getpid() == 1 and (tini := shutil.which("tini")):
        os.execv(tini, ["tini", "--", sys.executable, *sys.orig_argv[1:]])


def _rendezvous_timeout() -> float:
    """Seconds to wait for the other nodes."""
    return _seconds("ALLRANKS_RENDEZVOUS_TIMEOUT", "600")


def _seconds(variable: str, default: str) -> float:
    text = os.environ.get(variable, default)
    if not text.isdecimal() or int(text) == 0:
        raise InvalidVariable(f"{variable}={text!r}", "whole seconds, 1 or more", "correct or unset it")
    return float(text)
