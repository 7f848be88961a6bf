"""Which replica a request goes to: a pure function of what it wishes and of how busy replicas are."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from speculative.replicas.messages import Wish

SLACK: Final = 8
"""Requests that a replica may have above twice the least busy one's before nobody is sent there for what it knows."""


def rank(wish: Wish, loads: Mapping[str, int], slack: float = SLACK) -> list[str]:
    """Replicas to try one after the other, the least busy first. Empty where none will do, for now.

    ``loads`` are the requests that each has, running or waiting. Before all others comes the one that knows the text best, as long
    as it has at most twice the least load and ``slack``: what is known there saves less than others' requests cost. Of equally busy
    ones chance decides, so that several who choose do not all choose the same.
    """
    if wish.only:
        return [wish.only] if wish.only in loads else []
    candidates = [name for name in loads if name not in wish.avoid]
    if not candidates:
        return []
    least = min(loads[name] for name in candidates)
    near = [name for name in wish.near if name in candidates and loads[name] <= 2 * least + slack]
    random.shuffle(candidates)
    candidates.sort(key=lambda name: loads[name])
    if not near:
        return candidates
    best = min(near, key=lambda name: loads[name])
    return [best, *(name for name in candidates if name != best)]
