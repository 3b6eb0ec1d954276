"""A cluster of local processes, each wearing the variables that a launcher would have given it."""

import os
import signal
import subprocess
import sys
import time

from allranks.launchers import BY_NAME, LAUNCHERS, Launcher
from allranks.network import free_port, say
from allranks.resolve import World

POLL = 0.05  # seconds between two looks at the processes
GRACE = 10.0  # seconds from SIGTERM to SIGKILL


def environments(row: Launcher, nnodes: int, nproc_per_node: int) -> list[dict[str, str]]:
    """The variables of each process that the launcher starts: one per node or one per rank, as its level says."""
    port = str(free_port())
    processes = []
    for node_rank in range(nnodes):
        for local_rank in range(nproc_per_node if row.level == "process" else 1):
            values = {
                "node_rank": node_rank,
                "nnodes": nnodes,
                "local_rank": local_rank,
                "local_world_size": nproc_per_node,
                "rank": node_rank * nproc_per_node + local_rank,
                "world_size": nnodes * nproc_per_node,
                "master_addr": "localhost",
                "master_port": port,
            }
            worn = {name: str(values[field]) for field, name in (row.fields | row.optional).items() if field in values}
            worn |= row.example(values) | {"MASTER_PORT": port}
            if "master_addr" in row.read:  # its hosts are not there: MASTER_ADDR goes before them
                worn["MASTER_ADDR"] = "localhost"
            if row.level == "node":
                worn["NPROC_PER_NODE"] = str(nproc_per_node)
            if row.name == "thd":
                worn |= {"MASTER_ADDR": f"localhost:{port}"}
                del worn["MASTER_ADDR" if values["rank"] == 0 else "MASTER_PORT"]
            processes.append(worn)
    return processes


def simulate(command: list[str], launcher: str, nnodes: int, nproc_per_node: int) -> int:
    """Run the command once per process of the cluster, on loopback; return the status of the first that fails, or 0.

    The others are stopped then, and when this process is asked to stop.
    """
    base = {name: value for name, value in os.environ.items() if name not in launcher_variables()}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    base |= {"ALLRANKS_SIMULATED": "1", "ALLRANKS_PARENT": str(os.getpid()), "GLOO_SOCKET_IFNAME": loopback}
    base["TP_SOCKET_IFNAME"] = loopback  # of torch.distributed.rpc
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stopped.append(received))
    running = []
    try:
        for worn in environments(BY_NAME[launcher], nnodes, nproc_per_node):
            running.append(subprocess.Popen(command, env=base | worn))
        while running and not stopped:
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                if process.returncode:
                    return process.returncode if process.returncode > 0 else 128 - process.returncode
            time.sleep(POLL)
        return 128 + stopped[0] if stopped else 0
    except FileNotFoundError as error:
        say(f"simulate: {error.filename!r} is not a command")
        return 127
    finally:
        _stop(running)


def _stop(running: list[subprocess.Popen]) -> None:
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def launcher_variables() -> set[str]:
    """Every variable of the table: the cluster must not see those of the launcher that this process runs under."""
    names = {"ALLRANKS_LAUNCHER", "MASTER_PORT", "NPROC_PER_NODE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    names |= {name for name in os.environ if name.startswith("TORCHELASTIC_")}
    for row in LAUNCHERS:
        names |= {
            *row.example(dict.fromkeys(World._fields, 0)),
            *row.marks,
            *row.marks_in(os.environ),
            *row.fields.values(),
            *row.optional.values(),
            *(row.host_addr or ())[:1],
        }
    return names
