"""Values of a checkpoint's JSON files, with errors that name the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import CheckpointError


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, which may begin with a byte order mark; raises CheckpointError where it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def whole_number(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of a config.json, ``default`` where the key is absent; raises CheckpointError for anything else."""
    value = _value(values, key, default)
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise _of_no_use(key, value, "a whole number")
    return int(value)


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """As ``whole_number``: any finite one."""
    value = _value(values, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _of_no_use(key, value, "a number")
    return float(value)


def mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object in a config.json; empty where there is none."""
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise _of_no_use(key, value, "an object")
    return value


def _value(values: Mapping[str, Any], key: str, default: float | None) -> Any:
    if key not in values and default is None:
        raise CheckpointError(f"config.json has no {key!r}")
    return values.get(key, default)


def _of_no_use(key: str, value: object, wanted: str) -> CheckpointError:
    shown = json.dumps(value, default=repr)
    return CheckpointError(f"config.json has a value that is of no use: {key} is {shown}, and must be {wanted}")
