"""What the doctor finds: on one node, between two, with members that never come or die, and how it says so."""

import json
import os
import sys
import time

import pytest
from conftest import python, start_python

from allranks import checks, doctor, errors, pairs
from allranks.network import free_port

GONE = """
import os, time
from allranks import handshake, resolve
met = handshake.meet(resolve(os.environ), 1, 30)
end = time.monotonic() + 30  # rank 0's store must outlive the meeting
while os.environ["RANK"] == "0" and not met.store.check(["doctor/here/1"]) and time.monotonic() < end:
    time.sleep(0.01)
os._exit(9)
"""
ALONE = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
LOCAL = {"launcher", *checks.LOCAL}


def run_doctor(*options, **environ):
    return python("-m", "allranks", "doctor", *options, timeout=90, **environ)


def on_two_nodes(*options, nproc=1, **environ):
    shape = ["--nnodes", "2", "--nproc-per-node", nproc]
    command = [sys.executable, "-m", "allranks", "doctor", *options]
    return python("-m", "allranks", "simulate", *shape, *command, timeout=90, **environ)


def rows(stdout):
    """check -> level of the first member's rows in the text."""
    found = {}
    for line in stdout.splitlines()[1:]:
        if not line.startswith("  "):
            break
        found[line[2:19].strip()] = line[19:].split()[0]
    return found


def test_one_node_alone_needs_nothing():
    done = run_doctor()
    assert done.returncode == 0, done.stderr
    assert set(rows(done.stdout)) == LOCAL | {"interface", "gloo", "nccl collective"}
    assert rows(done.stdout)["gloo"] == "ok"
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("doctor: ") and verdict.endswith(", 1 host, 1 rank")


def test_two_nodes_as_text_and_as_a_picture(tmp_path):
    began = time.monotonic()
    done = on_two_nodes("--png", tmp_path / "pairs.png", nproc=2)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("doctor: ") and lines[-1].endswith(", 2 hosts, 4 ranks")
    assert [line.split(" on ")[0] for line in lines if line.startswith("node ")] == ["node 0", "node 1"]
    assert done.stdout.count("doctor: ") == 1
    for title in ("gloo, latency microseconds", "gloo, bandwidth GB per s"):
        first, second = (line.split() for line in lines[lines.index(title) + 2 : lines.index(title) + 4])
        assert first[1] == second[2] == "-" and float(first[2]) == float(second[1]) > 0
    assert (tmp_path / "pairs.png").read_bytes().startswith(b"\x89PNG")


def test_two_nodes_as_json():
    done = on_two_nodes("--json", "--png", "/proc/no/such.png")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["status"] == 0 and said["verdict"].startswith("doctor: 1 warning")
    checks = [{row["check"]: row for row in member["findings"]} for member in said["members"]]
    assert [member["index"] for member in said["members"]] == [0, 1]
    assert all(LOCAL | {"meeting", "names", "gloo", "clock", "gloo pairs"} <= set(one) for one in checks)
    assert checks[0]["png"]["level"] == "warning"
    assert "each reaches every other" in checks[1]["meeting"]["seen"]
    assert float(checks[1]["clock"]["seen"].split()[0]) < 1000  # ms: both have one clock
    assert said["pairs"]["gloo"]["bandwidth_GB_per_s"][0][1] > 0


def test_a_member_that_never_comes():
    began = time.monotonic()
    done = run_doctor("--timeout", "3", RANK="0", MASTER_PORT=str(free_port()), **ALONE)
    assert time.monotonic() - began < 3 + doctor.REST
    assert done.returncode == errors.RendezvousFailed.status
    seen = rows(done.stdout)
    assert seen.pop("meeting") == "error" and set(seen) == LOCAL
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("doctor: 1 error") and ": rendezvous-failed: rank 1 is missing" in verdict


def test_without_rank_0_the_others_speak_for_themselves_on_standard_error():
    done = run_doctor("--timeout", "1", RANK="1", MASTER_PORT=str(free_port()), **ALONE)
    assert done.returncode == errors.MasterRefused.status and done.stdout == ""
    assert "meeting          error    master-refused: 127.0.0.1" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("doctor: 1 error")


def test_a_member_that_dies_between_two_messages():
    shared = ALONE | {"MASTER_PORT": str(free_port())}
    script = (
        "import os\nfrom allranks import doctor, pairs\npairs._pairs = lambda *args: os._exit(9)\ndoctor.doctor()\n"
    )
    with start_python("-c", script, RANK="1", **shared) as gone:
        done = run_doctor("--timeout", "20", "--json", RANK="0", **shared)
        gone.communicate(timeout=30)
    assert gone.returncode == 9
    assert done.returncode == errors.RankFailed.status
    said = json.loads(done.stdout)
    here, absent = said["members"]
    assert [row["check"] for row in here["findings"] if row["level"] == "error"] == ["gloo pairs"]
    assert absent["name"] == "rank 1" and "never reported" in absent["findings"][0]["seen"]


def test_nothing_outlives_the_deadline():
    script = (
        "import threading\nfrom allranks import doctor\n"
        "doctor.REST = 0.5\ndoctor.LOCAL = {'disk': lambda me: threading.Event().wait()}\n"
        "doctor.doctor(timeout=0.5)\n"
    )
    done = python("-c", script, timeout=60)
    assert done.returncode == errors.Stalled.status
    assert rows(done.stdout) == {"launcher": "ok", "deadline": "error"}
    assert done.stdout.splitlines()[-1].startswith("doctor: 1 error: stalled: not done after 1 s")


@pytest.mark.parametrize("dead", [0, 1])
def test_a_member_that_dies_after_the_meeting(dead):
    shared = ALONE | {"MASTER_PORT": str(free_port())}
    began = time.monotonic()
    with start_python("-c", GONE, RANK=str(dead), **shared) as gone:
        done = run_doctor("--timeout", "20", RANK=str(1 - dead), **shared)
        gone.communicate(timeout=30)
    assert gone.returncode == 9
    assert time.monotonic() - began < 20 + doctor.REST
    assert done.returncode == errors.RankFailed.status, done.stderr
    if dead == 0:
        assert "report           error    rank-failed: rank 0 has gone" in done.stderr and done.stdout == ""
    else:
        assert "rank-failed: rank 1 met the others and did not go on" in done.stdout.splitlines()[-1]
        assert rows(done.stdout)["disk"]


def test_a_bad_variable_is_one_finding_among_others():
    done = run_doctor(RANK="x", **ALONE)
    assert done.returncode == errors.InvalidVariable.status
    seen = rows(done.stdout)
    assert seen.pop("launcher") == "error" and set(seen) == LOCAL - {"launcher"}
    assert "invalid-variable: RANK='x' is not a number" in done.stdout.splitlines()[-1]


def test_a_port_that_is_taken_and_an_interface_that_is_not_there(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        done = run_doctor("--json", RANK="0", MASTER_PORT=port, GLOO_SOCKET_IFNAME="eth99", **ALONE)
    assert done.returncode == errors.NoInterface.status
    said = json.loads(done.stdout)
    codes = {row["check"]: row["code"] for row in said["members"][0]["findings"] if row["level"] == "error"}
    assert codes == {"address": "no-interface", "port": "port-taken"}
    assert said["verdict"].startswith("doctor: 2 errors")


def test_list_errors_lists_every_class_without_torch():
    done = python("-X", "importtime", "-m", "allranks", "doctor", "--list-errors")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(errors.CATALOGUE)
    for line, cls in zip(lines, errors.CATALOGUE, strict=True):
        assert line.split()[:2] == [str(cls.status), cls.code] and line.endswith(cls.todo)
    assert len({line.index(cls.code) for line, cls in zip(lines, errors.CATALOGUE, strict=True)}) == 1
    assert " torch\n" not in done.stderr


@pytest.mark.parametrize(
    ("check", "level", "words"),
    [
        (lambda: checks.dev_shm(None, "/", 1), "ok", "free of"),
        (lambda: checks.dev_shm(None, "/", 1 << 60), "warning", "--shm-size=1g"),
        (lambda: checks.dev_shm(None, "/no/such"), "warning", "is not there"),
        (lambda: checks.disk(None, "/proc"), "warning", "/proc cannot be written"),
        (lambda: checks.disk(None, os.curdir), "ok", os.getcwd()),
        (lambda: checks.driver(None, ("535.1", 12), "12.4"), "ok", "offers CUDA 12"),
        (lambda: pairs.names(["localhost"]), "ok", "localhost"),
        (lambda: pairs.names(["localhost", "nobody..here"]), "warning", "nobody..here does not resolve"),
    ],
)
def test_checks_of_one_thing(check, level, words):
    found, seen = check()
    assert found == level and words in seen


def test_a_driver_that_is_too_old():
    with pytest.raises(errors.GpuUnusable, match=r"470\.1 offers CUDA 11.*a driver of 525 or newer"):
        checks.driver(None, ("470.1", 11), "12.4")


@pytest.mark.parametrize(
    ("codes", "verdict", "status"),
    [
        (["ok"], "doctor: ok, 2 hosts, 4 ranks", 0),
        (["warning", "warning"], "doctor: 2 warnings, 2 hosts, 4 ranks", 0),
        (["warning", "port-taken"], "doctor: 1 error, 1 warning: port-taken: seen", 72),
        (["rank-failed", "port-taken"], "doctor: 2 errors: port-taken: seen", 72),
        (["stalled", "rank-failed"], "doctor: 2 errors: stalled: seen", 84),
    ],
)
def test_the_verdict_names_the_cause_and_not_its_effects(codes, verdict, status):
    levels = ("ok", "warning")
    findings = [checks.Finding("check", code if code in levels else "error", "seen", code)._asdict() for code in codes]
    assert doctor._judge([{"findings": findings, "shape": "2 hosts, 4 ranks"}]) == (verdict, status)
