"""The commands that the README shows: each is run here, or by .ci/run, word by word."""

import re
import subprocess

import pytest
from conftest import ROOT, clean_environ

TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]
BY_CI = {"make demo", "make test", "make build", "docker compose up"}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in BY_CI])
def test_a_command_of_the_readme(command, request):
    if command.startswith("docker"):
        request.getfixturevalue("engine")
    if command.startswith(".venv") and not (ROOT / ".venv").exists():
        pytest.skip("no .venv here: make demo")
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300
    )
    try:
        assert done.returncode == 0, done.stderr
    finally:
        if "compose" in command:
            subprocess.run(command.replace(" up", " down -t 2"), shell=True, cwd=ROOT, capture_output=True, timeout=60)


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
