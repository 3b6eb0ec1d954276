"""What the handshake costs at the start, and the watch while training.

    python bench/handshake.py               # 3 rounds of 2, 4 and 8 ranks of one host

The ranks are interpreters that have imported torch and begin at the same moment; the cost is that of the slowest,
beside plain torch's rendezvous alone (every rank connects to rank 0's store, which waits for all). The watch: CPU time
of its thread in a rank that trains, and step times with it and without, in turn.
"""

import json
import os
import statistics
import subprocess
import sys
import time

from allranks.network import free_port

RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
import allranks
from datetime import timedelta
print("ready", flush=True)
until = float(sys.stdin.readline())
time.sleep(max(0, until - time.time()))
start = time.time()
if os.environ["KIND"] == "allranks":
    allranks.launch()
else:
    next(dist.rendezvous("env://"))
seconds = time.time() - start
print(json.dumps(seconds), flush=True)
sys.stdin.readline()
"""

STEPS = """
import json, os, sys, time, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import allranks
from allranks import last_words
if sys.argv[1] == "without":
    last_words.keep_watch = lambda *args, **options: None
allranks.launch()
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))))
batch, count, start, cpu = torch.ones(64, 256), 0, time.perf_counter(), time.process_time()
while count < 1500:
    model(batch).sum().backward()
    count += 1
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
line, beats = last_words.line(), 2000
if line:
    began = time.thread_time()
    for _ in range(beats):
        json.dumps(line._position.now())
    print(json.dumps({"step": seconds / count, "cpu": cpu / count, "beat": (time.thread_time() - began) / beats}))
else:
    print(json.dumps({"step": seconds / count, "cpu": cpu / count}))
dist.barrier()
"""


def main():
    for ranks in (2, 4, 8):
        ours, theirs = zip(*[(slowest("allranks", ranks), slowest("torch", ranks)) for _ in range(3)], strict=True)
        mine, peer = (statistics.median(seconds) * 1e3 for seconds in (ours, theirs))
        print(
            f"{ranks} ranks: handshake {mine:.0f} ms, at most {max(ours) * 1e3:.0f}; torch's rendezvous {peer:.0f} ms"
        )
    steps = []
    for turn in range(4):  # the two in turn, either of them first
        kinds = ("with", "without") if turn % 2 else ("without", "with")
        found = {kind: step(kind) for kind in kinds}
        steps.append((found["with"], found["without"]))
        both = [f"{one['step'] * 1e3:.2f} ms, {one['cpu'] * 1e3:.2f} CPU-ms" for one in steps[-1]]
        print(f"a step with the watch {both[0]}; without {both[1]}")
    beat = statistics.median(mine["beat"] for mine, _ in steps)
    ratio = statistics.median(mine["cpu"] / plain["cpu"] for mine, plain in steps)
    print(f"ratio of CPU {ratio:.3f}; a beat, once a second, takes {beat * 1e6:.0f} microseconds of CPU")


def slowest(kind: str, ranks: int) -> float:
    """Seconds of the slowest rank from the common start until it has met all others."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "KIND": kind}
    shared |= {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", RANK]
    running = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}, **pipes) for rank in range(ranks)
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    until = time.time() + 0.5
    for process in running:
        print(until, file=process.stdin, flush=True)
    seconds = [json.loads(process.stdout.readline()) for process in running]
    for process in running:
        process.communicate("end\n", timeout=60)
    return max(seconds)


def step(kind: str) -> dict:
    """Seconds per step of two ranks, and CPU seconds per beat of the watch."""
    with subprocess.Popen(
        [sys.executable, "-m", "allranks", "simulate", "--launcher", "bare", sys.executable, "-c", STEPS, kind],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        lines = [json.loads(line) for line in job.communicate(timeout=300)[0].splitlines()]
    return max(lines, key=lambda line: line["step"])


if __name__ == "__main__":
    main()
