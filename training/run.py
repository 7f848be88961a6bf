"""From a configuration to a trained network on disk."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from models.config import DecoderConfig, MoAConfig
from models.eagle import Eagle, EagleConfig
from models.llama import Llama
from models.loader import BUNDLED, load_drafter, load_eagle, load_target, resolve, resolve_target, target_config
from models.moa import MoA
from training import processes
from training.activations.index import Facts
from training.activations.reading import open_activations
from training.beginning import corpora, load, load_operators, rewritten, start, tell_unusable
from training.checkpoints import latest_checkpoint
from training.config import PretrainConfig, TrainConfig
from training.copying import begin_with_copying
from training.corpus import Corpus
from training.data import load_corpus
from training.errors import ConfigError
from training.needs import needs_of
from training.places import check_folders
from training.resizing import do_without_norm, resized
from training.run_config import RunConfig, option_name
from training.target_digest import checkpoint_digest
from training.tasks.base import Task
from training.tasks.eagle import EagleTask
from training.tasks.independent import IndependentTask
from training.tasks.moa import MoATask
from training.tasks.target import TargetTask
from training.trainer import Trainer


def train(config: TrainConfig) -> Path:
    """Train a MoA drafter and return its folder, ``config.out``.

    The folder holds the drafter in the published layout as bfloat16, ``training.json`` (recipe and results), ``log.jsonl`` and
    ``checkpoints/``. Raises TrainingError for what the user can put right, TrainingInterrupted after a signal.
    """
    return _finish(prepare(config))


def pretrain(config: PretrainConfig) -> Path:
    """Train a target and return its folder, a Hugging Face checkpoint with the same records beside it; raises as ``train``."""
    return _finish(prepare_target(config))


def _finish(trainer: Trainer) -> Path:
    figures = trainer.run()
    if trainer.accelerator.is_main_process:
        trainer.export({"validation": figures or None})
    return trainer.config.out


def prepare(config: TrainConfig) -> Trainer:
    """Load target and data, build or restore the drafter; nothing is trained yet."""
    _check_places(config, target=config.target, init_from=config.init_from)
    accelerator = start(config)
    processes.check(accelerator, config.accumulate)
    load_operators(config, accelerator, writes=config.regenerate is not None)
    digest = checkpoint_digest(resolve_target(config.target))
    if config.activations is not None:
        target, corpus, valid = _kept(config, config.activations, digest, accelerator)
    else:
        target, tokenizer = load(config.target, config, config.torch_dtype, accelerator, sharded=config.shard_target)
        given, valid = corpora(config, tokenizer, accelerator)
        corpus = rewritten(config, given, target, accelerator)
    tell_unusable(config, corpus, valid, accelerator)
    set_seed(config.seed)
    task = _drafting(config, target, corpus, valid, accelerator)
    return _ready(Trainer(config, accelerator, task, digest))


def _kept(config: TrainConfig, folder: Path, digest: str, accelerator: Accelerator) -> tuple[Llama, Corpus, Corpus | None]:
    """What drafters borrow of the target, and texts with its activations, that the command is told or not."""
    needs = Facts.read(folder / "train").needs
    sizes = target_config(config.target)
    borrowed = 0 if needs.layer_input is None else sizes.num_layers - needs.layer_input
    target, tokenizer = load(config.target, config, config.torch_dtype, accelerator, last_layers=borrowed)

    def text(name: str) -> Corpus:
        return open_activations(folder / name, target.config, digest, config.max_length, config.torch_dtype)

    corpus, valid = text("train"), text("valid") if (folder / "valid").exists() else None
    if config.valid is not None and valid is None:
        raise ConfigError(f"--activations {folder} has no held-out conversations: say --valid to moaserve activations")
    for option, name, part in (("--data", config.data, "train"), ("--valid", config.valid, "valid")):
        if name is not None:
            with accelerator.main_process_first():
                given = load_corpus(name, tokenizer, config.cache, progress=accelerator.is_main_process)
            if given.key != Facts.read(folder / part).data:
                raise ConfigError(
                    f"{option} {name} is not what the activations in {folder} were made of: leave it out, they bring it"
                )
    return target, corpus, valid


def _drafting(config: TrainConfig, target: Llama, corpus: Corpus, valid: Corpus | None, accelerator: Accelerator) -> Task:
    """A drafter by the configured method, new or from an earlier one, and how it is trained."""
    vocabulary = None
    if config.draft_vocabulary:
        frequent = corpus.frequent_response_tokens(config.draft_vocabulary)
        vocabulary = torch.from_numpy(frequent)
        if accelerator.is_main_process:
            # Tokens outside it end every draft that reaches them, which costs acceptance without showing in the loss.
            share = f"{corpus.response_share(frequent):.1%}"
            print(f"--draft-vocabulary {len(frequent)}: {share} of the tokens in responses can be drafted", file=sys.stderr)
    if config.method == "independent":
        model = _independent(config, target)
        return IndependentTask(config, target, model, resolve_target(config.target), corpus, valid)
    if config.method == "moa":
        moa = _moa(config, target, corpus)
        moa.draft_vocabulary = vocabulary if vocabulary is not None else moa.draft_vocabulary
        return MoATask(config, target, moa, corpus, valid)
    eagle = _eagle(config, target)
    eagle.draft_vocabulary = vocabulary if vocabulary is not None else eagle.draft_vocabulary
    return EagleTask(config, target, eagle, corpus, valid)


def _moa(config: TrainConfig, target: Llama, corpus: Corpus) -> MoA:
    needs_of("moa", config.layers_inferred, target.config)  # refuses more than there are
    if config.init_from is None:
        fresh = MoA(MoAConfig.from_target(target.config, **config.sizes))
        begin_with_copying(fresh)  # on the CPU, so that a seed means the same on every device
        return fresh.to(target.device)
    folder = BUNDLED["drafter"] if config.init_from == "bundled" else config.init_from
    trained = load_drafter(folder, target.config, dtype=torch.float32, device=target.device)
    # N = 0 is also what the command says when nothing was asked for.
    sizes = {name: size for name, size in config.sizes.items() if size or isinstance(size, bool)}
    if trained.output_norm is not None and config.draft_block is not None:
        do_without_norm(trained, MoATask(dataclasses.replace(config, compile=False), target, trained, corpus, None))
    moa = resized(trained, sizes).requires_grad_(True)
    if moa.block is not None and moa.block.size < config.max_interval - 1:
        raise ConfigError(
            f"--max-interval {config.max_interval} drafts {config.max_interval - 1} positions, and --init-from has a block of "
            f"{moa.block.size}: say --max-interval {moa.block.size + 1} or less"
        )
    return moa


def _eagle(config: TrainConfig, target: Llama) -> Eagle:
    generation, sizes = int(config.method[-1]), target.config
    if config.init_from is not None:
        trained = load_eagle(resolve(config.init_from), sizes, dtype=torch.float32, device=target.device)
        if trained.config.generation != generation:
            raise ConfigError(f"--init-from is an EAGLE-{trained.config.generation}, --method is {config.method}")
        return trained.requires_grad_(True)
    heads = config.draft_kv_heads or sizes.num_kv_heads
    return Eagle(EagleConfig(sizes, generation, heads, config.draft_mlp or sizes.intermediate_size)).to(target.device)


def _independent(config: TrainConfig, target: Llama) -> Llama:
    """By default a quarter of the target's layers at half its width."""
    if config.init_from is not None:
        model, _ = load_target(config.init_from, dtype=torch.float32, device=target.device)
        return model.requires_grad_(True)
    head_dim, whole = target.config.head_dim, target.config
    hidden = config.draft_hidden or max(1, whole.hidden_size // head_dim // 2) * head_dim
    heads = hidden // head_dim
    if hidden % head_dim:
        raise ConfigError(f"--draft-hidden {hidden} must be a multiple of the target's head size, {head_dim}")
    if config.draft_kv_heads is not None and heads % config.draft_kv_heads:
        raise ConfigError(
            f"--draft-kv-heads {config.draft_kv_heads} must divide the drafter's {heads} heads, of {head_dim} numbers each"
        )
    sizes = {
        "hidden_size": hidden,
        "num_layers": config.draft_layers or max(1, whole.num_layers // 4),
        "num_heads": heads,
        "num_kv_heads": config.draft_kv_heads or (whole.num_kv_heads if heads % whole.num_kv_heads == 0 else heads),
        "intermediate_size": config.draft_mlp or 3 * hidden,
    }
    # Tied, whatever the target does: in a small model embeddings are most of the weights.
    return fresh_target(dataclasses.replace(whole, tie_word_embeddings=True), sizes).to(target.device)


def prepare_target(config: PretrainConfig) -> Trainer:
    """Load data and the target to go on from, or make a fresh one; nothing is trained yet."""
    _check_places(config, base=config.base)
    accelerator = start(config)
    processes.check(accelerator, config.accumulate)
    load_operators(config, accelerator)
    target, tokenizer = load(config.base, config, torch.float32, accelerator)
    corpus, valid = corpora(config, tokenizer, accelerator)
    tell_unusable(config, corpus, valid, accelerator)
    set_seed(config.seed)
    if config.fresh:
        target = fresh_target(target.config, config.sizes).to(accelerator.device)
    target.requires_grad_(True)
    return _ready(Trainer(config, accelerator, TargetTask(config, target, resolve_target(config.base), corpus, valid)))


def fresh_target(base: DecoderConfig, sizes: dict[str, int]) -> Llama:
    """A new target like ``base`` but for the given DecoderConfig sizes; raises ConfigError for sizes that do not divide."""
    config = dataclasses.replace(base, **dict[str, Any](sizes))
    if config.hidden_size % config.num_heads or config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"--hidden-size {config.hidden_size} must be a multiple of --heads {config.num_heads}, and that of "
            f"--kv-heads {config.num_kv_heads}"
        )
    config = dataclasses.replace(config, head_dim=config.hidden_size // config.num_heads)
    target = Llama(config)
    for module in target.modules():
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
    return target


def _check_places(config: RunConfig, **sources: str | None) -> None:
    """Raise ConfigError where a run would write over a model that it reads, or that is no run's, and where it cannot write."""
    check_folders(config.out, config.cache)
    for name, source in sources.items():
        bundled = BUNDLED["drafter" if name == "init_from" else "target"]
        folder = bundled if source == "bundled" else Path(source or "")
        if source is not None and config.out.resolve() == folder.resolve():
            raise ConfigError(
                f"--out {config.out} is the folder of {option_name(name)}, which would be overwritten: choose another --out"
            )
    begun = latest_checkpoint(config.out / "checkpoints") is not None
    if begun and not config.resume:
        raise ConfigError(f"{config.out} holds checkpoints of an earlier run: add --resume to go on, or choose another --out")
    model = [path.name for pattern in ("config.json", "model*.safetensors") for path in config.out.glob(pattern)]
    if model and not begun and not (config.out / "training.json").exists():
        raise ConfigError(f"--out {config.out} holds a model that no run of this trainer wrote ({model[0]}): choose another --out")


def _ready(trainer: Trainer) -> Trainer:
    if trainer.config.resume:
        trainer.resume()
    return trainer
