"""How one request's tokens are chosen, one after another: what its parameters and its text so far do to the target's logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from speculative.request import SamplingParams
from speculative.sampling import choose


class Sampler:
    """Chooses a request's tokens in the text's order.

    In this order: repetition penalty, frequency and presence penalty, bias, no end before ``min_tokens``; then temperature and
    the rest in ``sampling``. ``eos_token_ids`` are the model's own ends.
    """

    def __init__(self, params: SamplingParams, seed: int, prompt: Sequence[int], eos_token_ids: Iterable[int]) -> None:
        self.params, self.seed, self.prompt = params, seed, prompt
        self.chosen: list[int] = []
        self._ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        self._plain = not (
            params.frequency_penalty
            or params.presence_penalty
            or params.repetition_penalty != 1.0
            or params.logit_bias
            or (params.min_tokens and self._ends)
        )
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None

    def choose(self, logits: Tensor, best: int) -> int:
        """The target's next token for a row of logits [V], whose likeliest token is ``best``."""
        if self._plain and self.params.greedy:
            token = best
        else:
            adjusted = logits if self._plain else self.adjust(logits)
            token = choose(adjusted, self.params, self.seed, len(self.prompt) + len(self.chosen))
        self._take(token)
        return token

    def adjust(self, logits: Tensor) -> Tensor:
        """A row of logits [V] as penalties, bias and ``min_tokens`` make it, in float32."""
        params, scores = self.params, logits.float()
        counts, seen = self._counted(scores)
        if params.repetition_penalty != 1.0:
            penalised = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
            scores = torch.where(seen, penalised, scores)
        if params.frequency_penalty or params.presence_penalty:
            scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            scores = scores.index_add(0, torch.tensor(ids, device=scores.device), scores.new_tensor(biases))
        if len(self.chosen) < params.min_tokens and self._ends:
            scores = scores.index_fill(0, torch.tensor(self._ends, device=scores.device), float("-inf"))
        return scores

    def _counted(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """How often each token stands in the output [V], and whether it does in prompt or output [V]."""
        if self._counts is None or self._seen is None:
            self._counts, self._seen = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool)
            self._seen[list(self.prompt)] = True
            for token in self.chosen:
                self._count(token)
        return self._counts, self._seen

    def _take(self, token: int) -> None:
        self.chosen.append(token)
        if self._counts is not None:
            self._count(token)

    def _count(self, token: int) -> None:
        assert self._counts is not None and self._seen is not None
        self._counts[token] += 1
        self._seen[token] = True
