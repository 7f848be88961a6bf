"""What was trained, with the recipe that made it."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from models.durable import workshop
from training.errors import TrainingError
from training.run_config import RunConfig
from training.tasks.base import Task

PREFIX = ".export-"
"""Of folders in which a network is being written; only one run writes to an output folder."""


def export(task: Task, config: RunConfig, figures: dict[str, Any]) -> None:
    """Write the network and ``training.json`` into ``config.out``, replacing an earlier export.

    Raises TrainingError where the disk does not take them.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    try:
        with workshop(config.out, PREFIX, shared=False) as temporary:
            task.save(temporary)
            recipe = {
                "recipe": config.to_json(),
                "result": figures,
                "parameters": sum(parameter.numel() for parameter in task.network.parameters()),
                "machine": {"processor": _processor(), "torch": version("torch"), "accelerate": version("accelerate")},
            }
            text = json.dumps(recipe, indent=2, ensure_ascii=False) + "\n"
            (temporary / "training.json").write_text(text, encoding="utf-8")
            fresh = sorted(path.name for path in temporary.iterdir())
            for stale in config.out.glob("model*.safetensors*"):
                if stale.name not in fresh:
                    stale.unlink()
            for name in fresh:
                os.replace(temporary / name, config.out / name)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"cannot write the network to {config.out}, is the disk full? ({error})") from error


def _processor() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    try:
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    except OSError:
        names = []
    return f"{len(names)} × {names[0]}" if names else platform.processor()
