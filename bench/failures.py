"""The catalogue of failures (tests/failures/cases.py) by allranks and by plain torchrun, side by side.

    python bench/failures.py > bench/failures.md        # with Docker, the images and root: 40 minutes

Each case is made twice in containers, with the same script. For each: seconds from the fault (or the last start) until
all nodes concerned had ended, and whether what they printed names the cause: the ranks or hosts, or the setting.
"""

import contextlib
import re
import sys
from pathlib import Path

import docker

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/failures"))

from cases import CASES
from cluster import Cluster

PATIENCE = 60  # seconds for torchrun, whose own deadlines are 5 to 30 minutes

# what torchrun's output would have to hold to name the cause, for a reader who searches it
NAMES = {
    "the master comes late": "met rank=",
    "the master's name never resolves": r"nowhere\.invalid",
    "the master's port is closed": r"node0.{0,40}29500.{0,200}[Cc]onnection refused",
    "the master's port is silent": r"node0.{0,40}29500.{0,200}([Tt]imed out|No route)",
    "the master's port is taken": r"EADDRINUSE|[Aa]ddress already in use",
    "a rank never arrives": r"(rank|node)\D{0,9}3\b.{0,60}(missing|absent|not)",
    "a rank twice": r"(twice|duplicate|already)",
    "WORLD_SIZE differs between ranks": r"(world.?size|nnodes).{0,80}(differ|mismatch)",
    "local sizes differ": r"(local.?world.?size|nproc).{0,80}(differ|mismatch)",
    "torch's versions differ": r"version.{0,80}(differ|mismatch)",
    "an interface that is not there": r"ens3",
    "peers reachable on the store's port only": r"node\d.{0,40}node\d",
    "two jobs at one address and port": r"job.{0,80}(another|other|two)",
    "a node is killed": r"(node1|rank\D{0,3}[23])\b.{0,80}(killed|died|SIGKILL|exited)",
    "the master's node is killed": r"(node0|rank\D{0,3}[01])\b.{0,80}(killed|died|SIGKILL|exited)",
    "a rank is killed": r"(rank\D{0,10}2)\b.{0,300}(SIGKILL|Signal 9)",
    "a rank raises": r"(rank\D{0,10}2)\b.{0,300}exitcode",
    "a rank runs out of memory": r"(out of memory|OOM|want of memory)",
    "uneven inputs": r"uneven|batches",
    "different collectives, with TORCH_DISTRIBUTED_DEBUG": r"Detected mismatch between collectives",
}


def main():
    client = docker.from_env(timeout=120)
    print(HEADER)
    for case in CASES:
        cells = [cell(client, case, plain) for plain in (False, True)]
        print(f"| {case.number} | {case.title} | {' | '.join(cells)} |", flush=True)


HEADER = f"""# Failures, by allranks and by plain torchrun

Each case of `tests/failures/cases.py`, made for real in containers with the same script (torch 2.5.1, gloo, CPUs),
once: seconds until every node concerned had ended, and whether the output of each names the cause. torchrun was given
{PATIENCE} s. Written by `bench/failures.py`.

| case | | allranks | torchrun |
|---|---|---|---|"""


def cell(client, case, plain):
    """`4 s, names the cause`: of the slowest node concerned."""
    with Cluster(client, "allranks-bench", plain) as cluster:
        with contextlib.suppress(AssertionError):  # it ended before the fault
            case.make(cluster)
        ends = cluster.wait(case.concerns, PATIENCE if plain else case.deadline)
    seconds = max(end.seconds for end in ends.values())
    comes_through = not any(case.statuses.values())
    if any(end.status is None for end in ends.values()):
        return f"still waiting after {seconds:.0f} s"
    if comes_through and not any(end.status for end in ends.values()):
        return f"{seconds:.0f} s, comes through"
    words = {name: NAMES.get(case.title, "a^") for name in ends} if plain else case.says
    named = [bool(re.search(words[name], ends[name].log, re.DOTALL)) for name in case.says]
    how = "names the cause" if all(named) else "names it on some nodes" if any(named) else "does not name it"
    return f"{seconds:.0f} s, {'fails, ' if comes_through else ''}{how}"


if __name__ == "__main__":
    main()
