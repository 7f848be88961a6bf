"""One of several processes: does the jobs of a JSON file, one after another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from training.activations.config import ActivationsConfig
from training.activations.run import make
from training.config import PretrainConfig, TrainConfig
from training.processes import leave
from training.run import pretrain, train

PATHS = ("out", "cache", "activations")


def do(kind: str, settings: dict[str, Any]) -> None:
    settings = {name: Path(value) if name in PATHS and value is not None else value for name, value in settings.items()}
    if kind == "train":
        train(TrainConfig(**settings))
    elif kind == "pretrain":
        pretrain(PretrainConfig(**settings))
    else:
        make(ActivationsConfig(**settings))


if __name__ == "__main__":
    for kind, settings in json.loads(Path(sys.argv[1]).read_text()):
        do(kind, settings)
    leave()
