"""What a verification has gained: which paths are accepted, what is told of them, and where their rows go."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from models.kv_cache import KVCache
from speculative.drafters.base import VerifiedTokens
from speculative.logprobs import token_logprobs
from speculative.request import TokenLogprob
from speculative.sequence import Sequence
from speculative.tree import DraftTree, ancestors
from speculative.verification import Acceptance, verify_tree


def accept_paths(batch: Many[Sequence], tree: DraftTree, logits: Tensor, best: Tensor | list[list[int]]) -> list[Acceptance]:
    """The path that the target itself would have taken through each tree.

    ``logits`` [B, N+1, V] are of all rows, ``best`` [B, N+1] the likeliest token of each.
    """
    if isinstance(best, list):
        greedy, tokens, parents, others = best, tree.token_lists, tree.parent_lists, []
    else:
        drawn = _drawn(batch, tree, logits) if by_the_step(logits.device) else None
        greedy, tokens, parents, *others = _values(best, tree.tokens, tree.parents, *(() if drawn is None else (drawn,)))
    accepted: list[Acceptance] = []
    for index, sequence in enumerate(batch):
        size, room = tree.sizes[index], sequence.max_length - len(sequence.tokens)

        def target_choice(row: int, index: int = index, sequence: Sequence = sequence) -> int:
            drawn = others[0][index][row] if others else -1
            return sequence.sampler.choose(lambda: logits[index, row], greedy[index][row], drawn)

        accepted.append(verify_tree(tokens[index][:size], parents[index][:size], target_choice, room))
    return accepted


def by_the_step(device: torch.device) -> bool:
    """Whether a step's numbers come and go together, and tokens are drawn for all rows: a GPU takes longer for each by itself."""
    return device.type != "cpu"


def _drawn(batch: Many[Sequence], tree: DraftTree, logits: Tensor) -> Tensor | None:
    """What is drawn from all rows [B, N+1], −1 where that is not known; None where nothing is."""
    if all(sequence.request.params.greedy for sequence in batch):
        return None
    depths = ancestors(tree.parents.to(logits.device), tree.num_rows).sum(-1) - 1
    drawn = [sequence.sampler.draw(rows, depths[index]) for index, (sequence, rows) in enumerate(zip(batch, logits, strict=True))]
    return torch.stack([torch.full_like(depths[0], -1) if each is None else each for each in drawn])


def _values(*rows: Tensor) -> list[list[list[int]]]:
    """The numbers of each [B, …]; where they come from a GPU it is waited for once."""
    if all(each.device.type == "cpu" for each in rows):
        return [each.tolist() for each in rows]
    numbers = torch.cat([each.to(rows[0]) for each in rows], dim=1).tolist()
    ends = list(accumulate((each.shape[1] for each in rows), initial=0))
    return [[row[begin:end] for row in numbers] for begin, end in pairwise(ends)]


def path_logprobs(batch: Many[Sequence], accepted: Many[Acceptance], logits: Tensor) -> list[list[TokenLogprob] | None]:
    """What each sequence is to be told of its new tokens' log-probabilities; ``logits`` as above."""
    return [
        None
        if (count := sequence.request.params.logprobs) is None
        else token_logprobs(logits[index, [0, *acceptance.rows]], acceptance.tokens, count)
        for index, (sequence, acceptance) in enumerate(zip(batch, accepted, strict=True))
    ]


def keep_paths(
    cache: KVCache, batch: Many[Sequence], tree: DraftTree, accepted: Many[Acceptance], tapped: Tensor | None
) -> VerifiedTokens | None:
    """Move accepted rows of ``cache`` from scratch to their place in the text; what the drafter is to see of them, if anything.

    ``tapped`` [B·(N+1), taps·E] are of all rows.
    """
    # Where each row stands in the cache now, and from now on.
    drafted: list[int] = []
    final: list[int] = []
    # Of those that the drafter sees: token and the one before it, slot and position; and where it stands among all rows.
    told: list[list[int]] = [[], [], [], []]
    tokens, previous, slots, positions = told
    rows: list[int] = []
    straight, moves = tree.straight or (False,) * len(batch), tree.num_rows > 1
    for n, (sequence, acceptance) in enumerate(zip(batch, accepted, strict=True)):
        first, count = sequence.num_computed, len(acceptance.tokens)
        path, verified = (0, *acceptance.rows), (sequence.tokens[-1], *acceptance.tokens[:-1])
        if moves:
            places = range(cache.flat_row(sequence.slot, first), cache.flat_row(sequence.slot, first + count))
            start = cache.flat_row(sequence.slot, -cache.scratch)
            drafted += places if straight[n] else [start + row for row in path]
            final += places
        if sequence.speculative:
            tokens += verified
            previous += (sequence.token_before(first), *verified[:-1])
            slots += [sequence.slot] * count
            positions += range(first, first + count)
            rows += [n * tree.num_rows + row for row in path]
    if not by_the_step(cache.data.device):
        if moves:
            cache.move_listed_rows(drafted, final)
        return VerifiedTokens(told, tapped, places=rows) if tokens else None
    if not (moves or tokens):
        return None
    sizes = [len(drafted), len(final), len(rows), 4 * len(tokens)]
    numbers = torch.tensor([*drafted, *final, *rows, *chain.from_iterable(told)], device=cache.data.device).split(sizes)
    if moves:
        cache.move_rows(*numbers[:2])
    if not tokens:
        return None
    return VerifiedTokens(numbers[3].view(4, -1), None if tapped is None else tapped.index_select(0, numbers[2]))
