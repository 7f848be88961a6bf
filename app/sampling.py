"""Sampling parameters of a request: its own value, else the model's, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.schemas import INT64, SamplingRequest
from speculative.request import SamplingParams


def sampling_params(body: SamplingRequest, defaults: Mapping[str, Any], max_tokens: int | None, choice: int) -> SamplingParams:
    """Parameters of choice number ``choice``; ``defaults`` are those of the model's generation_config.json.

    Choices of a seeded request take consecutive seeds, so that they differ and each can be had again.
    """

    def value(name: str, otherwise: float) -> Any:
        own = getattr(body, name)
        return own if own is not None else defaults.get(name, otherwise)

    constraint = body.constraint
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(value("temperature", 1.0)),
        top_p=float(value("top_p", 1.0)),
        top_k=max(0, int(value("top_k", 0))),
        min_p=float(value("min_p", 0.0)),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=float(value("repetition_penalty", 1.0)),
        logit_bias=tuple((body.logit_bias or {}).items()),
        seed=None if body.seed is None else _wrapped(body.seed + choice),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=body.logprob_count,
        prompt_logprobs=body.prompt_logprob_count,
        grammar=None if constraint is None else constraint.grammar,
        speculative=body.speculative is not False,
    )


def _wrapped(seed: int) -> int:
    """The seed as a signed 64-bit number."""
    return (seed + INT64) % (2 * INT64) - INT64
