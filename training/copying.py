"""How a drafter with paired memory begins: knowing how to copy.

Copying takes three things at once: queries that say what the last two tokens are, keys that say which two a memory's are, and
values that say what followed. Each is of no use without the others, so a drafter that begins at random finds them late; one that
begins with a rough version spends its training on the rest. (After mimetic initialisation, arXiv 2305.09828.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.entry import PairedEntry
from models.layers import Linear
from models.moa import MoA

_SHARPNESS = 2.5
"""How much more a query likes a key for one token that it looks for, in nats; twice that, in all heads, copied too surely."""

_SHARE = 0.5
"""How much of what is copied each query head adds."""

_PARTS = 4
"""What memory is made of, each as large: the target's final hidden state, its own token, and those before and behind it."""


@torch.no_grad()
def begin_with_copying(moa: MoA) -> None:
    """Let the first KV head of CA find memory of the token that is drafted from, and of the one before it, and say what followed.

    So do a block's levels, where they copy.

    Numbers come from PyTorch's global generator; a drafter without paired memory, or that sees the newest alone, stays as it is.
    """
    entry, ca = moa.entry, moa.ca
    if not isinstance(entry, PairedEntry) or not moa.config.attends_to_all_memory:
        return
    assert entry.from_previous is not None
    token, own, following = (_turn(each) for each in (entry.from_token, entry.from_own, entry.from_following))
    previous, before = _turn(entry.from_previous), _turn(entry.from_before)
    size, d = moa.config.target.hidden_size, ca.head_dim
    # A key and its query are one vector then, whose square, divided by √d, is the sharpness.
    what, what_before = math.sqrt(_SHARPNESS * _PARTS / (math.sqrt(d) * size)) * torch.randn(2, d, size)
    seen = torch.linalg.qr(torch.randn(size, d)).Q
    heads = ca.qkv.weight.view(-1, d, size)  # queries, keys, values
    output = ca.output.weight.view(size, -1, d)
    heads[ca.num_heads] = what @ own.T + what_before @ before.T
    heads[ca.num_heads + ca.num_kv_heads] = seen.T @ following.T
    # Heads are group-major: these are the first KV head's.
    for head in range(0, ca.num_heads, ca.num_kv_heads):
        heads[head] = what @ token.T + what_before @ previous.T
        output[:, head] = _SHARE * seen
    if moa.block is not None and (copying := moa.block.copying) is not None:
        shares = copying.num_heads, 1
        copying.from_token.weight.copy_(what.repeat(shares))
        copying.from_previous.weight.copy_(what_before.repeat(shares))
        copying.output.weight.copy_(_SHARE * seen.repeat(1, copying.num_heads))


@torch.no_grad()
def copy_as_trained(moa: MoA) -> None:
    """Let the levels of a block that is new to a trained drafter copy as its CA has learned to for the tokens it is told of.

    CA asks of the stream what an entry makes of tokens; levels ask of the tokens.
    """
    entry, ca = moa.entry, moa.ca
    if moa.block is None or (copying := moa.block.copying) is None or not moa.config.attends_to_all_memory:
        return
    assert isinstance(entry, PairedEntry) and entry.from_previous is not None
    size, d = moa.config.target.hidden_size, ca.head_dim
    first = slice(0, ca.num_heads, ca.num_kv_heads)  # heads are group-major: these are the first KV head's
    asked = ca.qkv.weight[: ca.q_size].view(-1, d, size)[first].flatten(0, 1) * ca.input_norm.weight
    copying.token_norm.weight.copy_(entry.token_norm.weight)
    for ours, its in ((copying.from_token, entry.from_token), (copying.from_previous, entry.from_previous)):
        # CA's norm makes nothing of how large its stream is.
        ours.weight.copy_(asked @ its.weight * (math.sqrt(size) / its.weight.norm()))
    copying.output.weight.copy_(ca.output.weight.view(size, -1, d)[:, first].flatten(1))


def _turn(linear: Linear) -> Tensor:
    """Make a projection [E, E] a rotation, as large as it is, and return it [E, E] at length 1.

    Different rotations keep apart what a token is to itself, to its own memory and to its neighbours'.
    """
    weight = linear.weight
    rotation: Tensor = torch.linalg.qr(torch.randn_like(weight)).Q
    weight.copy_(rotation * (weight.norm() / rotation.norm()))
    return rotation
