"""How one request's tokens are chosen, one after another: what its parameters and its text so far do to the target's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from speculative.grammar import GrammarMatcher
from speculative.request import SamplingParams
from speculative.sampling import choose, choose_rows

_NEVER = float("-inf")


class Sampler:
    """Chooses a request's tokens in the text's order.

    In this order: repetition penalty, frequency and presence penalty, bias, no end before ``min_tokens``, the grammar; then
    temperature and the rest in ``sampling``. ``eos_token_ids`` are the model's own ends.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        eos_token_ids: Iterable[int],
        grammar: GrammarMatcher | None = None,
    ) -> None:
        self.params, self.seed, self.prompt, self.grammar = params, seed, prompt, grammar
        self.chosen: list[int] = []
        self._ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        self._penalises = bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)
        self._counted: _Counts | None = None
        self._bias: Tensor | None = None

    def choose(self, logits: Callable[[], Tensor], best: int, drawn: int = -1) -> int:
        """The target's next token for a row of logits [V], whose likeliest is ``best``; ``drawn`` is what ``draw`` told of it.

        Where that is enough nobody asks for the logits.
        """
        if self.grammar is not None and self.grammar.ended:
            return best  # beyond the end of the text: nobody will read it
        token = best if self._takes(best) else drawn if drawn >= 0 else self._choose(logits())
        self.take(token)
        return token

    def draw(self, logits: Tensor, depths: Tensor) -> Tensor | None:
        """What rows of logits [R, V], so many tokens (``depths`` [R]) after the next, would be chosen from: [R], −1 where unknown.

        None where each choice depends on those before it, or nothing is drawn.
        """
        params = self.params
        if params.greedy or self._penalises or params.logit_bias or self._too_early or self.grammar is not None:
            return None
        return choose_rows(logits, params, self.seed, len(self.prompt) + len(self.chosen) + depths)

    def take(self, token: int) -> bool:
        """The text goes on with ``token``; False where its grammar does not allow that."""
        self.chosen.append(token)
        if self._counted is not None:
            self._counted.add(token)
        return self.grammar is None or self.grammar.accept(token)

    @property
    def failed(self) -> bool:
        """Whether the grammar can be followed no further than to the last chosen token, which may be none of the text."""
        return self.grammar is not None and self.grammar.failed

    def _takes(self, best: int) -> bool:
        """Whether the likeliest token is the choice, whatever the others' logits."""
        if not self.params.greedy or self._penalises or self.params.logit_bias or self._too_early:
            return False
        return self.grammar is None or self.grammar.allows(best)

    def _choose(self, logits: Tensor) -> int:
        return choose(self.adjust(logits), self.params, self.seed, len(self.prompt) + len(self.chosen))

    @property
    def _too_early(self) -> bool:
        return bool(self._ends) and len(self.chosen) < self.params.min_tokens

    def adjust(self, logits: Tensor) -> Tensor:
        """A row of logits [V] as penalties, bias, ``min_tokens`` and grammar make it, in float32."""
        scores = logits.float()
        if self._penalises:
            scores = self._penalised(scores)
        if self.params.logit_bias:
            scores = scores + self._biases(scores)
        allowed = scores if self.grammar is None else self.grammar.mask(scores)
        if self._too_early:
            later = allowed.index_fill(0, torch.tensor(self._ends, device=scores.device), _NEVER)
            # A complete grammar leaves nothing but the end, which then has to come.
            allowed = later if bool((later > _NEVER).any()) else allowed
        return allowed

    def _penalised(self, scores: Tensor) -> Tensor:
        params = self.params
        if self._counted is None:
            self._counted = _Counts(scores, self.prompt, self.chosen)
        counts, seen = self._counted.output, self._counted.seen
        if params.repetition_penalty != 1.0:
            penalised = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
            scores = torch.where(seen, penalised, scores)
        return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    def _biases(self, like: Tensor) -> Tensor:
        if self._bias is None:
            ids, biases = zip(*self.params.logit_bias, strict=True)
            place = torch.tensor(ids, device=like.device)
            self._bias = torch.zeros_like(like).index_add(0, place, like.new_tensor(biases))
        return self._bias


class _Counts:
    """How often each token stands in the output [V], and whether it does in prompt or output [V]."""

    def __init__(self, like: Tensor, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.output, self.seen = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool)
        self.seen[list(prompt)] = True
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """``token`` stands in the output once more."""
        self.output[token] += 1
        self.seen[token] = True
