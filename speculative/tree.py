"""Draft trees of a batch, and what their nodes see of one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One tree per sequence, padded to the widest.

    Row 0 is the root: the newest token, already chosen but not yet run through the target. Node j stands in row j + 1.
    ``tokens`` [B, N]; ``parents`` [B, N] holds rows, a parent's before its children's; ``sizes`` counts the real nodes of each
    sequence, which come first. Padding nodes have the root as parent.
    """

    tokens: Tensor
    parents: Tensor
    sizes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of a verification: the root and N nodes."""
        return self.tokens.shape[1] + 1

    @classmethod
    def empty(cls, batch: int) -> DraftTree:
        """No drafts: plain decoding."""
        none = torch.empty(batch, 0, dtype=torch.long)
        return cls(none, none, (0,) * batch)

    @classmethod
    def from_chains(cls, chains: list[list[int]]) -> DraftTree:
        """One chain of tokens per sequence; some may be empty."""
        width = max((len(chain) for chain in chains), default=0)
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains], dtype=torch.long).view(len(chains), width)
        parents = torch.tensor([[j if j < len(chain) else 0 for j in range(width)] for chain in chains], dtype=torch.long)
        return cls(tokens, parents.view(len(chains), width), tuple(len(chain) for chain in chains))

    def ancestors(self) -> Tensor:
        """Boolean [B, N+1, N+1]: row i sees itself, its ancestors and the root."""
        batch, nodes = self.parents.shape
        rows = nodes + 1
        steps = torch.zeros(batch, rows, rows, device=self.parents.device)
        steps[:, 1:].scatter_(2, self.parents.unsqueeze(-1), 1.0)
        reach = steps + torch.eye(rows, device=steps.device)
        # Squaring doubles the distance covered: log2(rows) small products instead of a walk over the nodes.
        covered = 1
        while covered < nodes:
            reach = torch.bmm(reach, reach).clamp_(max=1.0)
            covered *= 2
        return reach > 0
