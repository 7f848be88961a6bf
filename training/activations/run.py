"""From a configuration to a folder of activations: ``train``, and ``valid`` where there is held-out text."""

from __future__ import annotations

from pathlib import Path

from models.loader import resolve_target
from training.activations.config import ActivationsConfig
from training.activations.index import Facts, Plan
from training.activations.writing import Folder, announce, begin, write
from training.batches import Collated, conversations
from training.beginning import corpora, load, rewritten, start, tell_unusable
from training.errors import TrainingInterrupted
from training.needs import needs_of
from training.places import check_folders
from training.target_digest import checkpoint_digest


def make(config: ActivationsConfig) -> Path:
    """Write or complete the activations and return ``config.out``; raises TrainingError for what the user can put right.

    TrainingInterrupted after Ctrl-C; what is whole stays.
    """
    check_folders(config.out, config.cache)
    accelerator = start(config)
    target, tokenizer = load(config.target, config, config.compute_dtype, accelerator, sharded=config.shard_target)
    needs = needs_of(config.method, config.layers_inferred, target.config)
    given, valid = corpora(config, tokenizer, accelerator)
    corpus = rewritten(config, given, target, accelerator)
    tell_unusable(config, corpus, valid, accelerator)
    source, held_out = conversations(config, corpus, valid)
    digest = checkpoint_digest(resolve_target(config.target))
    folders = []
    texts: list[tuple[str, str, Collated, int | None]] = [("train", given.key, source.epoch(0), None)]
    if valid is not None:
        texts.append(("valid", valid.key, held_out, config.valid_tokens))
    for name, data, text, wanted in texts:
        facts = Facts(
            target=digest,
            data=data,
            corpus=text.corpus.key,
            needs=needs,
            dtype=config.dtype,
            max_length=config.max_length,
            batch_tokens=config.batch_tokens,
            seed=config.seed,
            shard_bytes=config.shard_mb * 10**6,
            wanted_tokens=wanted,
        )
        each = sum(needs.widths(target.config).values()) * facts.itemsize
        folders.append(Folder(config.out / name, facts, Plan.make(text, facts.shard_bytes / each)))
    if accelerator.is_main_process:
        for folder in folders:
            begin(folder)
        print(announce(folders, target.config), flush=True)
    accelerator.wait_for_everyone()
    try:
        write(folders, target, accelerator, in_step=config.shard_target)
    except KeyboardInterrupt:
        raise TrainingInterrupted("stopped; the same command goes on at the last whole shard") from None
    return config.out
