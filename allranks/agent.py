"""The ranks of one node: started, watched and ended by torch's own elastic agent."""

import os
import signal
import sys
import time
from collections.abc import Callable

from allranks import machine
from allranks.errors import RendezvousFailed
from allranks.mend import mend
from allranks.network import own_name, say
from allranks.resolve import World

POLL = 0.05  # seconds between two looks at the ranks
LINGER = 4 * POLL  # a failing rank stays that long, so that one that died without a word is seen first


def supervise(world: World, nproc: int, script: Callable[[], object] | None, timeout: float) -> None:
    """Run nproc ranks on this node; never return: end with the status of the first that failed, or 0.

    script: run in forks of this process; None starts this process's own command line afresh in each rank.
    timeout: seconds for all nodes to meet. Raises RendezvousFailed.
    """
    import logging
    import tempfile

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    os.environ["ALLRANKS_PARENT"] = str(os.getpid())
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
        status = ended.report(world, first.local_rank, first.exitcode)
    except SignalException as error:
        say(f"{error.sigval.name} received: the {nproc} ranks of this node were stopped")
        status = 128 + error.sigval
    except (DistError, RendezvousError) as error:
        raise RendezvousFailed(
            f"node {world.node_rank} of {world.nnodes} did not meet the others at "
            f"{world.master_addr}:{world.master_port} ({str(error).splitlines()[0]})",
            f"all {world.nnodes} nodes within {timeout:.0f} s",
            "see on each node whether it started, and what its log ends with",
        ) from None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # the ranks have run the script to its end; this process must not


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

    def report(self, world: World, local_rank: int, status: int) -> int:
        """Say in a line which rank failed first; return the exit status for the job.

        local_rank, status: the agent's choice. It holds where the rank died without a record; else the one that
        recorded its failure first is to blame: its peers lose their connection to it and fail within milliseconds.
        """
        nproc = len(self.by_rank) // 2
        times = {self.by_rank[2 * i]: i for i in range(nproc) if self.by_rank[2 * i]}
        if local_rank in times.values():
            local_rank = times[min(times)]
            status = int(self.by_rank[2 * local_rank + 1])
        how = f"exited with status {status}"
        if status < 0:
            why = " (out of memory?)" if -status == signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-status).name}{why}"
            status = 128 - status
        rank, world_size = world.node_rank * nproc + local_rank, world.nnodes * nproc
        where = f"local rank {local_rank} on {own_name()}"
        say(f"rank-failed: rank {rank} of {world_size} ({where}) {how}; the other ranks of this node were stopped")
        return status


def _as_rank(script: Callable[[], object], ended: _Ended) -> Callable[[], None]:
    """What a forked rank runs: the script as plain `python` would, with a record of how it ended."""

    def rank() -> None:
        import atexit
        import logging
        import traceback

        logging.disable(logging.NOTSET)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's handlers came with the fork
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        machine.die_with_parent()
        mend()
        status = 0
        try:
            script()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except BaseException as error:
            traceback.print_exception(error.with_traceback(_without_our_frames(error.__traceback__)))
            status = 1
        if status:
            ended.record(int(os.environ["LOCAL_RANK"]), status)
        atexit._run_exitfuncs()  # a forked process would leave them out
        if status:
            time.sleep(LINGER)
            sys.exit(status)
        # returning tells the agent that this rank is done: it would wait for ever for one that just exits

    return rank


def _without_our_frames(tb):
    """The part of a traceback that is the user's."""
    import runpy

    ours = (os.path.dirname(__file__), "<frozen runpy>", runpy.__file__)
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(ours):
        tb = tb.tb_next
    return tb
