"""A request on its way through the engine: tokens, slot, text and counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from speculative.detokenizer import Detokenizer
from speculative.errors import InvalidRequestError
from speculative.prediction import Prediction
from speculative.request import FinishReason, Memory, OfferedTree, Request, RequestOutput, RequestStats, TokenLogprob
from speculative.sampler import Sampler


@dataclass(slots=True)
class Sequence:
    """Mutable state of one request.

    ``tokens`` are prompt and output. The target's cache holds the first ``num_computed`` of them; once the prompt is prefilled
    that is all but the newest. ``num_cached`` of them were there before it began; the drafter knows those from ``drafter_start``
    on, but not yet the last ``num_untold`` computed ones. ``block_keys`` name its beginnings: see ``prefix_cache``. ``offered`` is
    the next tree of a remote one, which has been sent memory up to ``memory_end``. ``untold`` is text of the output that the
    request came with.
    """

    request: Request
    sampler: Sampler
    max_length: int
    detokenizer: Detokenizer
    tokens: list[int]
    prediction: Prediction | None = None
    offered: OfferedTree | None = None
    memory_end: int = 0
    slot: int = -1
    untold: str = ""
    num_computed: int = 0
    num_cached: int = 0
    drafter_start: int = 0
    num_untold: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    arrival_time: float = field(default_factory=time.monotonic)
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_target_calls: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_given_tokens(self) -> int:
        """Length of the prompt and of the output that the request came with."""
        return self.num_prompt_tokens + len(self.request.output_token_ids)

    def token_before(self, position: int) -> int:
        """The token before that at ``position``; before the first stands 0."""
        return self.tokens[position - 1] if position else 0

    @property
    def speculative(self) -> bool:
        """Whether drafts are wanted, from here or elsewhere."""
        return self.request.params.speculative

    @property
    def drafts_here(self) -> bool:
        """Whether drafts are wanted of the engine's own drafter."""
        return self.speculative and not self.request.remote

    @property
    def waits(self) -> bool:
        """Whether it cannot go on before a tree has come from outside."""
        return self.request.remote and self.offered is None

    def take_output(self, eos_token_ids: frozenset[int]) -> None:
        """Take the output that the request brings as if it had been written here; InvalidRequestError where that cannot be."""
        output = self.request.output_token_ids
        text = ""
        for place, token in enumerate(output):
            if not self.sampler.take(token):
                if self.sampler.failed:
                    raise InvalidRequestError(f"it is too complex to be followed to token {place} of the output", param="grammar")
                raise InvalidRequestError(f"token {place} of the output cannot follow in its grammar", param="output_token_ids")
            text += self.detokenizer.add(token)
            if self._is_end(token, eos_token_ids) or self.detokenizer.stopped:
                raise InvalidRequestError(f"the output has ended with its token {place}: nothing follows", param="output_token_ids")
        if self.prediction is not None:
            self.prediction.follow(output)
        if self.request.text_length > len(text):
            raise InvalidRequestError(
                f"the output's text has {len(text)} characters so far, not {self.request.text_length}", param="text_length"
            )
        self.untold = text[self.request.text_length :]
        self.tokens += output

    def _is_end(self, token: int, eos_token_ids: frozenset[int]) -> bool:
        params = self.request.params
        return (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids

    @property
    def _has_failed(self) -> bool:
        """Whether the newest token is the last that the sampler chose by its grammar, or one after that."""
        return self.sampler.failed and len(self.tokens) >= self.num_prompt_tokens + len(self.sampler.chosen)

    def append(
        self, tokens: tuple[int, ...], drafted: int, logprobs: list[TokenLogprob] | None, eos_token_ids: frozenset[int]
    ) -> RequestOutput:
        """Take the tokens of one pass over ``drafted`` nodes, up to the first that ends the text, and publish them.

        The last of ``tokens`` is the target's bonus token, those before it are accepted draft tokens.
        """
        now = time.monotonic()
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        kept: list[int] = []
        text = ""
        for token in tokens:
            kept.append(token)
            self.tokens.append(token)
            if self._has_failed:
                text += self.detokenizer.flush()
                self.finish_reason = "error"
            elif self._is_end(token, eos_token_ids):
                text += self.detokenizer.flush()
                self.finish_reason = "stop"
            else:
                text += self.detokenizer.add(token)
                full = len(self.tokens) >= self.max_length
                if full:
                    text += self.detokenizer.flush()
                if self.detokenizer.stopped:
                    self.finish_reason = "stop"
                elif full:
                    self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        accepted = min(len(kept), len(tokens) - 1)
        if drafted:
            self.count_verification(drafted, accepted)
        if self.prediction is not None:
            self.prediction.follow(kept)
        reported = None if logprobs is None else tuple(logprobs[: len(kept)])
        return self._output(tuple(kept), text, reported, accepted)

    def reading(self, memory: Memory) -> RequestOutput:
        """What there is to tell while the prompt is read; its log-probabilities wait until they are whole."""
        text, self.untold = self.untold, ""
        return RequestOutput(self.request.request_id, (), text, self.finish_reason, self.stats(), memory=memory)

    def _output(
        self, tokens: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...] | None = None, accepted: int = 0
    ) -> RequestOutput:
        of_prompt, self.prompt_logprobs = tuple(self.prompt_logprobs) or None, []
        text, self.untold = self.untold + text, ""
        return RequestOutput(self.request.request_id, tokens, text, self.finish_reason, self.stats(), logprobs, of_prompt, accepted)

    def count_verification(self, drafted: int, accepted: int) -> None:
        """Note that of a draft of so many nodes so many were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        if accepted >= len(self.acceptance_histogram):
            self.acceptance_histogram.extend([0] * (accepted + 1 - len(self.acceptance_histogram)))
        self.acceptance_histogram[accepted] += 1

    def finish(self, reason: FinishReason) -> RequestOutput:
        """End the request without further tokens."""
        self.finish_reason = reason
        return self._output((), self.detokenizer.flush())

    def stats(self) -> RequestStats:
        """A snapshot of the counters."""
        return RequestStats(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=len(self.tokens) - self.num_given_tokens,
            cached_tokens=self.num_cached,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            num_target_calls=self.num_target_calls,
            num_accepted_prediction_tokens=self.prediction.accepted if self.prediction else 0,
            num_rejected_prediction_tokens=self.prediction.rejected if self.prediction else 0,
            acceptance_histogram=tuple(self.acceptance_histogram),
            arrival_time=self.arrival_time,
            scheduled_time=self.scheduled_time,
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
        )
