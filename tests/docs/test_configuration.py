"""docs/configuration.md and `moaserve serve --help` say what the settings are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from pydantic_core import PydanticUndefined

from app.commands.edge import edge
from app.commands.reference import as_written, configuration, split_default
from app.commands.serve import serve
from app.edge_settings import EdgeSettings
from app.settings import HttpSettings, Settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


COMMANDS: dict[type[HttpSettings], Callable[..., None]] = {Settings: serve, EdgeSettings: edge}


def options(settings: type[HttpSettings] = Settings) -> dict[str, str]:
    """The help text of each option of the command with these settings, by the setting's name."""
    app = typer.Typer(add_completion=False)
    app.command()(COMMANDS[settings])
    given = {option.name: getattr(option, "help", None) or "" for option in typer.main.get_command(app).params}
    return {name: help for name, help in given.items() if name != "help"}


def test_the_page_is_what_the_settings_are() -> None:
    assert PAGE.read_text("utf-8") == configuration(), "settings or their help have changed: run `make docs` and commit the page"


@pytest.mark.parametrize("settings", COMMANDS)
def test_every_setting_is_an_explained_option_and_every_option_a_setting(settings: type[HttpSettings]) -> None:
    assert options(settings).keys() == settings.model_fields.keys()
    assert [name for name, help in options(settings).items() if not help] == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (settings, name)
        for settings in COMMANDS
        for name, field in settings.model_fields.items()
        if field.default not in (None, "", PydanticUndefined)
    ],
)
def test_the_help_tells_the_default_that_counts(settings: type[HttpSettings], name: str) -> None:
    default, words = settings.model_fields[name].default, split_default(options(settings)[name])[1]
    assert words is not None, f"the help of --{name.replace('_', '-')} must end with (default: …)"
    size = re.fullmatch(r"(\d+) ([KMG]iB)", words)
    assert (str(int(size[1]) * UNITS[size[2]]) if size else re.split(r"[:,]? ", words)[0]) == as_written(default)
