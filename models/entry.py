"""What a drafted position starts from, beyond the paper: its token, and what the target last said.

The paper's drafter learns of the target through cross-attention alone, as narrow as its KV heads, and of the target's layers
through their keys and values. An entry adds two short cuts, after EAGLE's pair of embedding and feature: memory reads the target's
final hidden state as well, and the residual stream of a drafted position starts from its token, normalised and projected, plus the
newest memory. Memory is of verified tokens, so all that was said of it holds: nothing that is read is a guess.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.layers import Linear, RMSNorm


class TokenEntry(nn.Module):
    """The half of drafted tokens: a projection [E, E], and with ``paired`` memory a second one, of the tokens before them.

    Raw embeddings are often too small beside a residual stream to be heard, hence the norm.
    """

    def __init__(self, hidden_size: int, eps: float, *, paired: bool = False) -> None:
        super().__init__()
        self.token_norm = RMSNorm(hidden_size, eps)
        self.from_token = Linear(hidden_size, hidden_size)
        self.from_previous = Linear(hidden_size, hidden_size) if paired else None

    def of_tokens(self, embeddings: Tensor, previous: Tensor | None) -> Tensor:
        """What drafted tokens with ``embeddings``, ``previous`` ones before them [n, E], start from besides memory [n, E]."""
        out: Tensor = self.from_token(self.token_norm(embeddings))
        if self.from_previous is not None:
            assert previous is not None
            out = out + self.from_previous(self.token_norm(previous))
        return out


class Entry(TokenEntry):
    """Both halves: what of the target joins memory is one more projection [E, E]."""

    def __init__(self, hidden_size: int, eps: float, *, paired: bool = False) -> None:
        super().__init__(hidden_size, eps, paired=paired)
        self.from_hidden = Linear(hidden_size, hidden_size)

    def of_target(self, hidden: Tensor) -> Tensor:
        """What the target's final hidden states [n, E] add to memory [n, E]."""
        out: Tensor = self.from_hidden(hidden)
        return out


class PairedEntry(Entry):
    """Memory of a token that reads the token too, and those before and behind it: six projections [E, E] in all.

    Copying is finding where the last tokens stood before and saying what came next. One layer of attention can do that only where
    a row holds both: EAGLE's pairs a token with what the target said before it, memory as it is knows nothing of what came after.
    Two tokens tell places apart that one does not, above all in code.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, paired=True)
        self.hidden_norm, self.pair_norm = RMSNorm(hidden_size, eps), RMSNorm(hidden_size, eps)
        self.from_own, self.from_before = Linear(hidden_size, hidden_size), Linear(hidden_size, hidden_size)
        self.from_following = Linear(hidden_size, hidden_size)

    def of_target(self, hidden: Tensor) -> Tensor:
        """As in Entry, of normalised states."""
        return super().of_target(self.hidden_norm(hidden))

    def of_own(self, embeddings: Tensor, previous: Tensor) -> Tensor:
        """What tokens with ``embeddings`` [n, E], and those ``previous`` [n, E] to them, add to their own memory [n, E]."""
        out: Tensor = self.from_own(self.pair_norm(embeddings)) + self.from_before(self.pair_norm(previous))
        return out

    def of_following(self, embeddings: Tensor) -> Tensor:
        """What tokens add to the memory of those before them, both [n, E]."""
        out: Tensor = self.from_following(self.pair_norm(embeddings))
        return out
