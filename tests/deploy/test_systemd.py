"""The systemd unit, as far as it shows without systemd running."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import cli
from app.commands.serving import ABORTING_S
from app.main import STORING_S
from app.settings import Settings

ENDING_S = ABORTING_S + STORING_S + 10
"""Behind the time of running requests; ten seconds are for tasks that have to be waited for, and a busy machine."""
UNIT = (Path(__file__).parents[2] / "deploy/systemd/moaserve.service").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_it(tmp_path: Path) -> None:
    unit = tmp_path / "moaserve.service"
    unit.write_text(UNIT.replace("/opt/moaserve/bin/moaserve", "/bin/true"))  # it looks for the program
    run = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


def test_the_server_understands_its_command_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.search(r"^ExecStart=/\S+/moaserve (.*)$", UNIT, re.MULTILINE)
    variables = re.search(r"^Environment=(MOASERVE_\w+)=", UNIT, re.MULTILINE)
    assert command is not None and variables is not None
    config, keys = tmp_path / "moaserve.toml", tmp_path / "keys"
    config.write_text('model = "/no/such/model"\nport = 0\n')
    keys.write_text("sk-one\n")
    monkeypatch.setenv(variables[1], str(keys))
    result = CliRunner().invoke(cli, [str(config) if word.endswith(".toml") else word for word in shlex.split(command[1])])
    assert result.exit_code == 1
    assert "cannot load /no/such/model" in result.output


def test_running_requests_have_their_time_to_finish() -> None:
    timeout = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert timeout is not None
    assert int(timeout[1]) >= Settings.model_fields["shutdown_timeout"].default + ENDING_S
