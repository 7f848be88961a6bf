"""What goes into the engine and what comes out of it: plain frozen data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from speculative.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's next token is chosen, and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` None lets the engine draw one. ``stop``
    holds strings that end the text (and are not part of it), ``stop_token_ids`` tokens that do so besides the model's own.
    ``max_tokens`` None means as many as the context holds. ``speculative`` False decodes this request plainly.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculative: bool = True

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the parameter."""
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1", self.max_tokens)
        _check("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100", self.temperature)
        _check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1", self.top_p)
        _check("top_k", self.top_k >= 0, "at least 0 (0: off)", self.top_k)
        _check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1", self.min_p)
        _check("stop", all(self.stop), "free of empty strings", self.stop)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and no noise is drawn."""
        return self.temperature < 1e-5


def _check(name: str, ok: bool, allowed: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} must be {allowed}, got {value!r}", param=name)


@dataclass(frozen=True, slots=True)
class Request:
    """One text to continue; ``request_id`` is never used twice in an engine's life."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request has cost and gained so far.

    ``acceptance_histogram[k]`` counts verifications in which exactly k draft tokens were accepted. ``num_drafts`` counts the
    verifications that carried a draft; ``num_target_calls`` counts every target pass, prefill chunks included.
    ``num_draft_tokens`` are the tree nodes verified. Times are seconds of a monotonic clock.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_target_calls: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    arrival_time: float = 0.0
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens gained per verification, the bonus token included; 1.0 where nothing was drafted."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0.0 where nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time since the first; 0.0 with fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None:
            return 0.0
        elapsed = self.last_token_time - self.first_token_time
        return (self.completion_tokens - 1) / elapsed if elapsed > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's gain for one request; the last one carries ``finish_reason``.

    ``text_delta`` holds only text that no stop string can still take back, so it may lag behind ``new_token_ids``.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    text_delta: str
    finish_reason: FinishReason | None
    stats: RequestStats
