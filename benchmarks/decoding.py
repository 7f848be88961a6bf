"""One prompt through one way of decoding, timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.prompts import Prompt
from speculative.engine import Engine
from speculative.request import Request, RequestStats, SamplingParams

_request_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came out and what it took.

    ``seconds`` from the prompt to the last token. The first step belongs to the prompt: ``decode_seconds`` start behind it, and
    ``decode_tokens`` are those that came in them.
    """

    token_ids: tuple[int, ...]
    seconds: float
    decode_seconds: float
    decode_tokens: int
    stats: RequestStats | None


def decode(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    on_first: Callable[[], None] = lambda: None,
    prediction: Sequence[int] = (),
    salt: str = "",
) -> Decoded:
    """Run one request alone through an idle engine; ``on_first`` is called after the first step that brings tokens.

    An engine with a prefix cache keeps what requests of equal ``salt`` have read.
    """
    token_ids: list[int] = []
    stats: RequestStats | None = None
    first, first_tokens = 0.0, 0
    start = time.perf_counter()
    name = f"bench-{next(_request_numbers)}"
    engine.add(Request(name, prompt.token_ids, params, prediction=tuple(prediction), cache_salt=salt))
    while engine.has_work:
        for output in engine.step():
            token_ids.extend(output.new_token_ids)
            stats = output.stats
            if not first_tokens:
                on_first()
                first, first_tokens = time.perf_counter(), len(token_ids)
    end = time.perf_counter()
    return Decoded(tuple(token_ids), end - start, end - first, len(token_ids) - first_tokens, stats)


def decode_with_transformers(model: Any, prompt: Prompt, max_tokens: int) -> Decoded:
    """Greedy ``generate`` of transformers on the same prompt."""
    token_ids = torch.tensor([prompt.token_ids], device=model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=max_tokens, do_sample=False, **_NO_SAMPLING
        )
    seconds = time.perf_counter() - start
    generated = tuple(output[0, token_ids.shape[1] :].tolist())
    return Decoded(generated, seconds, seconds, len(generated), None)


def decode_ratio(runs: Sequence[Decoded], over: Sequence[Decoded]) -> float:
    """Speed of some runs over that of others with prefill left out, all tokens over all time; NaN where nothing was decoded."""
    ours, theirs = (sum(r.decode_tokens for r in each) / max(sum(r.decode_seconds for r in each), 1e-9) for each in (runs, over))
    return ours / theirs if ours and theirs else float("nan")


_NO_SAMPLING: dict[str, None] = {"temperature": None, "top_p": None, "top_k": None}
"""A generation_config's sampling settings would only raise warnings in greedy search."""


def load_transformers(model: str, dtype: str, device: str) -> Any:
    """The same weights in transformers' own implementation, for ``decode_with_transformers``."""
    from transformers import AutoModelForCausalLM

    from models.loader import resolve_target

    folder = resolve_target(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return loaded.to(device).eval()
