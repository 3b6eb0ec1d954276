"""The commands that the READMEs show: each is run here, or by .ci/run, word by word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DDP, ROOT, clean_environ


def commands(text):
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


TEXT = (ROOT / "README.md").read_text()
COMMANDS = commands(TEXT)
BY_CI = {"make demo", "make test", "make build", "docker compose up"}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in BY_CI])
def test_a_command_of_the_readme(command, request):
    if command.startswith("docker"):
        request.getfixturevalue("engine")
    if command.startswith(".venv") and not (ROOT / ".venv").exists():
        pytest.skip("no .venv here: make demo")
    try:
        shell(command, ROOT)
    finally:
        if "compose" in command:
            shell(command.partition(" up")[0] + " down -v -t 2", ROOT)


@pytest.mark.parametrize("command", commands((DDP / "README.md").read_text()))
def test_a_command_of_pytorch_ddp(command, request):
    if command.startswith("docker"):
        request.getfixturevalue("engine")
    assert "done " in shell(command, DDP) or command.startswith("docker build")


def shell(command, cwd):
    environ = clean_environ(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(command, shell=True, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ci_runs_the_others_as_they_are_written():
    assert set(COMMANDS) >= BY_CI, "the README opens with them"
    script = (ROOT / ".ci/run").read_text().splitlines()
    for command in BY_CI:
        assert any(line.split("#")[0].strip().startswith(command) for line in script), command


def test_the_readme_lists_every_launcher():
    from allranks.launchers import LAUNCHERS

    for row in LAUNCHERS:
        assert f"\n| `{row.name}` | " in TEXT
        for mark in row.marks:
            assert mark in TEXT
