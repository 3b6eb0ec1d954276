"""Both ends of the handshake's store, each on its own. The whole of it is in tests/failures."""

import json

import pytest
from torch.distributed import HashStore

from allranks import handshake
from allranks.errors import RendezvousFailed


def belief(index):
    said = {
        "index": index,
        "size": 3,
        "size_name": "WORLD_SIZE",
        "level": "process",
        "nproc": None,
        "host": f"h{index}",
    }
    return said | {"job": "", "torch": "2.5.1", "nccl": "", "pid": 1, "gpus": [], "gpu_count": 0}


@pytest.mark.parametrize(
    ("arrived", "missing"), [([], "ranks 0, 1, 2 are"), ([0], "ranks 1, 2 are"), ([0, 2], "rank 1 is")]
)
def test_one_that_has_a_ticket_and_says_nothing_keeps_the_others_from_nothing(arrived, missing):
    store = HashStore()
    store.add("tickets", 1 + len(arrived))  # the first of them has said nothing
    for ticket, index in enumerate(arrived, start=2):
        store.set(f"belief/{ticket}", json.dumps(belief(index)))
    store.add("heard", 2)
    with pytest.raises(RendezvousFailed) as error:
        handshake._Host(store, belief(0), timeout=0.1).decide()
    seen = error.value.parts[0]
    assert seen.startswith(f"{missing} missing") and all(f"rank {index} on h{index}" in seen for index in arrived)


def test_ranks_that_wait_for_rank_0_say_so(monkeypatch, capsys):
    monkeypatch.setattr(handshake, "SAY_EVERY", 0.05)
    monkeypatch.setattr(handshake, "LINGER", 0)
    with pytest.raises(RendezvousFailed):
        handshake._hear(HashStore(), 1, belief(1), timeout=0.3)
    assert "waiting for rank 0 (0 of 0 s)" in capsys.readouterr().err
