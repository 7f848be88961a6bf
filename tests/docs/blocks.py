"""The fenced blocks of README.md and docs/*.md. (docs/results/ is a record of what was run, not for readers to run.)"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = {"sh", "bash", "shell", "zsh", "console", "shell-session"}
PYTHON = {"python", "py", "python3"}
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>\S.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of ``text`` in ``language``; ``reason`` says why it cannot be run in a test, if its page does."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str:
        """What is to be run: the text, or of a recorded session what follows the prompts."""
        if self.language not in ("console", "shell-session"):
            return self.text
        lines, goes_on = [], False
        for line in self.text.splitlines():
            if goes_on or line.startswith("$ "):
                lines.append(line if goes_on else line[2:])
                goes_on = line.endswith("\\")
        return "\n".join(lines)


def blocks_of(source: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text, each with the reason in a comment right before it: <!-- not run: … -->."""
    before = ""
    for token in MarkdownIt().parse(source):
        if token.type == "fence":
            assert token.map is not None
            language, marker = (token.info.split() or [""])[0].lower(), _NOT_RUN.search(before)
            yield Block(page, token.map[0] + 1, language, token.content, marker["reason"] if marker else None)
        before = token.content if token.type == "html_block" else ""


BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text("utf-8"), str(page.relative_to(ROOT)))]
