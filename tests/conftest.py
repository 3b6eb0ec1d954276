"""Where things are, how a process of the tests is run, and what this machine can do."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DIST_MNIST = ROOT / "images/pytorch-dist-mnist"
DDP = ROOT / "images/pytorch-ddp"
IMAGES = ("allranks-base", "pytorch-dist-mnist", "pytorch-ddp")


def clean_environ(**extra):
    """This process's environment without any launcher's variables."""
    from allranks.simulate import launcher_variables

    kept = {name: value for name, value in os.environ.items() if name not in launcher_variables()}
    return kept | {"GLOO_SOCKET_IFNAME": "lo"} | extra


class Process(subprocess.Popen):
    """A process group; nothing of it outlives a `with` block that fails."""

    def __exit__(self, failure, *what):
        if failure:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(failure, *what)


def start(*command, cwd=None, **environ):
    """Start a command in a process group of its own, its output piped as text."""
    options = {"env": clean_environ(**environ), "text": True, "start_new_session": True, "cwd": cwd}
    return Process([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def start_python(*args, **options):
    """Start this interpreter, as `start` does."""
    return start(sys.executable, *args, **options)


def python(*args, **options):
    """Run this interpreter to its end, as `run` does."""
    return run(sys.executable, *args, **options)


def run(*args, timeout=120, **options):
    """Run a command to its end; return (returncode, stdout, stderr). Nothing of it outlives the time-out."""
    with start(*args, **options) as process:
        stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def done_lines(output):
    """One dict per `done` line, by rank."""
    lines = [line.split()[1:] for line in output.splitlines() if line.startswith("done ")]
    return sorted((dict(word.split("=", 1) for word in line) for line in lines), key=lambda line: int(line["rank"]))


def wait_until(condition, timeout=30):
    """Return once the condition holds; fail when it does not within the time-out (seconds)."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def leave_out(why):
    """Skip this test; fail it where Docker and Kubernetes have been promised."""
    (pytest.fail if "ALLRANKS_REQUIRE_DOCKER" in os.environ else pytest.skip)(why)


@pytest.fixture(scope="session")
def engine():
    """A client of the Docker Engine, which has the images."""
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        leave_out("no Docker Engine answers: docker info")
    import docker

    client = docker.from_env(timeout=120)
    try:
        if not all(client.images.list(image) for image in IMAGES):
            leave_out("the images are not there: make build")
        yield client
    finally:
        client.close()


@pytest.fixture
def script(tmp_path):
    """Write a script and return its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write
