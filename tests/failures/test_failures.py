"""The catalogue of failures, in containers: what is said, by whom, by when, with which status."""

import re

import pytest
from cases import CASES
from cluster import Cluster


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}: {case.title}")
def test_a_failure(engine, case):
    with Cluster(engine) as cluster:
        case.make(cluster)
        ends = cluster.wait(case.says, case.deadline)
    logs = "\n".join(f"--- {name}: {end.status} after {end.seconds:.1f} s\n{end.log}" for name, end in ends.items())
    for name, words in case.says.items():
        assert re.search(words, ends[name].log), logs
    for name, status in case.statuses.items():
        assert ends[name].status == status and ends[name].seconds <= case.deadline, logs
    assert logs.count("Traceback (most recent call last)") <= case.tracebacks, logs
