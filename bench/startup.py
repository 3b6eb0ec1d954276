"""Start-up: N ranks that meet, build DDP, take a step and leave; forked by allranks beside fresh by torchrun.

    python bench/startup.py                 # 2 and 8 ranks, 3 rounds, the two in turn

Prints wall and CPU seconds per run, and the ratio torchrun / allranks of each round; and what `explain` costs in units
of an interpreter that does nothing.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{line}
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


def main():
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = Path(scratch) / "ours.py", Path(scratch) / "theirs.py"
        ours.write_text(STEP.format(line="import allranks; allranks.launch()"))
        theirs.write_text(STEP.format(line=""))
        for ranks in (2, 8):
            for number in range(3):
                mine = measure([sys.executable, ours], NPROC_PER_NODE=str(ranks))
                peer = measure([sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", theirs])
                print(
                    f"{ranks} ranks, round {number + 1}: "
                    f"allranks {mine[0]:.1f} s, {mine[1]:.1f} CPU-s; "
                    f"torchrun {peer[0]:.1f} s, {peer[1]:.1f} CPU-s; "
                    f"ratios {peer[0] / mine[0]:.1f}, {peer[1] / mine[1]:.1f}"
                )
    for _ in range(3):
        nothing = min(measure([sys.executable, "-c", "pass"])[0] for _ in range(10))
        explain = min(measure([sys.executable, "-m", "allranks", "explain", "--json"])[0] for _ in range(10))
        print(f"explain {explain * 1000:.0f} ms, nothing {nothing * 1000:.0f} ms: {explain / nothing:.1f} times")


def measure(command, **environ):
    """Return (wall, CPU) seconds of the command and all its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, env=os.environ | environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
