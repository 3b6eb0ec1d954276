"""The clusters of compose/, brought up by the real engine."""

import json
import os
import subprocess

import pytest
from conftest import ROOT
from test_mnist import done_lines


def compose(*args, timeout=300):
    # a project of its own: a cluster that somebody has running is left alone
    command = ["docker", "compose", "-p", "allranks-test", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=True)


@pytest.mark.parametrize("file", ["compose/docker-compose.yml", "compose/pods.yml"])
def test_every_rank_trains_and_says_so(engine, file):
    try:
        compose("-f", file, "up", "-d")
        containers = engine.containers.list(all=True, filters={"label": "com.docker.compose.project=allranks-test"})
        assert len(containers) == 2
        statuses = [container.wait(timeout=300)["StatusCode"] for container in containers]
        logs = "".join(container.logs().decode() for container in containers)
    finally:
        compose("-f", file, "down", "-t", "2")
    assert statuses == [0, 0], logs
    ranks = done_lines(logs)
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [("0", "2"), ("1", "2")]
    assert len({rank["weights"] for rank in ranks}) == 1
    assert float(ranks[0]["accuracy"]) >= 0.989
    if "pods" in file:
        for rank in (0, 1):
            assert f"rank {rank} of 2 is on test-{rank}.test-service.demo-project.svc.cluster.local cpu" in logs


def test_a_gpu_host_gives_both_nodes_its_gpu(engine):
    merged = compose("-f", "compose/docker-compose.yml", "-f", "compose/gpu.yml", "config", "--format", "json").stdout
    for name, service in json.loads(merged)["services"].items():
        device = service["deploy"]["resources"]["reservations"]["devices"][0]
        assert (device["driver"], device["device_ids"]) == ("nvidia", ["0"])
        assert service["environment"]["BACKEND"] == "gloo"
        assert service["environment"]["SING_RANK"] == name.removeprefix("node-")


def test_plain_docker_compose_finds_the_cluster(engine):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
    done = subprocess.run(
        ["docker", "compose", "config", "--services"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["node-0", "node-1"]
