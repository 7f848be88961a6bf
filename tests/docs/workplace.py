"""Where the pages' commands run: a folder with the programs and files that they speak of."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from models.loader import BUNDLED
from tests.docs.blocks import PYTHON, ROOT, Block

MODELS = {"path/or/hub-id": BUNDLED["target"], "runs/target": BUNDLED["target"], "runs/drafter": BUNDLED["drafter"]}
CHATS = ("chats.jsonl.gz", "held-out.jsonl.gz")
SECONDS = 300
_SERVERS = re.compile(r"(?:127\.0\.0\.1|localhost):8[01]\d\d\b")
_PROGRAM = '#!/bin/sh\nexec {python} {arguments} "$@"\n'
# make says what it would do; of that, what it would have moaserve do is done. An unknown target is an error.
_MAKE = """#!/bin/sh -e
{make} --no-print-directory -n -C {root} "$@" > planned
sed -n 's/^\\(exec \\)\\{{0,1\\}}\\.venv\\/bin\\/moaserve/moaserve/p' planned | sh -e
"""


def furnish(folder: Path, block: Block) -> None:
    """Put what the commands of ``block`` need into ``folder``."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    make = shutil.which("make")
    scripts = {
        "moaserve": _PROGRAM.format(python=sys.executable, arguments="-m tests.docs.moaserve"),
        "accelerate": _PROGRAM.format(python=sys.executable, arguments="-m accelerate.commands.accelerate_cli"),
        "python": _PROGRAM.format(python=sys.executable, arguments=""),
    }
    if make is not None:
        scripts["make"] = _MAKE.format(make=make, root=ROOT)
    for name, script in scripts.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    (folder / ".curlrc").write_text("fail-with-body\n")  # an error's status is an error
    for name in CHATS:
        if name in block.text:
            _write_chats(folder / name)
    for path, model in MODELS.items():
        if path in block.text and f"--out {path}" not in block.text:
            shutil.copytree(model, folder / path)


def _write_chats(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number in range(3):
            messages = [
                {"role": "user", "content": f"What is {number} and 1?"},
                {"role": "assistant", "content": f"It is one more than {number}. The answer is {number + 1}."},
            ]
            file.write(json.dumps({"messages": messages, "source": "maths"}) + "\n")


def run(block: Block, folder: Path, base_url: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run what ``block`` says against the server at ``base_url``, in ``folder``; its output, errors included.

    ``variables`` are those of the environment: a copy, where this runs in a thread, as pytest writes to its own with every test.
    """
    furnish(folder, block)
    address = base_url.split("/")[2]
    script = _SERVERS.sub(address, block.script)
    arguments = [sys.executable, "-c", script] if block.language in PYTHON else ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(
        arguments,
        cwd=folder,
        env=_environment(folder, base_url, variables),
        input="Hello!\n",  # for those who chat
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )


def _environment(folder: Path, base_url: str, variables: Mapping[str, str]) -> dict[str, str]:
    # What `make test ARGS=…` was told is not for the pages' make.
    others = ("MOASERVE_", "OPENAI_", "MAKE", "MFLAGS", "ARGS")
    kept = {name: value for name, value in variables.items() if not name.startswith(others)}
    return kept | {
        "PATH": f"{folder / '.venv' / 'bin'}:{variables['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CURL_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MOASERVE_COMPILE": "off",
        "MOASERVE_NUM_THREADS": "1",
        "SERVER_OF_THE_PAGES": base_url,
    }
