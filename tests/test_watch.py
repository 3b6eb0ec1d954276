"""Who is to blame when ranks wait: the hub's decision, on what the ranks say. The real thing is in tests/failures."""

import threading
import time

import pytest
from conftest import python, start_python, wait_until

from allranks import last_words
from allranks.errors import Stalled
from allranks.hub import Hub, find_stalled
from allranks.network import free_port
from allranks.position import Position
from allranks.watch import Line


def rank(number, sequence=10, inside="", still=0.0, silent=0.0, left=False):
    said = {"rank": number, "name": f"rank {number}", "host": "host", "pid": 1, "stall": 60.0, "at": "train.py:7"}
    return said | {"sequence": sequence, "inside": inside, "still": still, "silent": silent, "left": left}


WAITS = {"inside": "all_reduce", "still": 61.0}


@pytest.mark.parametrize(
    ("ranks", "seen"),
    [
        pytest.param([rank(0), rank(1)], None, id="all train"),
        pytest.param([rank(0, **WAITS), rank(1, sequence=11)], None, id="the other one is ahead"),
        pytest.param([rank(0, **WAITS), rank(1)], None, id="waits for one that is as far and computes"),
        pytest.param([rank(0, inside="all_reduce", still=59.0), rank(1, sequence=9)], None, id="not yet"),
        pytest.param([rank(0, **WAITS), rank(1, sequence=9, left=True)], None, id="the other one has left"),
        pytest.param([rank(0, still=1000.0), rank(1, still=1000.0)], None, id="both compute for long"),
        pytest.param([rank(0), rank(1, silent=61.0)], "rank 1 has not been heard of for 61 s", id="silent"),
        pytest.param(
            [rank(0, **WAITS), rank(1, sequence=9)],
            "rank 1 keeps the others waiting (rank 1 is at train.py:7; rank 0 is in all_reduce at train.py:7)",
            id="behind",
        ),
        pytest.param(
            [rank(0, **WAITS), rank(1, inside="recv", still=61.0)],
            "rank 0, rank 1 wait for each other in vain (rank 0 is in all_reduce at train.py:7; rank 1 is in recv at "
            "train.py:7)",
            id="different calls",
        ),
    ],
)
def test_who_holds_up_the_others(ranks, seen):
    found = find_stalled(ranks)
    assert (found and found["seen"].partition(" (stopped")[0]) == seen


def test_a_position_is_still_until_something_moves(monkeypatch):
    go, end = threading.Event(), threading.Event()

    def train():
        go.wait()
        end.wait()

    thread = threading.Thread(target=train)
    monkeypatch.setattr(threading, "main_thread", lambda: thread)
    thread.start()
    position = Position()
    position.now()
    time.sleep(0.2)
    assert position.now()["still"] >= 0.2
    go.set()
    wait_until(lambda: position.now()["still"] < 0.2)
    end.set()
    thread.join()


def lines(count, heard):
    hub = Hub(for_this_host=True).watch("token")
    place = ("127.0.0.1", hub.port, "token", "host")
    who = [{"rank": number, "name": f"rank {number}", "host": "host", "pid": 1} for number in range(count)]
    return hub, [Line(place, one, lambda record, ended: heard.append(record)) for one in who]


def test_the_first_to_fail_is_told_to_all_and_a_doubtful_failure_waits_for_its_cause():
    heard = []
    hub, (one, other, third) = lines(3, heard)
    threading.Timer(0.2, lambda: other.report("rank 1 raised ZeroDivisionError")).start()
    assert one.report("rank 0 lost its connection", doubtful=True)["seen"] == "rank 1 raised ZeroDivisionError"
    wait_until(lambda: len(heard) == 1)
    assert heard[0]["rank"] == 1 and third.first == heard[0]
    for line in (one, other, third):
        line.close()
    hub.close()


def test_a_failure_right_after_the_start_is_heard():
    for _ in range(20):
        heard = []
        hub, (one, other) = lines(2, heard)
        assert other.report("rank 1 raised ImportError")["seen"] == "rank 1 raised ImportError"
        wait_until(lambda: one.first is not None, timeout=5)  # noqa: B023
        assert one.first["rank"] == 1 and other.first == one.first
        for line in (one, other):
            line.close()
        hub.close()


def test_a_lost_connection_after_the_verdict_is_no_second_failure(monkeypatch, capsys):
    hub, (one,) = lines(1, [])
    monkeypatch.setattr(last_words, "_line", one)
    monkeypatch.setattr(last_words, "_said", threading.Lock())
    hub._declare({"code": "stalled", "rank": 0, "seen": "rank 0, rank 1 wait for each other in vain"})
    assert one.known.wait(5)
    assert last_words.fail(RuntimeError("Connection closed by peer")) == Stalled.status
    said = capsys.readouterr().err
    assert "in vain" in said and "Traceback" not in said, said
    one.close()
    hub.close()


def test_a_rank_that_is_there_before_the_hub_knows_the_token_is_heard():
    heard = []
    hub = Hub(for_this_host=True)
    hub.start()
    who = {"rank": 1, "name": "rank 1", "host": "host", "pid": 1}
    early = Line(("127.0.0.1", hub.port, "token", "host"), who, lambda record, ended: heard.append(record))
    wait_until(lambda: any(member.buffer for member in hub._members))
    hub.watch("token")
    wait_until(lambda: any(member.who for member in hub._members))
    assert heard == []
    early.close()
    hub.close()


def test_a_farewell_is_no_failure_and_a_stranger_is_not_heard():
    import socket

    heard = []
    hub, (one, other) = lines(2, heard)
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        assert stranger.recv(64) == Hub.GREETING
        stranger.sendall(b'{"token": "guessed", "rank": 0}\n{"failed": {"rank": 0}, "doubtful": false}\n\xff\n')
        stranger.settimeout(10)
        assert stranger.recv(64) == b""
    other.close()
    time.sleep(1.5)  # longer than the hub waits for a word
    assert heard == [] and one.first is None
    one.close()
    hub.close()


UNDER_TORCHRUN = """
import os
import torch.distributed as dist
import allranks
allranks.launch()
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    1 / 0
dist.barrier()
"""


def test_ranks_of_torchrun_say_who_was_first(script):
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), script(UNDER_TORCHRUN), timeout=60
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("allranks: ")]
    assert done.returncode == 1 and 1 <= len(said) <= 2, done.stderr
    assert all("rank 1 of 2 (local rank 1 on " in line and "raised ZeroDivisionError" in line for line in said)


AGAIN = """
import torch, torch.distributed as dist
import allranks
allranks.launch()
for number in range(3):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item())
    dist.destroy_process_group()
"""


def test_a_process_group_can_be_made_again_in_the_same_job(script):
    done = python(script(AGAIN), NPROC_PER_NODE="2", timeout=60)
    assert done.returncode == 0 and done.stdout.split("\n").count("sum 2.0") == 6, done.stderr


@pytest.mark.parametrize("failing", ["0", "1"])
def test_ranks_without_a_parent_end_with_one_line_each(script, failing):
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "FAILING": failing}
    path = script(UNDER_TORCHRUN.replace("dist.get_rank() == 1", "str(dist.get_rank()) == os.environ['FAILING']"))
    ranks = [start_python(path, RANK=str(number), **environ) for number in range(2)]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1 if str(number) == failing else 82 for number in range(2)], said
    for text in said:
        assert text.count("allranks: rank-failed: rank " + failing) == 1
    assert "".join(said).count("Traceback") == 1, said
