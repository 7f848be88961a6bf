"""Results on disk."""

import json
import shlex
from pathlib import Path

import pytest
import typer
from click import Option
from typer.testing import CliRunner

from app.cli import cli
from app.commands import options
from benchmarks.machine import provenance, write_json


def test_a_result_stands_beside_where_it_comes_from(tmp_path: Path) -> None:
    write_json({"speed": 2.0}, tmp_path / "new" / "result.json")
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert result["speed"] == 2.0 and result["provenance"]["cores"] >= 1


@pytest.mark.parametrize("given", [["--api-key", "sk-1"], ["--api-key=sk-1"]], ids=" ".join)
def test_commands_are_kept_as_they_are_typed_but_for_keys(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/moaserve", "bench", *given, "--extra", '{"top_k": 1}'])
    command = provenance().command
    assert "sk-1" not in command
    assert shlex.split(command) == [
        "moaserve",
        "bench",
        *(each.replace("sk-1", "KEY") for each in given),
        "--extra",
        '{"top_k": 1}',
    ]


def test_a_result_that_the_disk_does_not_take_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"moaserve: error: cannot write .*result\.json .*: the result stands above instead"):
        write_json({"speed": 2.0}, tmp_path / "file" / "result.json")
    assert json.loads(capsys.readouterr().out)["speed"] == 2.0


@pytest.mark.parametrize(
    "arguments", [["offline", "--json"], ["soak", "--json"], ["costs", "--json"], ["serving", "--out"]], ids=" ".join
)
def test_where_results_cannot_be_written_is_found_out_first(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(cli, ["bench", *arguments, str(tmp_path / "file" / "results")])
    assert done.exit_code == 2 and f"{arguments[1]} {tmp_path}/file/results: {tmp_path}/file is no folder" in done.stderr


def test_what_is_there_need_only_be_writable_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "result.json").touch()
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name == "result.json")
    option = Option(["--json"])
    options.writable_file(option, tmp_path / "result.json")  # as /dev/stdout is, for those who may make no devices
    with pytest.raises(typer.Exit):
        options.writable_file(option, tmp_path / "another.json")
