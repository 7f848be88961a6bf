"""One text between edge and server, as frames say it; no input and output here.

A session outlives connections. On each it is begun anew (`Session.begin`): opened, resumed, or, where the server has forgotten it,
opened with all that was written so far.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from speculative.common_prefix import common_prefix
from speculative.errors import EngineError
from speculative.remote.frames import Logprob, Memory, Open, Opened, Result, Resume, Sampling, Stats, Verify
from speculative.remote.grafting import graft
from speculative.remote.packing import pack_rows, pack_tokens, unpack_rows, unpack_tokens
from speculative.request import FinishReason, OfferedTree, Request, TokenLogprob


class SessionFault(EngineError):
    """What the server tells does not follow what it told before: the connection is not worth keeping."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A drafter's memory from position ``first`` on, as it travels: see `remote.memory_codec`."""

    first: int
    rows: bytes
    newest: bytes


@dataclass(frozen=True, slots=True)
class Gain:
    """What a result adds to a text: ``tokens``, of which the first ``num_accepted`` stood in a tree of ``drafted`` nodes."""

    tokens: tuple[int, ...]
    num_accepted: int
    drafted: int
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    stats: Stats


@dataclass(slots=True)
class Session:
    """What is known of one text, and what is under way.

    ``tokens`` are prompt and output, as the server has told them, ``num_characters`` those of the output's text. There is memory up
    to position ``memory_end``; ``rows`` is what nobody has taken of it yet. ``step`` is the last tree that was sent, ``unanswered``
    those without a result, with their steps. ``num_given`` tokens were there when it was opened, and the server had
    ``server_length`` when it was begun on this connection. ``prompt_logprobs`` is what has come of them, in however many frames,
    until they are told as a whole.
    """

    request: Request
    row_bytes: int = 0
    tokens: list[int] = field(default_factory=list)
    num_characters: int = 0
    memory_end: int = 0
    rows: list[Rows] = field(default_factory=list)
    resume_token: bytes | None = None
    opened: bool = False
    step: int = 0
    unanswered: deque[tuple[int, OfferedTree]] = field(default_factory=deque)
    num_given: int = 0
    server_length: int = 0
    may_skip: bool = True
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    told_prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        """A text begins with its prompt."""
        assert self.request.params.seed is not None, "whoever drafts must know the seed"
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[len(self.request.prompt_token_ids) :]

    def begin(self, number: int, row_bytes: int) -> Open | Resume:
        """The first frame on a connection, on which the session has ``number`` and rows of memory have ``row_bytes``."""
        if row_bytes != self.row_bytes and self.resume_token is not None:
            self.forget()  # another server: one that writes memory in another way
        self.row_bytes, self.opened = row_bytes, False
        self.prompt_logprobs.clear()  # they come again from the first
        # Memory of tokens that were still to come is told again, with its tokens.
        self._drop_memory(len(self.tokens))
        if self.resume_token is not None:
            return Resume(number, self.resume_token, len(self.tokens), self.memory_end, self.num_characters)
        self.step, self.server_length, self.num_given, self.may_skip = 0, 0, len(self.tokens), True
        self.unanswered.clear()
        request, params = self.request, self.request.params
        if self.told_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)
        return Open(
            number,
            pack_tokens(request.prompt_token_ids),
            Sampling.of(params),
            request.priority,
            request.cache_salt,
            memory_from=self.memory_end,
            output=pack_tokens(self.output),
            text_length=self.num_characters,
        )

    def go_on_with(self, tokens: list[int], num_characters: int) -> None:
        """Let the text be another one from somewhere on: the server is to open it anew, with that as its output."""
        self._drop_memory(common_prefix(tokens, self.tokens))  # a token's memory depends on those before it
        self.tokens, self.num_characters = tokens, num_characters
        self.forget()

    def forget(self) -> None:
        """The server has: the session is to be opened anew, with what was written so far as its output."""
        self.resume_token = None

    def take_opened(self, frame: Opened) -> None:
        """The server has it. Trees that it never saw are to be sent anew."""
        if frame.length < len(self.tokens) or (self.resume_token is None and frame.step):
            raise SessionFault(f"the server has {frame.length} tokens of a text of {len(self.tokens)}")
        self.opened, self.resume_token, self.server_length = True, frame.resume_token, frame.length
        self.unanswered = deque(each for each in self.unanswered if each[0] <= frame.step)
        self.step = frame.step

    def take_memory(self, frame: Memory | Result) -> None:
        """What a frame tells of memory, if anything; raises SessionFault where some is left out."""
        first, rows = (frame.first, frame.rows) if isinstance(frame, Memory) else (frame.memory_first, frame.memory)
        if not rows or not self.row_bytes:
            return
        # A drafter with a window needs no memory of what stands before it.
        if first != self.memory_end and not (self.may_skip and first > self.memory_end):
            raise SessionFault(f"memory goes on at {first}, and ends at {self.memory_end}")
        self.may_skip = False
        self.rows.append(Rows(first, rows, frame.newest))
        self.memory_end = self._end(self.rows[-1])

    def take_rows(self) -> list[Rows]:
        """The memory that nobody has taken yet, as far as its tokens are known: it may come before them."""
        known = [each for each in self.rows if self._end(each) <= len(self.tokens)]
        self.rows = self.rows[len(known) :]
        return known

    def _drop_memory(self, end: int) -> None:
        """Forget memory from ``end`` on, and chunks as a whole of which nobody has taken the part before."""
        beyond = [each.first for each in self.rows if self._end(each) > end]
        self.rows = [each for each in self.rows if self._end(each) <= end]
        self.memory_end = min(self.memory_end, end, *beyond)

    def _end(self, rows: Rows) -> int:
        return rows.first + len(rows.rows) // self.row_bytes

    def take_result(self, frame: Result) -> Gain:
        """What a step has brought; raises SessionFault where it does not follow what came before."""
        tokens, drafted = tuple(unpack_tokens(frame.tokens)), 0
        if tokens and frame.first != len(self.tokens):
            raise SessionFault(f"tokens go on at {frame.first}, and end at {len(self.tokens)}")
        if frame.step > self.step:
            raise SessionFault(f"step {frame.step} is answered, and {self.step} was the last")
        while self.unanswered and self.unanswered[0][0] <= frame.step:
            step, tree = self.unanswered.popleft()
            left = self._left(tree) if step == frame.step and tokens else None
            drafted = 0 if left is None else len(left.tokens)
        accepted = len(unpack_rows(frame.accepted))
        self.tokens += tokens
        self.num_characters += len(frame.text_delta)
        self.finish_reason = frame.finish_reason
        of_prompt = self._take_prompt_logprobs(frame)
        self.take_memory(frame)
        return Gain(
            tokens,
            accepted,
            drafted if accepted or len(tokens) == 1 else 0,  # what came by a resumption says not which rows were accepted
            frame.text_delta,
            frame.finish_reason,
            _logprobs(frame.logprobs),
            _logprobs(of_prompt),
            frame.stats,
        )

    def _take_prompt_logprobs(self, frame: Result) -> tuple[Logprob, ...] | None:
        """All of them, once what comes behind them has come; None where that was before, is still to be, or there are none."""
        if self.told_prompt_logprobs:
            return None
        self.prompt_logprobs += frame.prompt_logprobs or ()
        if not (frame.tokens or frame.text_delta or frame.finish_reason):
            return None
        whole, self.told_prompt_logprobs = tuple(self.prompt_logprobs) or None, True
        self.prompt_logprobs.clear()
        return whole

    def can_draft(self, in_flight: int) -> bool:
        """Whether all that was gained is known here, so that a tree can be drafted, and the server, which takes ``in_flight``
        trees at once, has room for it.
        """
        begun = len(self.tokens) > self.num_given and len(self.tokens) >= self.server_length
        remembered = not self.request.params.speculative or not self.row_bytes or self.memory_end == len(self.tokens) - 1
        return self.opened and begun and remembered and self.finish_reason is None and len(self.unanswered) < in_flight

    def under_way(self) -> list[OfferedTree]:
        """What is left of the trees that wait for a result: those that what has come since leaves as they are, or cuts.

        The first of them is what the server verifies now; what comes of it may leave nothing of the others.
        """
        return [left for _, tree in self.unanswered if (left := self._left(tree)) is not None]

    def _left(self, tree: OfferedTree) -> OfferedTree | None:
        """As the server sees it: a tree moved to the text's end, or None if the text has left it."""
        left = graft(tree.tokens, tree.parents, self.tokens[tree.length :])
        return None if left is None else OfferedTree(len(self.tokens), left.tokens, left.parents)

    def verify(self, number: int, tree: OfferedTree) -> Verify:
        """The next step."""
        self.step += 1
        self.unanswered.append((self.step, tree))
        parents = b"" if tree.is_chain else pack_rows(tree.parents)
        return Verify(number, self.step, tree.length, pack_tokens(tree.tokens), parents)

    def refused(self, step: int) -> bool:
        """The server has not verified a tree, whose step is free again; False if that is known, as one before it was refused."""
        if step > self.step:
            return False
        if not any(step == each for each, _ in self.unanswered):
            raise SessionFault(f"step {step} is refused, and was answered before")
        while self.step >= step:  # what was sent after it comes out of order
            self.unanswered.pop()
            self.step -= 1
        return True


def _logprobs(told: tuple[Logprob, ...] | None) -> tuple[TokenLogprob, ...] | None:
    return None if told is None else tuple(TokenLogprob(each.token_id, each.logprob, each.top) for each in told)
