"""The ranks of one node: started, watched and ended by torch's own elastic agent."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from allranks import last_words, machine
from allranks.errors import OutOfMemory, RankFailed, RendezvousFailed
from allranks.hub import Hub
from allranks.mend import mend
from allranks.network import own_name, say
from allranks.resolve import World
from allranks.watch import GRACE, Line, error_of

POLL = 0.05  # seconds between two looks at the ranks
DOUBTFUL = {RankFailed.status, OutOfMemory.status, *range(84, 86)}  # of ranks that have ended because of another
LINGER = 4 * POLL  # a failing rank stays that long, so that one that died without a word is seen first


HUB = "ALLRANKS_HUB"  # where the ranks of this node find the hub of the watch: address port token host


def supervise(
    world: World, nproc: int, script: Callable[[], object] | None, timeout: float, hub: tuple, own_hub: Hub | None
) -> None:
    """Run nproc ranks on this node; never return: end with the status of the first that failed, or 0.

    script: run in forks of this process; None starts this process's own command line afresh in each rank.
    timeout: seconds for all nodes to meet. hub, own_hub: of the watch, see `handshake.Met`. Raises RendezvousFailed.
    """
    import logging
    import tempfile

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    os.environ["ALLRANKS_PARENT"] = str(os.getpid())
    os.environ[HUB] = " ".join(map(str, hub))
    line = _watch(world, nproc, hub)
    kills = machine.out_of_memory_kills()
    logging.disable()  # what the agent has to tell is ours to say, in a line
    ended = _Ended(nproc)
    status = 0
    try:
        with tempfile.TemporaryDirectory(prefix="allranks_") as logs:
            config = _config(world, nproc, "fork" if script else "spawn", timeout, logs)
            if script:
                elastic_launch(config, _as_rank(script, ended))()
            else:
                elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        status = ended.report(world, first.local_rank, first.exitcode, line, machine.out_of_memory_kills() > kills)
    except SignalException as error:
        if line.first:
            say(str(error_of(line.first)))
            status = error_of(line.first).status
        else:
            say(f"{error.sigval.name} received: the {nproc} ranks of this node were stopped")
            status = 128 + error.sigval
    except (DistError, RendezvousError) as error:
        raise RendezvousFailed(
            f"node {world.node_rank} of {world.nnodes} did not meet the others at "
            f"{world.master_addr}:{world.master_port} ({str(error).splitlines()[0]})",
            f"all {world.nnodes} nodes within {timeout:.0f} s",
            "see on each node whether it started, and what its log ends with",
        ) from None
    line.close()
    if own_hub:
        own_hub.close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # the ranks have run the script to its end; this process must not


def _watch(world: World, nproc: int, hub: tuple) -> Line:
    """This node's own line, besides those of its ranks: it can say how one of them ended."""
    ranks = f"{world.node_rank * nproc} to {world.node_rank * nproc + nproc - 1}"
    name = f"node {world.node_rank} ({own_name()}, ranks {ranks})"

    def stop(record: dict, ended: threading.Event) -> None:
        for host, pid in record.get("pids", ()):  # a stopped process would not answer to less
            if host == socket.gethostname() and _is_ours(pid):
                os.kill(pid, signal.SIGKILL)
        if ended.wait(2 * GRACE):  # the ranks end by themselves, as far as they have a line
            return
        os.kill(os.getpid(), signal.SIGTERM)
        if ended.wait(5 * GRACE):  # torch's agent may wait for the other nodes, for up to five minutes
            return
        say(str(error_of(record)))
        os._exit(error_of(record).status)

    who = {"node": world.node_rank, "name": name, "host": socket.gethostname(), "pid": os.getpid()}
    return Line(hub, who, stop)


def _is_ours(pid: int) -> bool:
    """Whether the process is a child of this one."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except (OSError, ValueError):
        return False


def may_fork() -> bool:
    """Import what every rank will import, once; say whether this process can be forked after that."""
    import torch
    import torch._dynamo  # any optimizer and DDP pull it in: a second or more in each rank otherwise

    return sys.platform == "linux" and not torch.cuda.is_initialized()


def _config(world: World, nproc: int, start_method: str, timeout: float, logs: str):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=world.nnodes,
        max_nodes=world.nnodes,
        nproc_per_node=nproc,
        run_id="allranks",
        rdzv_backend="static",
        rdzv_endpoint=f"{world.master_addr}:{world.master_port}",
        rdzv_configs={"rank": world.node_rank, "timeout": int(timeout)},
        max_restarts=0,
        monitor_interval=POLL,
        start_method=start_method,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


class _Ended:
    """How each forked rank of this node failed, kept where all of them can write: (time, status) by local rank."""

    def __init__(self, nproc: int):
        import multiprocessing

        self.by_rank = multiprocessing.RawArray("d", 2 * nproc)

    def record(self, local_rank: int, status: int) -> None:
        self.by_rank[2 * local_rank : 2 * local_rank + 2] = [time.monotonic(), status]

    def report(self, world: World, local_rank: int, status: int, line: Line, out_of_memory: bool) -> int:
        """Say in a line which rank failed first; return the exit status for the job.

        local_rank, status: the agent's choice. It holds where the rank died without a record; else the one that
        recorded its failure first is to blame: its peers lose their connection to it and fail within milliseconds.
        """
        nproc = len(self.by_rank) // 2
        times = {self.by_rank[2 * i]: i for i in range(nproc) if self.by_rank[2 * i]}
        if local_rank in times.values():
            local_rank = times[min(times)]
            status = int(self.by_rank[2 * local_rank + 1])
        how, code = f"exited with status {status}", RankFailed.code
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            if -status == signal.SIGKILL:
                code = OutOfMemory.code if out_of_memory else code
                how += " for want of memory" if out_of_memory else " (out of memory?)"
            status = 128 - status
        rank = world.node_rank * nproc + local_rank
        seen = f"{rank_name(rank, world.nnodes * nproc, local_rank)} {how}"
        first = line.report(seen, code, doubtful=status in DOUBTFUL, rank=rank)
        say(str(error_of(first)))
        mine = first["rank"] is not None and first["rank"] // nproc == world.node_rank
        return status if mine and first["code"] == RankFailed.code else error_of(first).status


def _as_rank(script: Callable[[], object], ended: _Ended) -> Callable[[], None]:
    """What a forked rank runs: the script as plain `python` would, with a record of how it ended."""

    def rank() -> None:
        import atexit
        import logging

        logging.disable(logging.NOTSET)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's handlers came with the fork
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        machine.die_with_parent()
        mend()
        watch_from_environ()
        status = 0
        try:
            script()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            status = status and last_words.fail(error, status)
        except KeyboardInterrupt as error:
            status = last_words.fail(error, 128 + signal.SIGINT)
        except BaseException as error:
            status = last_words.fail(error)
        if status:
            ended.record(int(os.environ["LOCAL_RANK"]), status)
        atexit._run_exitfuncs()  # a forked process would leave them out
        if status:
            time.sleep(LINGER)
            sys.exit(status)
        # returning tells the agent that this rank is done: it would wait for ever for one that just exits

    return rank


def watch_from_environ() -> None:
    """Start the watch of a rank that its node's parent has started."""
    if HUB not in os.environ:
        return
    address, port, token, host = os.environ[HUB].split()
    rank, world_size, local_rank, node = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    )
    who = {"rank": rank, "world_size": world_size, "node": node, "name": rank_name(rank, world_size, local_rank)}
    last_words.keep_watch((address, int(port), token, host), who, quiet=True)


def rank_name(rank: int, world_size: int, local_rank: int) -> str:
    """What a rank of this host is called in messages."""
    return f"rank {rank} of {world_size} (local rank {local_rank} on {own_name()})"
