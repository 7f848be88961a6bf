"""docs/protocol.md tells of every frame, field and error what the code does."""

from __future__ import annotations

import re
from itertools import chain
from typing import get_args

import msgspec
import pytest

from speculative.remote import frames
from speculative.remote.protocol import frame_name
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text("utf-8")
FRAMES = [*get_args(frames.ClientFrame), *get_args(frames.ServerFrame)]


def section(heading: str) -> str:
    return PAGE.partition(f"\n### {heading}\n")[2].partition("\n#")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, its head left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("kind", FRAMES, ids=frame_name)
def test_every_field_is_told_in_its_place(kind: type[msgspec.Struct]) -> None:
    table = rows(section(f"{frame_name(kind)} ({kind.__struct_config__.tag})"))
    assert [cells[0].strip("` ") for cells in table] == list(kind.__struct_fields__)
    for cells, field in zip(table, msgspec.structs.fields(kind), strict=True):
        has_default = field.default is not msgspec.NODEFAULT
        assert ("default" in cells[2]) == has_default or field.name == "stats", f"{cells[0]}: say what it is when left out"


def test_fields_of_fields_are_told_in_their_order() -> None:
    told = re.findall(r"`(\w+)`", PAGE.partition("`sampling` holds")[2].partition("What each may be")[0])
    assert [name for name in told if name in frames.Sampling.__struct_fields__] == list(frames.Sampling.__struct_fields__)
    for (kind, name), part in frames.PARTS.items():
        if part is not frames.Sampling:
            (row,) = [
                cells for cells in rows(section(f"{frame_name(kind)} ({kind.__struct_config__.tag})")) if cells[0] == f"`{name}`"
            ]
            assert re.findall(r"`(\w+)`", row[2]) == list(part.__struct_fields__)


def test_no_frame_is_told_that_is_not_there() -> None:
    told = re.findall(r"^### (\w+) \((\d+)\)$", PAGE, re.MULTILINE)
    assert told == [(frame_name(kind), str(kind.__struct_config__.tag)) for kind in FRAMES]


def test_every_error_is_explained() -> None:
    table = rows(PAGE.partition("\n## Errors\n")[2].partition("\n## ")[0])
    assert [cells[0].strip("`") for cells in table] == list(get_args(frames.ErrorCode))


def test_reasons_are_told() -> None:
    for kind, field in ((frames.Closed, "reason"), (frames.Result, "finish_reason")):
        (row,) = [
            cells for cells in rows(section(f"{frame_name(kind)} ({kind.__struct_config__.tag})")) if cells[0] == f"`{field}`"
        ]
        annotation = next(each.type for each in msgspec.structs.fields(kind) if each.name == field)
        choices = set(chain.from_iterable(get_args(each) or (each,) for each in get_args(annotation))) - {type(None)}
        assert set(re.findall(r"`(\w+)`", row[2])) == choices
