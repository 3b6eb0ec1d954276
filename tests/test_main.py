"""main.py of pytorch-ddp: seven demonstrations that start their own ranks, run as a user would.

No process outlives it: `python` returns once the last one that could still write has ended.
"""

import pytest
from conftest import ROOT, python

MAIN = ROOT / "images/pytorch-ddp/main.py"
DDP = ["basic", "checkpoint", "model_parallel"]
EVERY = [*DDP, "fsdp", "reshard", "tensor_parallel", "pipeline"]

BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import torch
import torch.distributed as dist
import main
whole = {{name: getattr(main, name) for name in dir(main)}}
{fault}
if __name__ == "__main__":
    main.main()
"""
FAULTS = {
    "a weight changes on rank 2": (
        "basic",
        "def train(model, *rest, **options):\n"
        "    loss = whole['train'](model, *rest, **options)\n"
        "    if dist.get_rank() == 2:\n"
        "        next(model.parameters()).data[0, 0] += 1e-6\n"
        "    return loss\n"
        "main.train = train",
        "AssertionError: other weights than rank 0's on ranks [2]",
    ),
    "every rank has the same samples": (
        "basic",
        "main.share = lambda data: [tensor[::4] for tensor in data]",
        "AssertionError: other weights than one process gets: ",
    ),
    "rank 1 loads something else": (
        "checkpoint",
        "def load(*args, **options):\n"
        "    saved = whole['torch'].serialization.load(*args, **options)\n"
        "    saved['model']['0.bias'] += dist.get_rank() == 1\n"
        "    return saved\n"
        "main.torch.load = load",
        "AssertionError: rank 1 has not loaded what was saved",
    ),
    "rank 3 ends without a word": (
        "pipeline",
        "def sgd(model):\n"
        "    if dist.get_rank() == 3:\n"
        "        main.os._exit(9)\n"
        "    return whole['sgd'](model)\n"
        "main.sgd = sgd",
        "main.py: pipeline failed: process 3 terminated with exit code 9",
    ),
}


@pytest.fixture
def demonstrate(tmp_path):
    """Run it; nothing may be left in the temporary directory."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def run(*names, script=MAIN, **environ):
        done = python(script, *names, TMPDIR=str(temporary), **environ)
        # but for the cache that later torches create when they are imported
        assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
        return done

    return run


def done_lines(output):
    """One dict per `done` line."""
    lines = [line.split()[1:] for line in output.splitlines() if line.startswith("done ")]
    return [dict(word.split("=") for word in line) for line in lines]


def test_the_three_about_ddp(demonstrate):
    done = demonstrate(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done_lines(done.stdout)
    assert [(line["demo"], line["world_size"]) for line in lines] == list(zip(DDP, "442", strict=True))
    assert {(line["device"], line["backend"]) for line in lines} == {("cpu", "gloo")}
    assert lines[0]["loss"] == lines[1]["loss"], "interrupted or not, the same training"
    assert done.stdout.count("made for 4 GPUs, 0 here: runs on 4 CPU devices\n") == len(DDP)
    assert done.stdout.count("\n") == 2 * len(DDP)


def test_all_seven(demonstrate):
    done = demonstrate("all")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    not_run = [line.split(":")[0] for line in done.stdout.splitlines() if ": not run: " in line]
    assert [line["demo"] for line in done_lines(done.stdout)] == [name for name in EVERY if name not in not_run]
    assert set(not_run) <= {"fsdp"}, "torch 2.5 has no FSDP2 without CUDA; the others run everywhere"


def test_what_is_asked_for_by_name_must_run(demonstrate):
    done = demonstrate("fsdp")
    if done.returncode == 0:
        assert [line["demo"] for line in done_lines(done.stdout)] == ["fsdp"]
    else:
        assert done.returncode == 1 and "\nfsdp: not run: fully_shard of torch 2." in done.stdout
        assert done.stderr == "main.py: cannot run here: fsdp\n"


def test_a_name_that_is_not_there(demonstrate):
    done = demonstrate("basic", "chekpoint")
    assert done.returncode == 2 and done.stdout == ""
    assert "error: no demonstration is called chekpoint: there are basic, checkpoint," in done.stderr


def test_as_a_rank_of_torchrun(demonstrate):
    done = demonstrate(LOCAL_RANK="0")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "main.py starts its own ranks: python main.py\n"


@pytest.mark.parametrize("fault", FAULTS)
def test_it_fails_when(demonstrate, script, fault):
    name, code, said = FAULTS[fault]
    done = demonstrate(name, script=script(BROKEN.format(folder=str(MAIN.parent), fault=code)))
    assert done.returncode == 1 and "done " not in done.stdout
    assert said in done.stderr
    assert done.stderr.count("Traceback") == ("terminated" not in said), "one traceback: of the rank that failed first"
