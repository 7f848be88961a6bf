"""How a token is chosen: processors on the target's logits, and noise that depends on (seed, position, token) alone.

The target's token at output position i is ``argmax_v(processed_logit_v + g_i(v))`` over the allowed tokens, with g_i Gumbel noise
from a counter-based generator (the Gumbel-max trick), so a seed fixes the text whatever was drafted, batched or resumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models import sampled_token
from speculative.request import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


_MULTIPLIER_1, _MULTIPLIER_2, _STEP = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(_GOLDEN)


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) on a Python int."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def noise_stream(seed: int) -> int:
    """Where the noise of a request begins, as a signed 64-bit integer."""
    return _signed(_mix((seed + _GOLDEN) & _MASK))


def noise_key(seed: int, position: int) -> int:
    """What the noise of one output position of one request depends on, as a signed 64-bit integer."""
    return _signed(_mix((noise_stream(seed) + position * _GOLDEN) & _MASK))


def noise_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """``noise_key`` for ``noise_stream`` and position, both int64 and broadcast together."""
    return _mixed(streams + positions * _STEP)


def _mixed(z: Tensor) -> Tensor:
    """``_mix`` on int64 tensors, whose products wrap and whose shifts keep the sign."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for tokens under keys, both int64 and broadcast together -> float32.

    Computed in float64 and element by element, so a token's noise is the same in whatever tensor it is asked for.
    """
    z = _mixed(keys + (token_ids + 1) * _STEP)
    uniform = (((z >> 11) & ((1 << 53) - 1)).double() + 0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_().float()


def process(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One row of logits [V] -> the allowed tokens' ids and their processed logits, both [k].

    Temperature, then top-k, top-p and min-p in transformers' order, each on what the one before has left. Greedy rows keep all.
    """
    vocabulary = logits.shape[-1]
    scores = logits.float()
    if params.greedy:
        return torch.arange(vocabulary, device=logits.device), scores
    scores = scores / params.temperature
    limited = 0 < params.top_k < vocabulary
    if not limited and params.top_p >= 1.0:
        ids = torch.arange(vocabulary, device=logits.device)
    else:
        scores, ids = _sorted_head(scores, params.top_k if limited else vocabulary, params.top_p)
    if params.min_p > 0.0:
        keep = scores >= scores.max() + torch.log(torch.tensor(params.min_p))
        scores, ids = scores[keep], ids[keep]
    return ids, scores


_HEAD = 256


def _sorted_head(scores: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The top-k, cut to the smallest head whose probability reaches ``top_p``: (scores, ids), best first."""
    vocabulary = scores.shape[-1]
    size = min(top_k, vocabulary)
    total = torch.logsumexp(scores.topk(size).values if size < vocabulary else scores, dim=-1)
    # A full sort is the costliest operation of sampling; the head nearly always holds the mass.
    count = min(size, _HEAD)
    while True:
        head, ids = scores.topk(count)
        if top_p >= 1.0 and count == size:
            return head, ids
        cumulative = torch.exp(head - total).cumsum(-1)
        if cumulative[-1] >= top_p or count == size:
            # A token stays while the mass before it is below top_p, so at least one always does.
            kept = int((cumulative < top_p).sum()) + 1
            return head[:kept], ids[:kept]
        count = size


def choose(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The target's token for one row of logits [V] at absolute token ``position``."""
    if params.greedy:
        return int(logits.argmax())
    if sampled_token.suits(logits):
        settings = params.temperature, params.top_k, params.top_p, params.min_p
        return sampled_token.sampled_token(logits, *settings, noise_stream(seed), position)
    ids, scores = process(logits, params)
    noise = gumbel_noise(torch.tensor(noise_key(seed, position), device=logits.device), ids)
    return int(ids[(scores + noise).argmax()])


def choose_rows(logits: Tensor, params: SamplingParams, seed: int, positions: Tensor) -> Tensor:
    """``choose`` for rows of logits [R, V] at token ``positions`` [R] -> [R], asking for no number of the tensors.

    −1 where more than a sorted head of the tokens would have to be looked at.
    """
    scores, vocabulary = logits.float() / params.temperature, logits.shape[-1]
    limited = 0 < params.top_k < vocabulary
    ids = torch.arange(vocabulary, device=logits.device).expand_as(logits)
    sure = torch.ones_like(positions, dtype=torch.bool)
    if limited or params.top_p < 1.0:
        size = params.top_k if limited else vocabulary
        count = size if params.top_p >= 1.0 else min(size, _HEAD)
        total = torch.logsumexp(scores.topk(size).values if limited else scores, dim=-1, keepdim=True)
        scores, ids = scores.topk(count)
        cumulative = torch.exp(scores - total).cumsum(-1)
        if count < size:
            sure = cumulative[:, -1] >= params.top_p
        if params.top_p < 1.0:
            kept = (cumulative < params.top_p).sum(-1, keepdim=True) + 1
            scores = scores.masked_fill(torch.arange(count, device=logits.device) >= kept, float("-inf"))
    if params.min_p > 0.0:
        least = scores.amax(-1, keepdim=True) + float(torch.log(torch.tensor(params.min_p)))
        scores = scores.masked_fill(scores < least, float("-inf"))
    noise = gumbel_noise(noise_keys(torch.full_like(positions, noise_stream(seed)), positions).unsqueeze(1), ids)
    drawn = ids.gather(1, (scores + noise).argmax(-1, keepdim=True)).squeeze(1)
    return drawn.masked_fill(~sure, -1)


_GROUP = 128


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last dimension, best first: (values, indices).

    On a CPU a top-k over a vocabulary costs as much as a decoder layer. The k best stand in the k groups with the largest
    maxima, so two small searches find them.
    """
    vocabulary = logits.shape[-1]
    if logits.device.type != "cpu" or vocabulary % _GROUP or vocabulary // _GROUP <= k:
        values, ids = logits.topk(min(k, vocabulary), dim=-1)
        return values, ids
    groups = logits.unflatten(-1, (-1, _GROUP))
    chosen = groups.amax(-1).topk(k, dim=-1).indices
    pool = groups.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, _GROUP)).flatten(-2)
    values, place = pool.topk(k, dim=-1)
    return values, chosen.gather(-1, place // _GROUP) * _GROUP + place % _GROUP


def argmax(logits: Tensor) -> Tensor:
    """Index of the first of the largest along the last dimension."""
    vocabulary = logits.shape[-1]
    if logits.device.type != "cpu" or vocabulary % _GROUP:
        return logits.argmax(-1)
    # The same two small searches: a maximum is several times faster than an argmax, above all in bfloat16.
    groups = logits.unflatten(-1, (-1, _GROUP))
    chosen = groups.amax(-1).argmax(-1, keepdim=True)
    group = groups.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, _GROUP)).squeeze(-2)
    place: Tensor = chosen.squeeze(-1) * _GROUP + group.argmax(-1)
    return place
