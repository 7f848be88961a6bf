"""What a drafter's config.json says of the target that it was made for: sizes tell models of one family apart, not fine-tunes."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch

from models.loader import open_tensors, tensor_files

KEY: Final = "target_weights"


def weights_name(folder: Path) -> str:
    """Names the layers' weights in a checkpoint folder, by the first row of each as bfloat16: one page of each is read.

    It is the same for checkpoints of other types and with other shards. Raises CheckpointError where a file is damaged.
    """
    rows: dict[str, bytes] = {}
    for path in tensor_files(folder):
        with open_tensors(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.endswith("_proj.weight"):
                    row = tensors.get_slice(name)[0:1].to(torch.bfloat16).contiguous()
                    rows[name] = row.view(torch.uint8).numpy().tobytes()
    digest = blake2b(digest_size=16)
    for name in sorted(rows):
        digest.update(name.encode() + b"\0" + rows[name])
    return digest.hexdigest()


def is_for_other_weights(drafter: Mapping[str, Any], target: Path) -> bool:
    """Whether a drafter's config.json names other weights than those in the folder ``target``; older ones name none."""
    named = drafter.get(KEY)
    return isinstance(named, str) and named != weights_name(target)
