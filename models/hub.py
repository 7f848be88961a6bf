"""Checkpoints from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from models.errors import CheckpointError
from models.reading import json_object

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt"]
"""Weights, configs, tokenizer and chat templates: nothing else is ever read."""

UNWANTED = ["consolidated*", "*/*.safetensors", "*/*.json"]
"""The same weights a second time, as their authors or other programs want them: in ``original/``, in ``onnx/``."""


def repository_of(hub_id: str) -> str:
    """A hub id without the revision that it may name: ``owner/name`` of ``owner/name@revision``."""
    return hub_id.partition("@")[0]


def download(hub_id: str, check: Callable[[dict[str, Any]], object]) -> Path:
    """The folder of a checkpoint that is downloaded once; raises CheckpointError where it cannot be had.

    A revision is a branch, a tag or a commit; the newest commit is taken where ``hub_id`` names none. ``check`` is shown the
    config.json before anything else is fetched, and raises what is to be raised.
    """
    name = repository_of(hub_id)
    try:
        config = Path(hf_hub_download(name, "config.json", revision=hub_id.partition("@")[2] or None))
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise CheckpointError(
                f"{hub_id!r} on the hub has no config.json: LoRA adapters and GGUF files are not read, take the whole checkpoint"
            ) from error
        raise _cannot(hub_id, error) from error
    check(json_object(config))
    try:
        # Its folder bears the commit's name: what follows belongs to the config that was looked at.
        return Path(snapshot_download(name, revision=config.parent.name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:
        raise _cannot(hub_id, error) from error


def _cannot(hub_id: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot download {hub_id!r} from the hub: {error}")
