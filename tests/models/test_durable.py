"""What killed programs leave behind is gone after the next one, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import cli
from models.durable import workshop_beside
from tests.speculative.conftest import N0

BUNDLE = ["export-edge", "--model", str(N0 / "target"), "--drafter", str(N0 / "drafter")]


def leave(out: Path) -> Path:
    """What stands beside ``out`` where an export is killed."""
    with workshop_beside(out) as made:
        left = made.rename(made.with_name(f"{made.name}x"))
    (left / "weights").write_text("half of them")
    return left


@pytest.mark.parametrize(("command", "name"), [(BUNDLE, "edge"), (["export-gguf"], "a[b].gguf")], ids=["edge", "gguf"])
def test_an_export_clears_up_after_one_that_was_killed(tmp_path: Path, command: list[str], name: str) -> None:
    out = tmp_path / name
    killed, at_work, other = leave(out), leave(out), leave(tmp_path / "another")
    own = tmp_path / f".{name}.d"
    own.mkdir()
    for old in (killed, other, own):
        os.utime(old, (0, 0))
    done = CliRunner().invoke(cli, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert {each.name for each in tmp_path.iterdir()} == {each.name for each in (out, at_work, other, own)}
