"""How all that trains, or keeps activations, begins: processes, target, text."""

from __future__ import annotations

import sys
import warnings

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from models.compiled import default_cache, unsupported
from models.graph_runner import build_runner, intact, load_runner, runner_path
from models.llama import Llama
from models.loader import eos_token_ids, load_target, resolve_target
from models.tiles import has_operators, has_tiles
from training.activations.config import ActivationsConfig
from training.config import TrainConfig
from training.corpus import Corpus
from training.data import load_corpus
from training.errors import ConfigError, DataError
from training.regenerate import Writing, regenerated
from training.run_config import RunConfig, TextConfig
from training.sharding import load_sharded


def start(config: TextConfig) -> Accelerator:
    """Join the processes that were launched together."""
    # Norms keep float32 weights under autocast, on purpose.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # cuDNN's attention plans anew for every shape, which takes milliseconds, and batches hardly ever have the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Autocast is the trainer's own: accelerate's setting is global and could not be changed by a second run in this process.
    accelerator = Accelerator(cpu=config.device == "cpu", mixed_precision="no")
    if config.device == "cuda" and accelerator.device.type != "cuda":
        raise ConfigError("--device cuda: PyTorch sees no GPU here; say --device auto or cpu")
    return accelerator


def load_operators(config: RunConfig, accelerator: Accelerator, *, writes: bool = False) -> None:
    """Compile and load our operators for this CPU, where the run may compile and has a use for them.

    Attention while training has one where the CPU multiplies bfloat16, a target that ``writes`` answers wherever there are any.
    """
    attends = config.torch_dtype == torch.bfloat16 and has_tiles()
    if not config.compile or unsupported(accelerator.device) or not (attends or (writes and has_operators())):
        return
    runner = runner_path(default_cache())
    with accelerator.main_process_first():
        if not intact(runner):
            build_runner(runner)
    load_runner(runner)


def load(
    name: str,
    config: TextConfig,
    dtype: torch.dtype,
    accelerator: Accelerator,
    *,
    sharded: bool = False,
    last_layers: int | None = None,
) -> tuple[Llama, PreTrainedTokenizerBase]:
    """A target, whole or ``sharded`` or as in ``load_target`` with ``last_layers``, and its tokenizer."""

    def on(device: torch.device) -> tuple[Llama, PreTrainedTokenizerBase | None]:
        return load_target(name, dtype=dtype, device=device, last_layers=last_layers)

    target, tokenizer = load_sharded(on, accelerator) if sharded else on(accelerator.device)
    if tokenizer is None:
        raise DataError(f"{name} has no tokenizer")
    if config.max_length > target.config.max_position_embeddings:
        raise ConfigError(
            f"--max-length {config.max_length} is beyond the target's {target.config.max_position_embeddings} positions"
        )
    return target, tokenizer


def corpora(config: TextConfig, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator) -> tuple[Corpus, Corpus | None]:
    """What is trained on, and what is held out."""
    assert config.data is not None
    with accelerator.main_process_first():
        corpus = load_corpus(config.data, tokenizer, config.cache, progress=accelerator.is_main_process)
        valid = load_corpus(config.valid, tokenizer, config.cache, progress=accelerator.is_main_process) if config.valid else None
    if accelerator.is_main_process:
        for name, text in ((config.data, corpus), (config.valid, valid)):
            if text is not None and text.left_out:
                total = len(text) + text.left_out
                print(f"{name}: {text.left_out} of {total} conversations have no assistant turn and are left out", file=sys.stderr)
    return corpus, valid


def tell_unusable(config: TextConfig, corpus: Corpus, valid: Corpus | None, accelerator: Accelerator) -> None:
    """Say how many conversations are left out as no answer begins early enough in them; where it is all, that is an error later."""
    if not accelerator.is_main_process:
        return
    for name, text in ((config.data or "what is trained on", corpus), (config.valid or "what is held out", valid)):
        unusable = 0 if text is None else len(text) - len(text.usable(config.max_length))
        if text is not None and 0 < unusable < len(text):
            print(f"{name}: {unusable} have no answer within --max-length {config.max_length} and are left out", file=sys.stderr)


def rewritten(config: TrainConfig | ActivationsConfig, corpus: Corpus, target: Llama, accelerator: Accelerator) -> Corpus:
    """A corpus with its answers written anew by the target, where that is asked for."""
    if config.regenerate is None:
        return corpus
    if config.shard_target:
        raise ConfigError("--regenerate: each process writes with the whole target, so not with --shard-target")
    folder = resolve_target(config.target)
    ends, temperature = eos_token_ids(folder), config.regenerate_temperature
    writing = Writing.on(target, ends, config.max_length, temperature=temperature, seed=config.seed)
    return regenerated(corpus, config.regenerate, target, writing, config.cache, accelerator)
