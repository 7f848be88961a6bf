"""From a configuration to a trained drafter on disk."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from models.config import MoAConfig
from models.loader import eos_token_ids, load_drafter, load_target, resolve
from models.moa import MoA
from training.config import TrainConfig
from training.data import load_corpus
from training.errors import ConfigError, DataError
from training.export import export
from training.narrowing import narrowed
from training.regenerate import Writing, regenerated
from training.trainer import Trainer


def train(config: TrainConfig) -> Path:
    """Train a MoA drafter and return its folder, ``config.out``.

    The folder holds the drafter in the published layout as bfloat16, ``training.json`` (recipe and results), ``log.jsonl`` and
    ``checkpoints/``. Raises TrainingError for what the user can put right, TrainingInterrupted after a signal.
    """
    trainer = prepare(config)
    figures = trainer.run()
    if config.draft_vocabulary is not None:
        frequent = trainer.corpus.frequent_response_tokens(config.draft_vocabulary)
        trainer.moa.draft_vocabulary = torch.from_numpy(frequent)
    if trainer.accelerator.is_main_process:
        export(trainer.moa, config, {"corpus": trainer.corpus.key, **asdict(trainer.position), "validation": figures or None})
    return config.out


def prepare(config: TrainConfig) -> Trainer:
    """Load target and data, build or restore the drafter; nothing is trained yet."""
    if not config.resume and (config.out / "checkpoints").exists() and any((config.out / "checkpoints").iterdir()):
        raise ConfigError(f"{config.out} holds checkpoints of an earlier run: add --resume to go on, or choose another --out")
    # Norms keep float32 weights under autocast, on purpose.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # Autocast is the trainer's own: accelerate's setting is global and could not be changed by a second run in this process.
    accelerator = Accelerator(cpu=config.device == "cpu", mixed_precision="no")
    target, tokenizer = load_target(config.target, dtype=config.torch_dtype, device=accelerator.device)
    if tokenizer is None:
        raise DataError(f"{config.target} has no tokenizer")
    if config.max_length > target.config.max_position_embeddings:
        raise ConfigError(
            f"--max-length {config.max_length} is beyond the target's {target.config.max_position_embeddings} positions"
        )
    with accelerator.main_process_first():
        corpus = load_corpus(config.data, tokenizer, config.cache, progress=accelerator.is_main_process)
        valid = load_corpus(config.valid, tokenizer, config.cache, progress=accelerator.is_main_process) if config.valid else None
    if config.regenerate is not None:
        folder = resolve(config.target)
        writing = Writing(eos_token_ids(folder), config.max_length, temperature=config.regenerate_temperature, seed=config.seed)
        corpus = regenerated(corpus, config.regenerate, target, writing, config.cache, accelerator)
    set_seed(config.seed)
    if config.init_from is not None:
        trained = load_drafter(config.init_from, target.config, dtype=torch.float32, device=accelerator.device)
        # N = 0 is also what the command says when nothing was asked for.
        sizes = {name: size for name, size in config.sizes.items() if size}
        drafter = narrowed(trained, sizes).requires_grad_(True)
    else:
        drafter = MoA(MoAConfig.from_target(target.config, **config.sizes)).to(accelerator.device)
    trainer = Trainer(config, accelerator, target, drafter, corpus, valid)
    if config.resume:
        trainer.resume()
    return trainer
