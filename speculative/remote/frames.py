"""What edge and server say to each other: one class a frame. docs/protocol.md tells when, and what follows.

A *session* is one text being generated, numbered by the edge within its connection. *Positions* count the text's tokens from 0, the
prompt's first. Token ids and rows of trees are packed (see `packing`), memory is what `memory_codec` writes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from speculative.remote.packing import MOST_ROWS
from speculative.request import FinishReason, Grammar, SamplingParams

Unsigned = Annotated[int, Meta(ge=0, lt=2**32)]
Signed64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Name64 = Annotated[str, Meta(max_length=64)]
ResumeToken = Annotated[bytes, Meta(min_length=1, max_length=64)]
Nodes = Annotated[int, Meta(ge=1, le=MOST_ROWS)]
FrameBytes = Annotated[int, Meta(ge=2**16, lt=2**32)]
"""Each side takes frames of 64 KiB at least."""
Padding = Annotated[int, Meta(ge=0, le=65536)]

ErrorCode = Literal[
    "malformed_frame",
    "frame_too_large",
    "unknown_frame",
    "invalid_field",
    "limit_exceeded",
    "invalid_parameter",
    "unsupported_version",
    "unsupported_format",
    "wrong_model",
    "context_length",
    "unknown_session",
    "session_in_use",
    "cannot_resume",
    "out_of_order",
    "overloaded",
    "not_ready",
    "engine_failed",
]
"""What a server of this version says; a client takes any other for an error without special treatment."""


class Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a frame."""


class GrammarPart(Part, frozen=True):
    """As in `speculative.request`."""

    kind: Literal["json_schema", "regex", "lark", "llguidance"]
    source: str


class Sampling(Part, frozen=True):
    """`speculative.request.SamplingParams`, field by field."""

    max_tokens: Unsigned | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Unsigned = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[tuple[tuple[Unsigned, float], ...], Meta(max_length=1024)] = ()
    seed: Signed64 | None = None
    stop: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[Unsigned, ...], Meta(max_length=128)] = ()
    ignore_eos: bool = False
    min_tokens: Unsigned = 0
    logprobs: Unsigned | None = None
    prompt_logprobs: Unsigned | None = None
    grammar: GrammarPart | None = None
    speculative: bool = True

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """What travels of ``params``."""
        values = {name: getattr(params, name) for name in cls.__struct_fields__}
        grammar = params.grammar
        return cls(**{**values, "grammar": None if grammar is None else GrammarPart(grammar.kind, grammar.source)})

    def params(self) -> SamplingParams:
        """What the engine is told; raises InvalidRequestError for values outside their range."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        grammar = self.grammar
        return SamplingParams(**{**values, "grammar": None if grammar is None else Grammar(grammar.kind, grammar.source)})


class ServerLimits(Part, frozen=True):
    """What a server takes: see `protocol.Limits`; an ended or idle session is forgotten after ``idle_seconds``."""

    frame_bytes: FrameBytes
    tree_nodes: Nodes
    chain_nodes: Nodes
    sessions: Unsigned
    in_flight: Unsigned
    idle_seconds: Annotated[float, Meta(ge=0)]


class Model(Part, frozen=True):
    """What an edge needs to know of the model and of the memory that it will be sent.

    ``eos_token_ids`` are packed. ``row_bytes`` of memory come for each verified token, and ``newest_bytes`` for the last one (0
    for a drafter without an entry), in the agreed format.
    """

    name: Name
    max_model_len: Unsigned
    vocab_size: Unsigned
    eos_token_ids: bytes
    row_bytes: Unsigned
    newest_bytes: Unsigned


class Logprob(Part, frozen=True):
    """As TokenLogprob in `speculative.request`."""

    token_id: Unsigned
    logprob: float
    top: Annotated[tuple[tuple[Unsigned, float], ...], Meta(max_length=20)] = ()


class Stats(Part, frozen=True):
    """What an edge cannot know by itself.

    ``server_seconds`` went by at the server from the frame that this answers to this one, so the rest of what the edge waited is
    the network's; ``batch_size`` sequences shared the target's pass. The others count from the session's beginning, as
    RequestStats do.
    """

    server_seconds: Annotated[float, Meta(ge=0)] = 0.0
    batch_size: Unsigned = 0
    num_target_calls: Unsigned = 0
    num_accepted_prediction_tokens: Unsigned = 0
    num_rejected_prediction_tokens: Unsigned = 0


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """The edge's first frame. Later versions may add fields behind these, which are passed over, as are unknown formats.

    ``fingerprint`` names target and drafter (ModelInfo.pair). ``formats`` of memory stand in order of preference. Frames to
    the edge are to be padded to multiples of ``padding`` bytes (0: not at all) and have at most ``frame_bytes``.
    """

    versions: Annotated[tuple[Unsigned, ...], Meta(min_length=1, max_length=16)]
    fingerprint: Name
    formats: Annotated[tuple[Name64, ...], Meta(min_length=1, max_length=16)]
    padding: Padding = 0
    frame_bytes: FrameBytes = 2**20


class Open(Part, frozen=True, tag=2):
    """Begin a text.

    Behind the ``prompt`` stands ``output``, tokens that are taken as they are and count as output: what an edge wrote alone, or
    has of a session that cannot be resumed. Of its text the edge has ``text_length`` characters. Memory is wanted from position
    ``memory_from`` on. The rest is as in `speculative.request.Request`.
    """

    session: Unsigned
    prompt: bytes
    sampling: Sampling
    priority: Signed64 = 0
    cache_salt: str = ""
    prediction: bytes = b""
    memory_from: Unsigned = 0
    output: bytes = b""
    text_length: Unsigned = 0


class Resume(Part, frozen=True, tag=3):
    """Go on with a session of a lost connection, under a number of this one.

    The edge has the text's first ``length`` tokens, ``text_length`` characters of its output, and memory up to position
    ``memory_from``.
    """

    session: Unsigned
    resume_token: ResumeToken
    length: Unsigned
    memory_from: Unsigned
    text_length: Unsigned


class Verify(Part, frozen=True, tag=4):
    """A tree of drafted tokens that hangs at the text's first ``length`` tokens: its root is the last of these.

    ``parents`` holds a row for each of ``tokens``, 0 the root's, j + 1 node j's, a parent's below its children's
    (`tree.DraftTree`); where it is empty the tokens are a chain. ``step`` counts a session's trees from 1.
    """

    session: Unsigned
    step: Annotated[int, Meta(ge=1, lt=2**32)]
    length: Annotated[int, Meta(ge=1, lt=2**32)]
    tokens: bytes = b""
    parents: bytes = b""


class Cancel(Part, frozen=True, tag=5):
    """The edge is done with a session, whether it has ended or not."""

    session: Unsigned


class Ping(Part, frozen=True, tag=6):
    """Asks for a Pong of the same number."""

    number: Unsigned


class Pong(Part, frozen=True, tag=22):
    """The answer to Ping."""

    number: Unsigned


class Welcome(Struct, frozen=True, array_like=True, tag=16):
    """The answer to Hello. Later versions may add fields behind these, which are passed over."""

    version: Unsigned
    format: Name64
    limits: ServerLimits
    model: Model


class Opened(Part, frozen=True, tag=17):
    """A session has begun, or goes on: its text has ``length`` tokens, of which the first ``num_cached`` were known to the server.

    ``step`` is the last tree that was verified; 0 for none. ``seed`` is the one asked for, or drawn: by it a drafter adds the
    target's own noise.
    """

    session: Unsigned
    resume_token: ResumeToken
    length: Unsigned
    num_cached: Unsigned
    seed: Signed64
    step: Unsigned = 0


class Memory(Part, frozen=True, tag=18):
    """Memory of the tokens from position ``first`` on; ``newest``, of the last of these, comes with the last chunk."""

    session: Unsigned
    first: Unsigned
    rows: bytes
    newest: bytes = b""


class Result(Part, frozen=True, tag=19):
    """What was gained by a step; the first, 0, is reading the prompt.

    ``tokens`` stand in the text from position ``first`` on; the first of them are those of the tree's rows in ``accepted``.
    ``memory`` begins at position ``memory_first``. The rest is as in `speculative.request.RequestOutput`; ``finish_reason`` ends
    the text.
    """

    session: Unsigned
    step: Unsigned
    first: Unsigned
    tokens: bytes
    accepted: bytes = b""
    memory_first: Unsigned = 0
    memory: bytes = b""
    newest: bytes = b""
    text_delta: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob, ...] | None = None
    stats: Stats = Stats()


class Closed(Part, frozen=True, tag=20):
    """The server has forgotten a session, whose number is free again; "moved": it was resumed on another connection."""

    session: Unsigned
    reason: Literal["finished", "cancelled", "idle", "moved", "shutdown"]


class Error(Part, frozen=True, tag=21):
    """Something cannot be done. With a ``session`` the fault is that session's alone; without, the connection is closed after it.

    ``step``: of the tree that was refused and is not verified, while the session goes on. ``retryable``: trying again later can
    help.
    """

    code: Name64
    message: Annotated[str, Meta(max_length=4096)]
    retryable: bool = False
    session: Unsigned | None = None
    step: Unsigned | None = None


ClientFrame = Hello | Open | Resume | Verify | Cancel | Ping
ServerFrame = Welcome | Opened | Memory | Result | Closed | Error | Pong

PARTS: dict[tuple[type[Struct], str], type[Part]] = {
    (Open, "sampling"): Sampling,
    (Welcome, "limits"): ServerLimits,
    (Welcome, "model"): Model,
    (Result, "stats"): Stats,
}
"""Fields that have fields of their own."""
