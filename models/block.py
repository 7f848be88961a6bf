"""Drafting a block of positions in one pass: stand-ins for tokens that are not known yet, and a light recurrent head.

SA and CA run once over the root and ``size − 1`` learned stand-ins; they know the text, but not which tokens are proposed on the
way. The head adds that, one small network a level: after the root's, a level's state comes from its parent's state, the token
proposed there and the position's feature. (Masked positions as in DFlash, arXiv 2602.06036, with a sequential head over them.)
Where memory is paired, levels copy too: see ``copying``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import MoAConfig
from models.copying import CopyingHead
from models.layers import Linear, RMSNorm, draw


class BlockHead(nn.Module):
    """What a block drafter has besides LSA, SA and CA: ``stand_ins`` [size − 1, E], and the step from level to level.

    The step is a gated MLP of three inputs side by side; what tokens and positions contribute is told apart from what the parent's
    state does, since the former is known before a level is reached. ``copying``, where there is one, finds what is copied.
    """

    def __init__(self, hidden_size: int, size: int, intermediate_size: int, eps: float, copying: CopyingHead | None) -> None:
        super().__init__()
        self.size, self.intermediate_size = size, intermediate_size
        self.stand_ins = nn.Parameter(torch.empty(size - 1, hidden_size))
        self.state_norm = RMSNorm(hidden_size, eps)
        self.token_norm = RMSNorm(hidden_size, eps)
        self.feature_norm = RMSNorm(hidden_size, eps)
        self.from_state = Linear(hidden_size, 2 * intermediate_size)
        self.from_token = Linear(hidden_size, 2 * intermediate_size)
        self.from_feature = Linear(hidden_size, 2 * intermediate_size)
        self.down = Linear(intermediate_size, hidden_size)
        self.copying = copying
        draw(self.stand_ins)
        nn.init.zeros_(self.down.weight)  # at first a level's state is its feature

    def of_tokens(self, embeddings: Tensor) -> Tensor:
        """What tokens with ``embeddings`` [n, E] contribute [n, 2I]."""
        out: Tensor = self.from_token(self.token_norm(embeddings))
        return out

    def of_positions(self, features: Tensor) -> Tensor:
        """What positions with ``features`` [n, E] contribute [n, 2I]."""
        out: Tensor = self.from_feature(self.feature_norm(features))
        return out

    def step(self, states: Tensor, contributions: Tensor, features: Tensor) -> Tensor:
        """Parents' states, what nodes and positions contribute together [n, 2I], positions' features -> the nodes' states [n, E].

        To ``features`` belongs what a node has copied. The root's state is that alone; a state is what enters the LM head.
        """
        gate, up = (self.from_state(self.state_norm(states)) + contributions).split(self.intermediate_size, dim=-1)
        out: Tensor = features + self.down(F.silu(gate) * up)
        return out


def block_head(config: MoAConfig) -> BlockHead | None:
    """What a drafter of this configuration has besides LSA, SA and CA, if anything."""
    if not config.draft_block_size:
        return None
    target = config.target
    eps, copying = target.rms_norm_eps, None
    if config.copies:
        copying = CopyingHead(target.hidden_size, target.num_heads // config.ca_num_kv_heads, target.head_dim, eps)
    return BlockHead(target.hidden_size, config.draft_block_size, config.draft_block_intermediate_size, eps, copying)
