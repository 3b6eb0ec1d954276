"""CPU seconds of a whole job, imports included: dist.py on 2 ranks beside pytorch/examples' mnist/main.py.

    python bench/mnist_cpu.py PATH/TO/examples/mnist/main.py     # 5 rounds, the two in turn; 35 minutes
    python bench/mnist_cpu.py --rounds 1 PATH...

The peer gets --no-accel --epochs 4 (it does not reach 99 % in them), a copy of the data under ../data, one thread.
Prints a line per run and the ratio peer / ours of each round.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "images/pytorch-dist-mnist"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "data/MNIST/raw"
        raw.mkdir(parents=True)
        for file in (HERE / "data").glob("*.gz"):
            subprocess.run(["gunzip", "-c", file], stdout=(raw / file.stem).open("wb"), check=True)
        (Path(scratch) / "run").mkdir()
        peer = [sys.executable, args.peer.resolve(), "--no-accel", "--epochs", "4"]
        ours = [sys.executable, "-m", "allranks", "run", "--nproc-per-node", "2", HERE / "dist.py"]
        for number in range(args.rounds):
            mine, right = measure([*ours, "--seed", str(number)], HERE, {})
            print(f"round {number + 1} ours: {mine:.1f} CPU-s, accuracy {right[-1]}", flush=True)
            theirs, right = measure(peer, f"{scratch}/run", {"OMP_NUM_THREADS": "1"})
            print(f"round {number + 1} peer: {theirs:.1f} CPU-s, accuracies {' '.join(right)}", flush=True)
            print(f"round {number + 1} ratio {theirs / mine:.1f}", flush=True)


def measure(command, folder, extra):
    """Return (CPU seconds of the command and all its children, the accuracies that it printed)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=os.environ | extra, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    right = re.findall(r"accuracy=0\.(\d{4})|Accuracy: (\d{4})/10000", done.stdout)
    return spent, [f"0.{ours or theirs}" for ours, theirs in right]


if __name__ == "__main__":
    main()
