"""The five steps of each image's README, as a cloud's catalogue shows them, with what the platform sets and no more."""

import os
import re
import time

import pytest
from conftest import IMAGES, ROOT, done_lines
from docker.types import EndpointConfig

STEPS = ["Quick Launch", "GPUs", "Entry command", "Ports", "Environment variables"]
SUFFIX = "test-service.demo-project.svc.cluster.local"
JOB = {
    "SING_WORLD_SIZE": "2",
    "SING_JOB_NAME": "test",
    "SING_HOSTNAME_SUFFIX": SUFFIX,
    "SING_MASTER_ADDR": f"test-0.{SUFFIX}",
}


@pytest.fixture
def launch(engine):
    """Launch a job of two nodes, as the platform does; return what each has printed, once both have succeeded."""
    network = engine.networks.create(f"allranks-launch-{os.getpid()}", internal=True)
    nodes = []

    def launch(image, command):
        for rank in range(2):
            place = EndpointConfig(engine.api._version, aliases=[f"test-{rank}.{SUFFIX}"])
            options = {"network": network.name, "networking_config": {network.name: place}}
            options |= {"hostname": f"test-{rank}", "environment": JOB | {"SING_RANK": str(rank)}}
            nodes.append(engine.containers.run(image, command, detach=True, **options))
        statuses = [node.wait(timeout=180)["StatusCode"] for node in nodes]
        assert statuses == [0, 0], "".join(node.logs().decode() for node in nodes)
        return [node.logs(stderr=False).decode() for node in nodes]

    yield launch
    for node in nodes:
        node.remove(force=True)
    network.remove()


@pytest.mark.parametrize("image", IMAGES[1:])
def test_the_five_steps(engine, launch, image):
    text = (ROOT / f"images/{image}/README.md").read_text()
    steps = dict(re.findall(r"^\d\. ([\w ]+): (.*)", text, re.MULTILINE))
    assert list(steps) == STEPS
    assert "none works too" in steps["GPUs"] and steps["Environment variables"].startswith("none.")
    [chosen] = re.findall(r"`(\S+:latest)`", steps["Quick Launch"])
    ports = engine.images.get(chosen).attrs["Config"]["ExposedPorts"]
    assert steps["Ports"].startswith("22 for SSH") and {"22/tcp", "29500/tcp"} <= set(ports)
    entry = steps["Entry command"]
    began = time.monotonic()
    logs = launch(chosen, None if entry.startswith("leave the default") else re.match(r"`(.*?)`", entry)[1])
    assert time.monotonic() - began < 180, "the guide promises three minutes"
    [promised] = done_lines("\n".join(re.findall(r"^ +(done .*)", text, re.MULTILINE)))
    ranks = done_lines("".join(logs))
    assert [rank["rank"] for rank in ranks] == [str(rank) for rank in range(int(promised["world_size"]))]
    assert all(set(rank) == set(promised) for rank in ranks) and len({rank["weights"] for rank in ranks}) == 1
    assert all(log.splitlines()[-1].startswith("done ") for log in logs)
