"""docs/troubleshooting.md quotes what the server really says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from app import errors
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
VARIES = "…"


def quoted() -> list[str]:
    """What stands in backticks in the first column of tables whose heading there is "message"."""
    messages: list[str] = []
    of_messages = False
    for line in PAGE.splitlines():
        if not line.startswith("|"):
            of_messages = False
        elif line.startswith("| message |"):
            of_messages = True
        elif of_messages:
            messages += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return messages


def texts() -> Iterator[str]:
    """All texts in the sources, with VARIES for what is filled in."""
    for package in ("app", "models", "speculative"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else VARIES for part in node.values)
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%[-+.\d]*[a-z]", VARIES, node.value)


SAID = list(texts())


def is_said(message: str) -> bool:
    """Whether a text of ours has the message's fixed parts, in their order."""
    pattern = re.compile(".*".join(map(re.escape, message.split(VARIES))), re.DOTALL)
    return any(pattern.search(text) for text in SAID)


@pytest.mark.parametrize("message", quoted())
def test_every_quoted_message_is_in_the_code(message: str) -> None:
    assert len(message.replace(VARIES, "").strip()) > 10, "too little of it is fixed to be found again"
    assert is_said(message), f"nothing in the sources says {message!r}: correct docs/troubleshooting.md"


def test_a_message_that_nobody_says_is_found() -> None:
    assert not is_said("the drafter in … was made by …")
    assert len(quoted()) > 40


def test_every_status_of_an_error_is_explained() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ApiError)]
    statuses = {kind.status for kind in kinds if kind is not errors.ClientGoneError}
    assert {str(status) for status in statuses} <= set(re.findall(r"\| (\d{3}) \|", PAGE))
