"""From an EngineConfig to a running Engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.config import DecoderConfig
from models.errors import CheckpointError
from models.hub import repository_of
from models.llama import Llama
from models.loader import (
    eos_token_ids,
    load_decoder,
    load_drafter,
    load_eagle,
    load_tokenizer,
    optimize_for_inference,
    read_json,
    resolve_target,
    target_config,
)
from models.target_weights import is_for_other_weights
from models.tiled_decoder import suits_whole
from speculative.adaptive_policy import AdaptivePolicy
from speculative.compiling import compile_engine, means, own_layers
from speculative.config import BUNDLED, EngineConfig, ModelInfo
from speculative.cost_measuring import measure_costs, measure_reading
from speculative.costs import StepCosts
from speculative.drafters.base import Drafter
from speculative.drafters.eagle import EagleDrafter
from speculative.drafters.grammar import GrammarDrafter
from speculative.drafters.independent import IndependentDrafter
from speculative.drafters.lookup import LookupDrafter
from speculative.drafters.moa import MoADrafter
from speculative.drafters.ngram import NgramDrafter
from speculative.drafters.prediction import PredictionDrafter
from speculative.drafters.tree_drafter import TreeDrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.errors import EngineLoadError, EngineLostError, InvalidRequestError
from speculative.fingerprints import fingerprint, pair_fingerprint
from speculative.found_drafter import FoundDrafter, find_drafter, load_independent
from speculative.garbage import give_back_freed_memory
from speculative.memory import fitted
from speculative.memory_measuring import free_bytes, keep_few_kernels, memory_needs, resident_bytes
from speculative.packages import compiles_graphs, or_uncompiled
from speculative.placement import engine_compiles, engine_dtype, torch_device
from speculative.policy import DraftShape, FixedPolicy
from speculative.ranks import Ranks
from speculative.replaying import replay_engine, replays
from speculative.request import SamplingParams

logger = logging.getLogger("moaserve.engine")

FIXED_REACH = 0.2
"""Where drafting stops unless told otherwise, if nobody weighs what it brings: docs/results/bundled-pair.md."""

MEASURABLE = 16
"""Tokens that a text must have room for to be used in measuring."""

MOA_WINDOW = 64
"""Tokens of a prompt that MoA drafters read on a CPU, and edges everywhere, unless told otherwise: docs/results/bundled-pair.md."""


def load_engine(config: EngineConfig) -> Engine:
    """Load target, tokenizer and drafter; raises EngineLoadError with what is wrong."""
    keep_few_kernels()
    return or_uncompiled(lambda choice: _load_or_end(replace(config, compile=choice)), config.compile)


def _load_or_end(config: EngineConfig) -> Engine:
    """An engine, or an EngineLoadError and no processes left."""
    with ExitStack() as failed:
        try:
            engine = _load(config, failed)
        except (CheckpointError, EngineLostError, OSError) as error:
            raise EngineLoadError(str(error)) from error
        failed.pop_all()
        give_back_freed_memory()
        return engine


def _load(config: EngineConfig, failed: ExitStack) -> Engine:
    engine = load_uncompiled(config, failed)
    if engine_compiles(config, engine.target, engine.target.device, engine.taps):
        compile_engine(engine, config)
    else:
        optimize_for_inference(engine.target)
    drafter = innermost(engine.drafter)
    if isinstance(drafter, TreeDrafter) and not drafter.runs_compiled:
        drafter.pack()
    engine.target.release_layers(own_layers(engine))
    if replays(config, engine.target.device):
        replay_engine(engine)
    elif engine.target.device.type == "cpu":
        logger.info("the target is computed in %s by %s", engine.info.dtype, means(engine))
    engine.scheduler.budget.costs = measure_reading(engine)
    if config.draft_policy == "adaptive" and engine.drafter is not None and engine.info.max_model_len >= MEASURABLE:
        narrows = isinstance(drafter, TreeDrafter) and drafter.narrows
        engine.policy = AdaptivePolicy(engine.largest_shape, StepCosts(measure_costs(engine)), narrows=narrows)
    return engine


def load_uncompiled(config: EngineConfig, failed: ExitStack | None = None) -> Engine:
    """An engine whose weights are as they were loaded, neither packed nor compiled.

    ``failed`` is told what to end where the engine comes to nothing: the processes that share its target.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    # Whatever can be told without weights is, before they are downloaded or read.
    device = torch_device(config.device)
    folder = resolve_target(config.model, lambda raw: text_length(config, DecoderConfig.from_hf(raw)))
    sizes = target_config(folder)
    length = text_length(config, sizes)
    defaults = default_sampling(read_json(folder, "generation_config.json"))
    tokenizer = load_tokenizer(folder)
    ends = eos_token_ids(folder, tokenizer)
    found = find_drafter(config, sizes, tokenizer, length)
    if found.folder is not None and is_for_other_weights(read_json(found.folder, "config.json"), folder):
        logger.warning(
            "--drafter %s was made for other weights than those of %s: answers are the same, fewer drafts are right",
            config.drafter,
            config.model,
        )
    dtype = engine_dtype(config, folder, device)
    ranks: Ranks | None = None
    if config.tensor_parallel_size > 1:
        from speculative.sharing import first_device, load_shared, start_ranks  # half a second to import

        device = first_device(config, device)
        ranks = start_ranks(config, folder, dtype, device)
        if failed is not None:
            failed.callback(ranks.close)
        target: Llama = load_shared(folder, ranks, dtype, device)
    else:
        target = load_decoder(folder, sizes, dtype=dtype, device=device)
    adaptive = config.draft_policy == "adaptive"
    reach = config.draft_min_reach if config.draft_min_reach is not None else 0.0 if adaptive else FIXED_REACH
    shape = DraftShape(config.draft_depth, config.draft_breadth, config.draft_nodes, reach, config.draft_temperature)
    make_drafter, network = _drafter(config, found, target, shape)
    info = ModelInfo(
        name=_name(config.model, folder),
        max_model_len=length,
        vocab_size=sizes.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        drafter=found.kind,
        default_sampling=defaults,
        created=int(time.time()),
        fingerprint=fingerprint(target, network),
        pair=pair_fingerprint(target, network),
        target=fingerprint(target, None),
    )
    kept = config.max_num_seqs * length // 2 if config.prefix_cache_tokens is None else config.prefix_cache_tokens
    resident, limit = resident_bytes(), config.memory_limit
    try:
        engine = Engine(
            target,
            tokenizer,
            make_drafter,
            FixedPolicy(shape),
            shape,
            info,
            max_num_seqs=config.max_num_seqs if limit is None else 1,
            prefill_chunk=config.prefill_chunk,
            prefix_cache_tokens=kept if limit is None else 0,
            remote_tree_nodes=config.remote_tree_nodes,
            eos_token_ids=ends,
        )
        compiled = engine_compiles(config, target, target.device, engine.taps)
        needs = memory_needs(engine, network, resident, compiled=compiled)
        plan = needs.plan(config.max_num_seqs, kept)
        if limit is not None:
            free = free_bytes(device, resident)
            if free is not None and ranks is not None and device.type == "cpu":
                free //= ranks.size
            plan = fitted(plan, limit, free, keeps_tokens=config.prefix_cache_tokens is not None)
            engine.resize(plan.num_seqs, plan.kept_tokens)
    except (RuntimeError, MemoryError, EngineLostError) as error:
        if not _lacks_memory(error):
            raise
        raise EngineLoadError(
            f"no room for the keys and values of {config.max_num_seqs} sequences of {length} tokens: "
            "lower --max-num-seqs or --max-model-len"
        ) from error
    logger.info("memory%s: %s", "" if ranks is None else f" of rank 0 of {ranks.size}", plan.describe())
    engine.info = replace(engine.info, memory=plan.parts)
    engine.ranks = ranks
    return engine


def _name(model: str, folder: Path) -> str:
    """What clients call a model: the folder of a checkpoint from the hub bears a commit's name."""
    if model == BUNDLED:
        return folder.name
    told = model if Path(model).expanduser().is_dir() else repository_of(model)
    return told.rstrip("/").rsplit("/", 1)[-1]


def text_length(config: EngineConfig, sizes: DecoderConfig) -> int:
    """The longest text that is served; raises EngineLoadError, CheckpointError where the model does not reach so far."""
    positions = sizes.max_position_embeddings
    length = config.max_model_len or positions
    if length > positions:
        raise EngineLoadError(f"max_model_len={length} exceeds the model's {positions} positions; lower --max-model-len")
    sizes.check_window(length)
    return length


def _lacks_memory(error: Exception) -> bool:
    """PyTorch has no exception of its own for it on CPUs, and other processes have none."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        said in str(error) for said in ("can't allocate memory", "out of memory", "Unable to allocate")
    )


MakeDrafter = Callable[[int, int], Drafter]


def _drafter(
    config: EngineConfig, found: FoundDrafter, target: Llama, shape: DraftShape
) -> tuple[MakeDrafter | None, nn.Module | None]:
    """What makes the drafter that was found (given slots and context length), and its network."""
    folder, lookup = found.folder, config.draft_lookup
    if folder is None:
        return (None if found.kind == "none" else lambda slots, length: PredictionDrafter(GrammarDrafter(NgramDrafter()))), None
    # Draft levels have a handful of rows: on a CPU, uncompiled float32 products of that size take half the time of bfloat16 ones.
    small = target.dtype if target.device.type != "cpu" else torch.float32
    if found.kind == "eagle":
        eagle = load_eagle(folder, target.config, dtype=small, device=target.device)
        return (
            lambda slots, length: with_text(EagleDrafter(eagle, target, slots, length, shape, config.draft_window or None), lookup),
            eagle,
        )
    if found.kind == "independent":
        compiled = engine_compiles(config, target, target.device)
        model = load_independent(found, target.config, dtype=target.dtype if compiled else small, device=target.device)
        model = model if suits_whole(model) else model.to(small)
        return lambda slots, length: with_text(IndependentDrafter(model, slots, length, shape), lookup), model
    by_operators = bool(read_json(folder, "config.json").get("draft_block_size"))  # others are left uncompiled beside large targets
    compiled = engine_compiles(config, target, target.device) and (by_operators or compiles_graphs(config.compile, target))
    moa = load_drafter(folder, target.config, dtype=target.dtype if compiled else small, device=target.device)

    def make(slots: int, length: int) -> Drafter:
        window, sent = moa_windows(config.draft_window, target.device, length)
        return with_text(MoADrafter(moa, target, slots, length, shape, window, sent), lookup)

    return make, moa


def moa_windows(chosen: int | None, device: torch.device, length: int) -> tuple[int | None, int | None]:
    """How many of a prompt's last tokens a MoA drafter reads, and how many of those edges are sent (None: all).

    ``chosen`` is the setting, ``length`` the longest text. On a CPU the memory of a token takes a good part of the time that the
    token itself does. On a GPU a prompt's memory takes less than the passes that knowing all of it saves; what edges are sent has
    to go over their networks in any case.
    """
    if chosen is not None:
        return chosen or None, chosen or None
    return (MOA_WINDOW if device.type == "cpu" else length), MOA_WINDOW


def with_text(drafter: Drafter, lookup: int) -> Drafter:
    """A drafter that is asked where neither a prediction, nor a grammar, nor the text itself says what comes next."""
    return PredictionDrafter(GrammarDrafter(LookupDrafter(drafter, lookup) if lookup else drafter))


SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config.json may say of sampling, as far as we honour it."""


def default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json says of sampling, under our names; raises EngineLoadError for what no sampling can be."""
    defaults = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EngineLoadError(f"generation_config.json: {key} is {value!r}, and must be a number; correct it or take it away")
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    if defaults.get("top_k") == -1:
        defaults["top_k"] = 0  # both say that all tokens may be drawn
    try:
        SamplingParams(**defaults)
    except (InvalidRequestError, TypeError) as error:
        raise EngineLoadError(f"generation_config.json: {error}; correct it or take it away") from error
    return defaults
