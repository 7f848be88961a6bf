"""An engine on recorded graphs: a step of it is a handful of launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from models.plans import counting, recorded_span
from models.replay import CudaRecorder, Recorder, Replayed, padded, rounded
from speculative.config import EngineConfig
from speculative.drafters.growth import Sampling, Text
from speculative.drafters.moa import MoADrafter
from speculative.drafters.tree_drafter import TreeDrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.policy import DraftShape
from speculative.replayed_verification import ReplayedVerification

MOST_REMEMBERED = 512
"""Tokens of which a drafter takes note by a recorded graph; of more the work itself takes longer than launching it."""


def replays(config: EngineConfig, device: torch.device) -> bool:
    """Whether to record graphs; what several processes compute together is not."""
    return device.type == "cuda" and config.compile != "off" and config.tensor_parallel_size == 1


def replay_engine(engine: Engine, recorder: Callable[[], Recorder] | None = None) -> None:
    """Let an engine record what it does step after step, and replay it from then on. Its caches must stay as they are.

    Each part of a step gets a ``recorder`` of its own: trees are needed until they are verified, and passes until they are noted.
    """
    new_recorder = partial(CudaRecorder, engine.target.device) if recorder is None else recorder
    engine.tree_pass = ReplayedVerification(engine.target, engine.cache, engine.taps, new_recorder())
    drafter = innermost(engine.drafter)
    if isinstance(drafter, TreeDrafter):
        drafter.trees, drafter.narrows = ReplayedTrees(drafter, engine, new_recorder()), False
    if isinstance(drafter, MoADrafter):
        drafter.compiled["remember"] = ReplayedMemory(drafter, engine, new_recorder())


class ReplayedTrees:
    """Whole trees of a drafter, level by level, as one graph: a DraftTrees."""

    def __init__(self, drafter: TreeDrafter, engine: Engine, record: Recorder) -> None:
        self._drafter, self._target_cache = drafter, engine.cache
        self._replayed = Replayed(record)

    def __call__(
        self,
        windows: list[Tensor],
        texts: list[list[int]],
        rare: list[list[int]],
        sampling: list[Tensor],
        depth: int,
        breadth: int,
        nodes: int,
        min_reach: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in DraftTrees; ``windows`` are where the drafter's caches are anyway."""
        drafter, cache, batch = self._drafter, self._drafter.caches[0], len(rare)
        # Texts that are missing to a size that is recorded draft as the last one does, in slots of their own.
        size = rounded(batch, cache.num_slots)
        span = recorded_span(cache, max(texts[2]))
        shape = DraftShape(depth, breadth, nodes, temperature=temperature)
        of_texts = torch.tensor(texts).T, drafter.rare_tensor(rare), *sampling
        inputs = [torch.tensor([min_reach]), *(padded(each, size) for each in of_texts)]
        kind = (size, span, bool(sampling), shape)
        best = self._replayed(kind, lambda inputs: self._run(inputs, span, shape), inputs, drafter.device)
        tokens, parents, probabilities = (each[:batch] for each in best)
        return tokens, parents, probabilities

    def _run(self, inputs: list[Tensor], span: int, shape: DraftShape) -> list[Tensor]:
        least_reach, texts, rare, *settings = inputs
        roots, starts, lengths, memory_ends, previous = texts.unbind(1)
        drafter, columns = self._drafter, counting(span, texts.device)
        text = Text(starts, lengths, memory_ends, columns, previous, *drafter.with_rows(rare))
        frontier = drafter.first_frontier(roots.unsqueeze(1), text)
        sampling = Sampling(*settings) if settings else None
        return list(drafter.drafted(frontier, text, sampling, shape, self._target_cache, least_reach))


class ReplayedMemory:
    """What a MoA drafter keeps of newly verified tokens; stands in for its graph "remember"."""

    def __init__(self, drafter: MoADrafter, engine: Engine, record: Recorder) -> None:
        self._drafter, self._target_cache = drafter, engine.cache
        self._replayed = Replayed(record)

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Token ids, the ones before them, slots and positions [n], and with an entry hidden states [n, E].

        Windows behind them are not looked at.
        """
        inputs = inputs[: 5 if self._drafter.taps else 4]
        count = len(inputs[0])
        if count > MOST_REMEMBERED:
            return self._run(inputs)
        size = rounded(count, MOST_REMEMBERED)
        # Noting a token twice is noting it once.
        return self._replayed(size, self._run, [padded(each, size) for each in inputs], self._drafter.device)

    def _run(self, inputs: list[Tensor]) -> list[Tensor]:
        token_ids, previous, slots, positions, *hidden = inputs
        self._drafter.note(token_ids, previous, slots, positions, hidden[0] if hidden else None, self._target_cache)
        return []
