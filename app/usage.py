"""What a response cost and how it was made: OpenAI's usage, and the ``metrics`` that are vLLM's extension and ours."""

from __future__ import annotations

from itertools import zip_longest

from pydantic import BaseModel

from speculative.request import EdgeStats, RequestStats


class PromptTokensDetails(BaseModel):
    """How much of the prompt cost nothing."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What the completion's tokens were spent on; of predictions only where the caller sent one."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, choices: list[RequestStats], n: int) -> Usage:
        """Usage of a response whose every ``n`` choices share a prompt, which counts once."""
        prompts = choices[::n]
        prompt_tokens = sum(stats.prompt_tokens for stats in prompts)
        completion_tokens = sum(stats.completion_tokens for stats in choices)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(stats.cached_tokens for stats in prompts)),
            completion_tokens_details=_details(choices),
        )


def _details(choices: list[RequestStats]) -> CompletionTokensDetails:
    accepted = sum(stats.num_accepted_prediction_tokens for stats in choices)
    rejected = sum(stats.num_rejected_prediction_tokens for stats in choices)
    if not accepted + rejected:
        return CompletionTokensDetails(reasoning_tokens=0)
    return CompletionTokensDetails(reasoning_tokens=0, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)


class SpeculativeDecoding(BaseModel):
    """What speculation gained; vLLM's names, and ``num_target_calls`` and ``tokens_per_second``.

    ``num_spec_steps`` counts the verifications that carried a draft, ``num_spec_tokens`` the tokens gained in them: the
    accepted ones and a bonus token each. ``mean_acceptance_length`` is the second over the first, or 1.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_target_calls: int
    tokens_per_second: float


class Edge(BaseModel):
    """What a response made on an edge has cost its network, and what was written there without a server."""

    num_server_calls: int
    num_calls_ahead: int
    bytes_sent: int
    bytes_received: int
    offline_tokens: int
    corrected_tokens: int

    @classmethod
    def of(cls, choices: list[EdgeStats]) -> Edge:
        """Of all choices together."""
        return cls(**{name: sum(getattr(stats, name) for stats in choices) for name in cls.model_fields})


class ResponseMetrics(BaseModel):
    """How a response was made; ``edge`` is there only where that was an edge's."""

    speculative_decoding: SpeculativeDecoding
    edge: Edge | None = None

    @classmethod
    def of(cls, choices: list[RequestStats]) -> ResponseMetrics:
        """Metrics of a whole response, all its choices together."""
        metrics = cls._of(choices)
        if edges := [stats.edge for stats in choices if stats.edge is not None]:
            metrics.edge = Edge.of(edges)
        return metrics

    @classmethod
    def _of(cls, choices: list[RequestStats]) -> ResponseMetrics:
        steps = sum(stats.num_drafts for stats in choices)
        drafted = sum(stats.num_draft_tokens for stats in choices)
        accepted = sum(stats.num_accepted_draft_tokens for stats in choices)
        histograms = zip_longest(*(stats.acceptance_histogram for stats in choices), fillvalue=0)
        return cls(
            speculative_decoding=SpeculativeDecoding(
                mean_acceptance_length=1 + accepted / steps if steps else 1.0,
                draft_acceptance_rate=accepted / drafted if drafted else 0.0,
                acceptance_histogram=[sum(counts) for counts in histograms],
                num_spec_steps=steps,
                num_accepted_draft_tokens=accepted,
                num_draft_tokens=drafted,
                num_spec_tokens=accepted + steps,
                num_target_calls=sum(stats.num_target_calls for stats in choices),
                tokens_per_second=_tokens_per_second(choices),
            )
        )


def _tokens_per_second(choices: list[RequestStats]) -> float:
    """Decode speed of the choices together: their tokens after the first over the time since the first."""
    if len(choices) == 1:
        return choices[0].tokens_per_second
    first = [stats.first_token_time for stats in choices if stats.first_token_time is not None]
    last = [stats.last_token_time for stats in choices if stats.last_token_time is not None]
    elapsed = max(last) - min(first) if first and last else 0.0
    return sum(max(stats.completion_tokens - 1, 0) for stats in choices) / elapsed if elapsed > 0 else 0.0
