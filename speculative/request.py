"""What goes into the engine and what comes out of it: plain frozen data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from speculative.config import MemoryFormat
from speculative.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
"""Most alternatives that are reported for a token."""

MAX_COUNT = 2**31 - 1
"""Of numbers of tokens that a request names: no vocabulary and no text has more, and operators and frames hold no larger ones."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must follow, in llguidance's words: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.

    A JSON schema, a regular expression for all of it, a grammar of Lark's or llama.cpp's (GBNF) language, or several of these as
    JSON, ``{"grammars": [{"lark_grammar": …}, {"name": …, "json_schema": …}]}``: the first is followed, and names the others.
    """

    kind: Literal["json_schema", "regex", "lark", "llguidance"]
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's next token is chosen, and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` None lets the engine draw one. ``stop``
    holds strings that end the text (and are not part of it), ``stop_token_ids`` tokens that do so besides the model's own; before
    ``min_tokens`` neither ends it. ``max_tokens`` None means as many as the context holds, 0 that only the prompt is read.
    ``speculative`` False decodes this request plainly.

    Penalties as OpenAI defines them: ``frequency_penalty`` for each time that a token stands in the output, ``presence_penalty``
    once; ``repetition_penalty`` as in transformers, for tokens of prompt and output. ``logit_bias`` pairs token ids with what is
    added to their logits. ``logprobs`` k reports each token's log-probability by the model, before any of this, and those of
    the k likeliest; ``prompt_logprobs`` the same of the prompt's tokens.

    Only texts that follow ``grammar`` are written, and where one is complete it ends, before ``min_tokens`` too.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    speculative: bool = True

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the parameter."""
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0", self.max_tokens)
        _check("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100", self.temperature)
        _check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1", self.top_p)
        _check("top_k", 0 <= self.top_k <= MAX_COUNT, f"between 0 (off) and {MAX_COUNT}", self.top_k)
        _check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1", self.min_p)
        _check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2", self.frequency_penalty)
        _check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2", self.presence_penalty)
        _check("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100", self.repetition_penalty)
        _check("logit_bias", all(-100 <= bias <= 100 for _, bias in self.logit_bias), "between -100 and 100", self.logit_bias)
        _check("stop", all(self.stop), "free of empty strings", self.stop)
        _check("min_tokens", 0 <= self.min_tokens <= MAX_COUNT, f"between 0 and {MAX_COUNT}", self.min_tokens)
        if self.max_tokens is not None:
            _check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens, {self.max_tokens}", self.min_tokens)
        _check("ignore_eos", not (self.ignore_eos and self.grammar), "false with a grammar, which ends its text", self.ignore_eos)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(name, count is None or 0 <= count <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}", count)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and no noise is drawn."""
        return self.temperature < 1e-5


def _check(name: str, ok: bool, allowed: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} must be {allowed}, got {value!r}", param=name)


@dataclass(frozen=True, slots=True)
class Request:
    """One text to continue; ``request_id`` is never used twice in an engine's life.

    Of waiting requests those with the lowest ``priority`` begin first, and among these the one that came first. ``prediction`` is
    what the caller expects to come, as far as that is known: it makes the answer come faster and no other. Only requests of equal
    ``cache_salt`` share what is cached of their prompts. The draft trees of a ``remote`` one come from outside (`OfferedTree`), and
    its text does not go on until one has come. Who drafts for it with the same drafter wants its ``memory`` in some format, from
    position ``memory_from`` on.

    ``output_token_ids`` were written elsewhere: they are taken as they are, behind the prompt, and count as output in all that
    looks at it (noise, penalties, grammar, limits). Whoever has ``text_length`` characters of their text is told the
    rest. Of a ``revisable`` one an output may take back what others before it have told (`Written`). The text of one that
    ``continues`` goes on in the middle of the prompt's, rather than begin behind it.

    For one that is not ``adaptive`` drafts are made even where the policy finds that they do not pay. Of several engines
    requests of one ``session`` are best given to the same.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    prediction: tuple[int, ...] = ()
    cache_salt: str = ""
    remote: bool = False
    memory: MemoryFormat | None = None
    memory_from: int = 0
    output_token_ids: tuple[int, ...] = ()
    text_length: int = 0
    revisable: bool = False
    continues: bool = False
    adaptive: bool = True
    session: str = ""

    @property
    def given_token_ids(self) -> tuple[int, ...]:
        """What is read before the first token is generated."""
        return (*self.prompt_token_ids, *self.output_token_ids)


@dataclass(frozen=True, slots=True)
class OfferedTree:
    """A draft tree from outside the engine, for a ``remote`` request whose text (prompt and output) has ``length`` tokens.

    The text's last token is the root, in row 0. Node j stands in row j + 1 and ``parents`` holds rows, each before its children's.
    Without nodes the text goes on by one token.
    """

    length: int
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == tuple(range(len(self.parents)))


@dataclass(frozen=True, slots=True)
class Memory:
    """A drafter's memory from position ``first`` on, and the newest (empty without an entry): see `remote.memory_codec`."""

    first: int
    rows: bytes
    newest: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability by the model, and the likeliest tokens there with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class EdgeStats:
    """What a text on an edge has cost its network so far: results of the server's, and bytes of their frames.

    ``num_calls_ahead`` of the calls were made before the one before them was answered: nobody waited a round trip for them.
    ``offline_tokens`` were written by the drafter alone; in the place of ``corrected_tokens`` of these the server has put others.
    """

    num_server_calls: int = 0
    num_calls_ahead: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    offline_tokens: int = 0
    corrected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request has cost and gained here so far.

    ``acceptance_histogram[k]`` counts verifications in which exactly k draft tokens were accepted. ``num_drafts`` counts the
    verifications that carried a draft; ``num_target_calls`` counts every target pass, prefill chunks included.
    ``num_draft_tokens`` are the tree nodes verified; accepted and rejected prediction tokens are those of the request's prediction
    that the answer has and has not, and reasoning tokens are counted by whoever tells thoughts from answers. Times are seconds of a
    monotonic clock; ``scheduled_time`` is when the request got a slot.
    ``edge`` is there where a server verifies what an edge drafts.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_target_calls: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0
    num_reasoning_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    arrival_time: float = 0.0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    edge: EdgeStats | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens gained per verification, the bonus token included; 1.0 where nothing was drafted."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0.0 where nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time since the first; 0.0 with fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None:
            return 0.0
        elapsed = self.last_token_time - self.first_token_time
        return (self.completion_tokens - 1) / elapsed if elapsed > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Written:
    """How an edge came by an output that no server has verified, or that takes back others which none had.

    ``offline``: its drafter wrote it alone. Else the output stands in the place of all output tokens from number ``first_token``
    on, and of all characters from ``first_character`` on: all that those tokens made certain, and maybe some before it.
    """

    offline: bool = True
    first_token: int = 0
    first_character: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's gain for one request; the last one carries ``finish_reason``.

    ``text_delta`` holds only text that no stop string can still take back, so it may lag behind ``new_token_ids``. ``logprobs``
    are of the new tokens, None unless asked for. The first output that is not memory alone carries ``prompt_logprobs`` if those
    were: of the prompt's second token to its last. Of the new tokens the first ``num_accepted`` are accepted draft tokens; one
    after them is the target's own.
    ``memory`` is what a remote request wants of it, of all tokens but the newest; while its prompt is read an output may hold
    that alone. ``batch_size`` requests shared its pass (0: not told, as this one is not remote).
    ``written`` is there where it is an edge's own, or a revision.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    text_delta: str
    finish_reason: FinishReason | None
    stats: RequestStats
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_accepted: int = 0
    memory: Memory | None = None
    written: Written | None = None
    batch_size: int = 0
