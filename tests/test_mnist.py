"""dist.py and mnist.py, run as a user would, on real digits."""

import fcntl
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import termios

import pytest
from conftest import DIST_MNIST, clean_environ, done_lines, python

SIZES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
import allranks
from dist import share, step_count
allranks.launch()
dist.init_process_group("gloo")
torch.manual_seed(0)
for samples in (10, 1000):
    mine = share(samples)
    steps = step_count(samples, 128)
    print(samples, steps, len(mine.tensor_split(steps)), *mine.tolist())
dist.destroy_process_group()
"""


def train(script, *args, nproc=2, **environ):
    return python(
        "-m", "allranks", "run", "--nproc-per-node", nproc, DIST_MNIST / script, *args, timeout=300, **environ
    )


def test_two_ranks_learn_the_digits():
    done = train("dist.py")
    assert done.returncode == 0, done.stderr
    ranks = done_lines(done.stdout)
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [("0", "2"), ("1", "2")]
    assert len({(rank["weights"], rank["accuracy"]) for rank in ranks}) == 1
    assert float(ranks[0]["accuracy"]) >= 0.989
    assert done.stdout.count("\n") == 4, "quiet in a log: a line an epoch and one a rank"


def test_three_ranks_share_what_three_does_not_divide():
    done = train("dist.py", "--epochs", "1", nproc=3)
    assert done.returncode == 0, done.stderr
    assert [rank["accuracy"] for rank in done_lines(done.stdout)] == [done_lines(done.stdout)[0]["accuracy"]] * 3


def test_every_sample_is_some_ranks_and_all_take_the_same_steps(script):
    done = python(script(SIZES), DIST_MNIST, NPROC_PER_NODE="3")
    assert done.returncode == 0, done.stderr
    for samples in (10, 1000):
        rows = [list(map(int, line.split())) for line in done.stdout.splitlines() if line.startswith(f"{samples} ")]
        assert len(rows) == 3 and len({(steps, batches) for _, steps, batches, *_ in rows}) == 1
        shares = [row[3:] for row in rows]
        assert sorted(itertools.chain(*shares)) == list(range(samples))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_bar_on_a_terminal():
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, DIST_MNIST / "dist.py", "--epochs", "1"]
    job = subprocess.Popen(command, env=clean_environ(), stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(master, 65536)
        except OSError:  # the last writer has left
            break
    assert job.wait(60) == 0
    assert b"234/234" in shown and b"step/s" in shown and b"epoch 1" not in shown


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_damaged_data_is_said(tmp_path, damage):
    folder = shutil.copytree(DIST_MNIST, tmp_path / "src")
    file = folder / "data/train-labels-idx1-ubyte.gz"
    whole = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "altered":
        import gzip

        file.write_bytes(gzip.compress(gzip.decompress(whole)[:-1] + b"\xff"))
    done = python(folder / "dist.py")
    assert done.returncode == 1 and "done" not in done.stdout
    expected = "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    assert f"{file}: expected SHA-256 {expected} once unpacked, found " in done.stderr
    assert "Traceback" not in done.stderr


def test_communication_alone():
    done = train("mnist.py", "--backend", "gloo", nproc=3)
    assert done.returncode == 0, done.stderr
    assert [(rank["rank"], rank["sum"]) for rank in done_lines(done.stdout)] == [("0", "6"), ("1", "6"), ("2", "6")]
    assert re.findall(r"rank (\d) of 3 is on \S+ cpu", done.stdout) == ["0", "1", "2"]


def test_kubeflows_options_and_what_is_written(tmp_path):
    run = tmp_path / "run"
    options = "--batch-size 256 --test-batch-size 1000 --epochs 1 --lr 0.1 --momentum 0.5 --no-cuda --seed 3"
    done = train(
        "mnist.py",
        "--run-training",
        "--backend",
        "gloo",
        *options.split(),
        "--log-interval",
        50,
        "--save-model",
        "--dir",
        run,
    )
    assert done.returncode == 0, done.stderr
    ranks = done_lines(done.stdout)
    assert len({rank["weights"] for rank in ranks}) == 1 and float(ranks[0]["accuracy"]) > 0.97
    assert "epoch 1 of 1 step 50 of 234: loss=" in done.stdout
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [50, 100, 150, 200, 234]
    assert records[-1]["accuracy"] == float(ranks[0]["accuracy"])
    assert list(run.glob("events.out.tfevents.*"))
    assert (run / "mnist_cnn.pt").stat().st_size > 100_000


def test_nccl_without_a_gpu_is_said_once_and_done_without():
    done = python(DIST_MNIST / "mnist.py", "--backend", "nccl", CUDA_VISIBLE_DEVICES="", NPROC_PER_NODE="2")
    assert done.returncode == 0
    instead = "gloo on the CPU instead (with GPUs: docker run --gpus all)"
    assert done.stderr == f"mnist.py: --backend nccl needs a GPU for each rank: {instead}\n"
    assert [rank["sum"] for rank in done_lines(done.stdout)] == ["3", "3"]


def test_a_directory_that_cannot_be_written_is_said_before_training():
    done = python(DIST_MNIST / "mnist.py", "--run-training", "--dir", "/dev/null/run")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "mnist.py: --dir /dev/null/run: Not a directory: give a directory that can be written\n"
