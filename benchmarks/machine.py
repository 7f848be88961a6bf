"""Where and from what a number was measured."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from speculative.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Provenance:
    """What stands beside a result."""

    command: str
    commit: str
    date: str
    cpu: str
    cores: int
    threads: int
    isa: str
    gpu: str | None
    python: str
    torch: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """For people."""
        gpu = f", {self.gpu}" if self.gpu else ""
        return f"{self.cpu} ({self.cores} cores, {self.threads} threads, {self.isa}){gpu}; torch {self.torch}; commit {self.commit}"


def provenance() -> Provenance:
    """This run's."""
    return Provenance(
        command=_command(),
        commit=_commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        isa=torch.backends.cpu.get_cpu_capability(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        torch=torch.__version__,
    )


def write_json(result: dict[str, Any], path: Path) -> None:
    """Keep a result, with this run's provenance beside it; see ``write_text``."""
    write_text(json.dumps(result | {"provenance": provenance().as_dict()}, indent=1), path)


def write_text(text: str, path: Path) -> None:
    """Keep a result as it stands; where the disk does not take it, it is printed and the program ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(text)
        raise SystemExit(f"moaserve: error: cannot write {path} ({error}): the result stands above instead") from error


def decoding_settings(config: EngineConfig) -> dict[str, Any]:
    """What of an engine's configuration speed and acceptance depend on, for JSON."""
    drafting = {name: value for name, value in asdict(config).items() if name.startswith("draft_")}
    return {"model": config.model, **drafting}


def _command() -> str:
    """To be typed again; without the key of a server, as results are kept and shown."""
    words, hidden = [Path(sys.argv[0]).name], False
    for word in sys.argv[1:]:
        words.append("KEY" if hidden else "--api-key=KEY" if word.startswith("--api-key=") else word)
        hidden = word == "--api-key"
    return shlex.join(words)


def _commit() -> str:
    try:
        here = Path(__file__).parent
        run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
