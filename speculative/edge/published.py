"""What of a text was handed out, and what of it nobody has verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from speculative.common_prefix import common_prefix
from speculative.edge.session import Gain
from speculative.request import RequestOutput, Written


@dataclass(frozen=True, slots=True)
class News:
    """What is to be handed out: ``tokens`` and ``text``; ``written`` says in the place of what they stand, if of anything."""

    tokens: tuple[int, ...]
    text: str
    written: Written | None = None


@dataclass(slots=True)
class Published:
    """``told`` is a text as it was handed out, ``verified`` as the server has told it.

    ``ahead`` are the tokens behind what it has told: the drafter wrote them alone, and what they added to ``told`` begins at
    ``places``. So it wrote ``num_offline`` in all, in the place of ``num_corrected`` of which the server has put others.
    """

    told: str = ""
    verified: str = ""
    ahead: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    num_offline: int = 0
    num_corrected: int = 0

    def write_alone(self, output: RequestOutput) -> None:
        """The drafter goes on by itself."""
        self.ahead += output.new_token_ids
        self.places += [len(self.told)] * len(output.new_token_ids)
        self.told += output.text_delta
        self.num_offline += len(output.new_token_ids)

    def take(self, gain: Gain, num_tokens: int, *, revise: bool) -> News | None:
        """Hold what was handed out against what the server says of an output that has ``num_tokens`` with ``gain``.

        Where they differ the server's stands from now on; without ``revise`` nothing does: None, and the server is to go on from
        what was handed out (``keep``).
        """
        self.verified += gain.text
        if not self.ahead:
            self.told += gain.text
            return News(gain.tokens, gain.text)
        same = common_prefix(self.ahead, gain.tokens)
        count = min(len(self.ahead), len(gain.tokens))
        ends_early = gain.finish_reason is not None and len(gain.tokens) < len(self.ahead)
        if same == count and not ends_early:
            self.ahead, self.places = self.ahead[count:], self.places[count:]
            new = self.verified[len(self.told) :] if not self.ahead else ""
            self.told += new
            return News(gain.tokens[count:], new)
        if not revise:
            return None
        self.num_corrected += len(self.ahead) - same
        # Not within a token's text: that of another token is its own, even where both begin alike.
        character = min(common_prefix(self.told, self.verified), self.places[same])
        self.ahead, self.places, self.told = [], [], self.verified
        return News(gain.tokens[same:], self.told[character:], Written(False, num_tokens - len(gain.tokens) + same, character))

    def keep(self) -> list[int]:
        """Let what was handed out stand; the tokens that nobody had verified."""
        kept, self.ahead, self.places, self.verified = self.ahead, [], [], self.told
        return kept
