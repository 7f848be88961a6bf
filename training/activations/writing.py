"""The target runs once over a text, and what drafters learn from is kept: shard by shard, each whole or absent."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from models.config import DecoderConfig
from models.durable import whole
from models.llama import Llama
from training.activations.index import Facts, Plan, shard_path
from training.batches import collate
from training.corpus import store_copy
from training.errors import ConfigError, TrainingError

_FACTS = "facts"
"""Under which a shard's metadata have the digest of its folder's."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Activations of one corpus, as they are to be."""

    path: Path
    facts: Facts
    plan: Plan

    def bytes_a_token(self, target: DecoderConfig) -> int:
        """On disk."""
        return sum(self.facts.needs.widths(target).values()) * self.facts.itemsize

    def missing(self) -> list[int]:
        """Shards that are still to be made."""
        return [number for number in range(len(self.plan.shards)) if not shard_path(self.path, number).exists()]


def begin(folder: Folder) -> None:
    """Write text, plan and facts, or find that they are there from an earlier run; raises ConfigError where they are others.

    What is damaged of text and plan is written anew: equal facts give equal ones. So is an index that was deleted, beside shards of
    the same facts.
    """
    begun = folder.path.exists() and (folder.path / "index.json").exists()
    if begun:
        folder.facts.check_same(folder.path)
        for half in folder.path.glob("*.tmp"):
            half.unlink()
    else:
        _check_shards(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    store_copy(folder.plan.corpus, folder.path)
    shutil.copymode(folder.path, folder.path / folder.facts.corpus)
    if not begun or _is_damaged(folder):
        folder.plan.write(folder.path)
    if not begun:
        folder.facts.write(folder.path)


def _check_shards(folder: Folder) -> None:
    """Raise ConfigError where there are shards of other facts, which their index told until it was deleted."""
    for path in sorted(folder.path.glob("shard-*.safetensors")):
        with suppress(SafetensorError), safe_open(path, framework="pt") as shard:  # who reads a damaged one says so
            if (shard.metadata() or {}).get(_FACTS, folder.facts.digest) != folder.facts.digest:
                raise ConfigError(f"{path} is of other activations than these. Choose another --out, or delete {folder.path}")


def _is_damaged(folder: Folder) -> bool:
    """Whether the plan that an earlier run wrote cannot be read."""
    try:
        Plan.read(folder.path, folder.plan.corpus, folder.facts.max_length)
    except ConfigError:
        return True
    return False


def announce(folders: Sequence[Folder], target: DecoderConfig) -> str:
    """What will be made, and how large; raises ConfigError where the disk is too small for it."""
    lines, wanted = list[str](), 0
    for folder in folders:
        widths, plan = folder.facts.needs.widths(target), folder.plan
        counts = [plan.tokens(number) for number in range(len(plan.shards))]
        each, missing = folder.bytes_a_token(target), folder.missing()
        wanted += sum(counts[number] for number in missing) * each
        parts = ", ".join(f"{name} {width * folder.facts.itemsize:,}" for name, width in widths.items())
        lines.append(
            f"{folder.path}: {sum(len(batch) for batch in plan.batches):,} conversations, {sum(counts):,} tokens of {each:,} bytes "
            f"({parts}): {sum(counts) * each / 1e9:,.2f} GB in {len(counts)} shards, {len(counts) - len(missing)} of them there"
        )
    free = shutil.disk_usage(folders[0].path).free
    if wanted > free:
        raise ConfigError(
            f"{folders[0].path.parent} has {free / 1e9:,.2f} GB free, and {wanted / 1e9:,.2f} GB are to be written: "
            "choose another --out, fewer conversations or a shorter --max-length"
        )
    return "\n".join(lines)


def write(folders: Sequence[Folder], target: Llama, accelerator: Accelerator, *, in_step: bool) -> None:
    """Make what is missing, each process some of the shards. ``in_step``: the target is sharded, all must run it equally often."""
    work = [(folder, number) for folder in folders for number in folder.missing()]
    accelerator.wait_for_everyone()  # all have seen the same
    world, rank = accelerator.num_processes, accelerator.process_index
    mine = work[rank::world]
    runs = [sum(len(folder.plan.shards[number]) for folder, number in work[each::world]) for each in range(world)]
    tokens = sum(folder.plan.tokens(number) for folder, number in mine)
    name = "activations" if world == 1 else f"activations (process 1 of {world})"
    with tqdm(
        total=tokens,
        desc=name,
        unit=" tokens",
        unit_scale=True,
        disable=not accelerator.is_main_process,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    ) as bar:
        written = 0
        for folder, number in mine:
            parts = _allocate(folder, number, target.config)
            row = 0
            for encoded in _encoded(folder, number, target):
                for part_name, part in encoded.items():
                    parts[part_name][row : row + len(part)] = part
                row += len(encoded["hidden"])
                bar.update(len(encoded["hidden"]))
            _save(parts, folder.facts, shard_path(folder.path, number))
            written += row * folder.bytes_a_token(target.config)
            bar.set_postfix_str(f"{written / 1e9:,.2f} GB")
        if in_step:
            for _ in range(max(runs) - runs[rank]):
                target.encode(torch.zeros(1, 1, dtype=torch.long, device=target.device))
    accelerator.wait_for_everyone()


def _allocate(folder: Folder, number: int, target: DecoderConfig) -> dict[str, Tensor]:
    dtype = torch.bfloat16 if folder.facts.dtype == "bfloat16" else torch.float32
    widths = folder.facts.needs.widths(target)
    return {name: torch.empty(folder.plan.tokens(number), width, dtype=dtype) for name, width in widths.items()}


def _encoded(folder: Folder, number: int, target: Llama) -> Iterator[dict[str, Tensor]]:
    """Conversation by conversation [S, …], in the plan's batches: a first epoch beside the target is computed alike."""
    plan, needs = folder.plan, folder.facts.needs
    for batch_number in plan.shards[number]:
        conversations = plan.batches[batch_number]
        batch = collate(plan.corpus, conversations, plan.max_length)
        truth = target.encode(batch.token_ids.to(target.device), layer_input=needs.layer_input, taps=needs.taps)
        kv = truth.kv.flatten(2) if needs.keys_values else None
        parts = {"hidden": truth.hidden, "kv": kv, "layer_input": truth.layer_input, "tapped": truth.tapped}
        for row, length in enumerate(plan.lengths[conversations].tolist()):
            yield {name: part[row, :length].cpu() for name, part in parts.items() if part is not None}


def _save(parts: dict[str, Tensor], facts: Facts, path: Path) -> None:
    try:
        with whole(path) as temporary:
            save_file(parts, temporary, {_FACTS: facts.digest})
            # safetensors lets nobody else read what it writes, and whoever trains may be somebody else.
            shutil.copymode(path.with_name("index.json"), temporary)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"cannot write {path}: {error}") from error
