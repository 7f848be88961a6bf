"""What callers are told of probabilities: the model's own, before temperature, penalties and the like."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.llama import Llama
from speculative.request import TokenLogprob
from speculative.sampling import top_tokens

LOGPROB_ROWS = 64
"""Rows whose logits, each as wide as the vocabulary, are held at a time."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Rows of logits [n, V] and the n tokens that follow them -> each token's log-probability, beside the ``count`` likeliest."""
    logits = logits.float()
    totals = logits.logsumexp(-1, keepdim=True)
    own = (logits.gather(1, totals.new_tensor(token_ids).long().unsqueeze(1)) - totals).squeeze(1).tolist()
    if not count:
        return [TokenLogprob(token, logprob, ()) for token, logprob in zip(token_ids, own, strict=True)]
    values, ids = top_tokens(logits, count)
    likeliest = zip(ids.tolist(), (values - totals).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(tokens, logprobs, strict=True)))
        for token, logprob, (tokens, logprobs) in zip(token_ids, own, likeliest, strict=True)
    ]


def text_logprobs(target: Llama, hidden: Tensor, following: Sequence[int], count: int) -> list[TokenLogprob]:
    """As ``token_logprobs``, for a text's hidden states [n, D] and the n or n − 1 tokens ``following``, in parts."""
    told: list[TokenLogprob] = []
    for start in range(0, len(following), LOGPROB_ROWS):
        part = slice(start, min(start + LOGPROB_ROWS, len(following)))
        told += token_logprobs(target.logits(hidden[part]), following[part], count)
    return told
