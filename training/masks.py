"""What each position may see while training: verification boundaries, the T-step bounded mask and the staircase mask.

A *boundary* is a verified position. At draft time the newest token stands at position t, memory covers 0…t−1 and t−1 is the last
boundary; the token at t proposes the first drafted token (draft depth 0), the one at t+1 the second, and so on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_intervals(count: int, smallest: int, largest: int, generator: torch.Generator) -> Tensor:
    """One interval per sequence [count], uniform in ``smallest`` … ``largest``."""
    return torch.randint(smallest, largest + 1, (count,), generator=generator)


def proposing_positions(response: Tensor) -> Tensor:
    """Positions whose next token an assistant wrote: [B, S] boolean -> [B, S].

    The prompt's last token is one of them: it is the root of a response's first draft.
    """
    following = torch.zeros_like(response)
    following[:, :-1] = response[:, 1:]
    return following


def draw_phases(intervals: Tensor, generator: torch.Generator) -> Tensor:
    """How far into its first interval each sequence's answers begin [count], uniform in 0 … interval − 1."""
    return (torch.rand(len(intervals), generator=generator) * intervals).long()


def verification_boundaries(proposing: Tensor, intervals: Tensor, phases: Tensor | None = None) -> Tensor:
    """Boundaries [B, S]: every position that proposes nothing, and every ``interval``-th from the last of those.

    ``proposing`` boolean [B, S], ``intervals`` [B]; with ``phases`` [B] the first interval is shorter by so much. The first
    position of a row is always a boundary: nothing precedes it.
    """
    positions = torch.arange(proposing.shape[1], device=proposing.device)
    last_verified = torch.where(proposing, 0, positions).cummax(dim=1).values
    since = positions - last_verified
    begun = since if phases is None else since + phases.unsqueeze(1)
    return (begun % intervals.unsqueeze(1) == 0) | (since == 0)


def last_boundaries(boundaries: Tensor) -> Tensor:
    """b(i), the last boundary at or before each position: [B, S] boolean -> [B, S] positions."""
    positions = torch.arange(boundaries.shape[1], device=boundaries.device)
    return torch.where(boundaries, positions, 0).cummax(dim=1).values


def draft_depths(boundaries: Tensor) -> Tensor:
    """Drafted tokens before the one that each position proposes [B, S]; −1 at boundaries, which propose nothing."""
    positions = torch.arange(boundaries.shape[1], device=boundaries.device)
    return positions - last_boundaries(boundaries) - 1


def cross_attention_mask(boundaries: Tensor, *, newest_only: bool = False) -> Tensor:
    """T-step bounded mask [B, 1, S, S]: position i sees memory j ≤ b(i), or j = b(i) alone."""
    positions, last = torch.arange(boundaries.shape[1], device=boundaries.device), last_boundaries(boundaries).unsqueeze(-1)
    return (positions == last if newest_only else positions <= last).unsqueeze(1)


def self_attention_mask(boundaries: Tensor, staircase: Tensor) -> Tensor:
    """Causal mask [B, 1, S, S]; rows with ``staircase`` [B] true see no token before the last boundary."""
    positions = torch.arange(boundaries.shape[1], device=boundaries.device)
    causal = positions <= positions.unsqueeze(-1)
    recent = positions >= last_boundaries(boundaries).unsqueeze(-1)
    return (causal & (recent | ~staircase[:, None, None])).unsqueeze(1)


def staircase_probability(progress: float, until: float) -> float:
    """Share of sequences under the staircase mask: 1 at the start, falling linearly to 0 at ``until`` of the training."""
    return max(0.0, 1.0 - progress / until) if until > 0 else 0.0


def draw_staircase(count: int, probability: float, generator: torch.Generator) -> Tensor:
    """Which of ``count`` sequences are trained under the staircase mask [count]."""
    return torch.rand(count, generator=generator) < probability
