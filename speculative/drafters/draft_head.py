"""The LM head as drafters use it: over a draft vocabulary, and over the rare tokens of each text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculative.drafters.base import TargetEnds
from speculative.drafters.growth import Text


class DraftHead(nn.Module):
    """Outputs for the tokens of ``vocabulary`` [K], and behind them for the rare tokens [M] of a text; None stands for all tokens.

    ``frequent`` is the head over the vocabulary, and ``whole`` the target's own, which has the rows of all others: they are looked
    up once for a tree.
    """

    def __init__(self, target: TargetEnds, vocabulary: Tensor | None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.frequent, self.whole = target.head_over(vocabulary), target.head_over(None)

    def pack(self) -> None:
        """Prepare its own weights for inference; the target's are packed with the target."""
        if self.frequent is not self.whole:
            self.frequent.pack()

    def rows(self, rare: Tensor) -> Tensor:
        """Rare tokens' rows of the target's head: ids [B, M] as in ``growth.Text`` -> [B, M, E]."""
        return self.whole.rows(rare.clamp(min=0))

    def forward(self, entering: Tensor, text: Text) -> Tensor:
        """What enters [B, w, E] -> logits [B, w, K + M] in float32."""
        # Rows in line: compiled, a product of three dimensions is one for each sequence.
        entering = entering.to(self.frequent.dtype)
        logits: Tensor = self.frequent(entering.flatten(0, 1)).float().unflatten(0, entering.shape[:2])
        if text.rare is None or text.rare_rows is None:
            return logits
        of_rare = torch.matmul(entering, text.rare_rows.transpose(1, 2)).float()
        return torch.cat((logits, of_rare.masked_fill((text.rare < 0).unsqueeze(1), float("-inf"))), dim=-1)
