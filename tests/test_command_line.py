"""python -m allranks explain, --help; and what importing allranks costs."""

import json
import re

import pytest
from conftest import python

SING = {
    "SING_RANK": "1",
    "SING_WORLD_SIZE": "2",
    "SING_JOB_NAME": "test",
    "SING_HOSTNAME_SUFFIX": "svc.local",
    "SING_MASTER_ADDR": "test-0.svc.local",
}


def test_explain_json_is_one_object():
    done = python("-m", "allranks", "explain", "--json", **SING)
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "launcher": "sing",
        "level": "node",
        "rank": None,
        "world_size": None,
        "local_rank": None,
        "local_world_size": None,
        "node_rank": 1,
        "nnodes": 2,
        "master_addr": "test-0.svc.local",
        "master_port": 29500,
        "host_addr": "test-1.svc.local",
        "sources": {
            "node_rank": "SING_RANK",
            "nnodes": "SING_WORLD_SIZE",
            "master_addr": "SING_MASTER_ADDR",
            "master_port": "default",
            "host_addr": "SING_HOST_ADDR",
        },
    }


def test_explain_for_people_names_the_variables():
    lines = python("-m", "allranks", "explain", **SING).stdout.splitlines()
    assert ["nnodes", "2", "SING_WORLD_SIZE"] in [line.split() for line in lines]


def test_explain_says_why_what_was_ignored_the_ranks_and_torchruns_command():
    given = SING | {"NPROC_PER_NODE": "2", "JSM_NAMESPACE_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}
    said = python("-m", "allranks", "explain", ALLRANKS_LAUNCHER="sing", **given).stdout
    assert re.search(r"^launcher +sing \(SING Cloud\) +ALLRANKS_LAUNCHER$", said, re.M)
    assert re.search(r"^seen, not meant +lsf +JSM_NAMESPACE_RANK$", said, re.M)
    assert re.search(r"^node 1 +ranks 2 to 3  <- this one$", said, re.M)
    assert re.search(
        r"^torchrun +env OMP_NUM_THREADS=\d+ torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 ", said, re.M
    )
    said = python("-m", "allranks", "explain", **SING).stdout
    assert re.search(r"^launcher +sing \(SING Cloud\) +SING_RANK, SING_WORLD_SIZE, ", said, re.M)
    assert re.search(r"^level +node +its rank counts nodes$", said, re.M)


def test_a_script_of_sbatch_that_forgot_srun_is_told():
    said = python("-m", "allranks", "explain", SLURM_JOB_ID="1", SLURM_NNODES="2", SLURM_PROCID="0").stdout
    assert re.search(
        r"^warning +Slurm has given this job 2 nodes .* start it with srun --ntasks-per-node=1$", said, re.M
    )


def test_explain_says_an_error_in_one_line():
    done = python("-m", "allranks", "explain", "--json", **SING | {"SING_RANK": "2"})
    assert (done.returncode, done.stdout) == (66, "")
    assert done.stderr.startswith("allranks: invalid-variable: SING_RANK=2") and done.stderr.count("\n") == 1


def test_explaining_and_importing_pull_in_nothing_but_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); from allranks.__main__ import main; main(['explain', '--json']); "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(*new - set(sys.stdlib_module_names), file=sys.stderr)"
    )
    assert python("-c", code).stderr.split() == ["allranks"]


@pytest.mark.parametrize("verb", [[], ["run"], ["explain"], ["simulate"]])
def test_help(verb):
    done = python("-m", "allranks", *verb, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m allranks")


@pytest.mark.parametrize("verb", ["run", "simulate"])
def test_a_command_is_asked_for(verb):
    done = python("-m", "allranks", verb)
    assert done.returncode == 2 and "which command?" in done.stderr
