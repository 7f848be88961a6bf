"""Every command and program that README.md and docs/*.md show is run, or says why it is not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from app.settings import Settings
from tests.docs.blocks import BLOCKS, PYTHON, SHELL, Block, blocks_of
from tests.docs.workplace import run
from tests.integration.conftest import Server, start_server, stop_server

WHAT_TO_DO = (
    "Make it run against a server with the bundled model (see tests/docs/workplace.py for the files and programs that it finds), "
    "or say why a test cannot, in a comment on the line before it: <!-- not run: needs a GPU -->"
)
PROGRAMS_OF_OTHERS = {"curl", "jq", "make", "openssl", "redis-cli", "promtool"}
RUNNABLE = [block for block in BLOCKS if block.language in SHELL | PYTHON]


@pytest.fixture(scope="module")
def documented_server() -> Iterator[Server]:
    server = start_server("--dtype", "float32", "--num-threads", "1")
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, documented_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Block, Future[CompletedProcess[str]]]]:
    """The blocks that are asked for, as they run: most of them load a model, and two do that in the time of one."""
    variables = dict(os.environ)
    asked = [item.callspec.params.get("block") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            block: pool.submit(run, block, tmp_path_factory.mktemp("page"), documented_server.base_url, variables)
            for block in RUNNABLE
            if block.reason is None and block in asked
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.integration
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_what_the_pages_say_runs(block: Block, request: pytest.FixtureRequest) -> None:
    if block.reason is not None:
        pytest.skip(f"{block} says: not run: {block.reason}")
    done = request.getfixturevalue("runs")[block].result()
    missing = re.search(r"(\S+): command not found", done.stdout)
    if missing and missing[1] in PROGRAMS_OF_OTHERS:
        pytest.skip(f"install {missing[1]} to run {block}")
    assert done.returncode == 0, f"{block} ends with {done.returncode}:\n{block.text}\n{done.stdout[-3000:]}\n{WHAT_TO_DO}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml" and block.reason is None], ids=str)
def test_settings_files_are_accepted(block: Block, tmp_path: Path) -> None:
    (tmp_path / "moaserve.toml").write_text(block.text, "utf-8")
    Settings(config=tmp_path / "moaserve.toml")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("", "text")], ids=str)
def test_no_command_hides_in_a_block_without_its_language(block: Block) -> None:
    commands = re.search(r"^\s*(\$ |(curl|docker|make|moaserve|pip|python3?|redis-cli|sudo|uv) )", block.text, re.MULTILINE)
    assert commands is None, f"{block} seems to hold commands: begin it with ```sh. {WHAT_TO_DO}"


PAGE = """Text.

<!-- not run: needs a GPU -->
```sh
nvidia-smi
```

<!-- not run: one reason, one block -->
More text.

- in a list:

  ```console
  $ echo one \\
      two
  one two
  $ echo three
  ```

```json
{}
```
"""


def test_blocks_are_found_with_their_reasons() -> None:
    blocks = list(blocks_of(PAGE, "page.md"))
    assert [(str(block), block.language, block.reason) for block in blocks] == [
        ("page.md:4", "sh", "needs a GPU"),
        ("page.md:13", "console", None),
        ("page.md:20", "json", None),
    ]
    assert blocks[1].script == "echo one \\\n    two\necho three"


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        "curl -s 127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{}' | cat",
        "moaserve serve --prot 8000",
        "make serve ARGS='--max-num-seqs 0'",
        "make sevre",
        "moaserve bench ofline",
        ".venv/bin/moaserve train --target path/or/hub-id --data chats.jsonl.gz --out here --epoch",
        "false; true",
    ],
)
def test_a_wrong_command_would_show(text: str, documented_server: Server, tmp_path: Path) -> None:
    assert run(Block("page.md", 1, "sh", text, None), tmp_path, documented_server.base_url, os.environ).returncode != 0
