"""The catalogue of failures, in containers: what is said, by whom, by when, with which status."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import CASES, Case
from cluster import Cluster

AT_ONCE = 3  # clusters: they mostly wait
BUSY = 30  # seconds beyond a case's deadline, for a machine that has other things to do; what hangs takes minutes


@pytest.fixture(scope="module")
def ends(engine, request):
    """Case -> a future of its nodes' ends; the cases that this run has asked for, some at a time."""

    def run(case: Case):
        with Cluster(engine, f"allranks-failures-{CASES.index(case)}") as cluster:
            case.make(cluster)
            return cluster.wait(case.concerns, case.deadline + BUSY)

    asked = [
        item.callspec.params["case"] for item in request.session.items if "case" in getattr(item, "fixturenames", ())
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {case.title: pool.submit(run, case) for case in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}: {case.title}")
def test_a_failure(ends, case):
    nodes = ends[case.title].result()
    logs = "\n".join(f"--- {name}: {end.status} after {end.seconds:.1f} s\n{end.log}" for name, end in nodes.items())
    for name, words in case.says.items():
        assert re.search(words, nodes[name].log), logs
    for name, status in case.statuses.items():
        assert nodes[name].status == status, logs  # None where it had not ended by the deadline
    assert logs.count("Traceback (most recent call last)") <= case.tracebacks, logs
