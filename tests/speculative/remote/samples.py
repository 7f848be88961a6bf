"""Frames for tests: one of each kind, and strategies that draw any."""

from __future__ import annotations

from hypothesis import strategies as st

from speculative.remote import frames as f
from speculative.remote.limits import Limits
from speculative.remote.packing import pack_rows, pack_tokens
from speculative.request import MAX_COUNT

LIMITS = Limits(
    frame_bytes=2**16,
    tree_nodes=8,
    chain_nodes=20,
    sessions=16,
    in_flight=2,
    vocab_size=1000,
    max_model_len=512,
    row_bytes=10,
    newest_bytes=6,
)

CLIENT: list[f.ClientFrame] = [
    f.Hello((1, 2), "9f2c", ("int8", "bfloat16"), 64),
    f.Open(
        3,
        pack_tokens([1, 2, 999]),
        f.Sampling(
            max_tokens=7,
            temperature=0.5,
            seed=-1,
            stop=("\n",),
            logprobs=2,
            logit_bias=((5, -1.5),),
            grammar=f.GrammarPart("regex", "a+"),
        ),
        priority=-2,
        cache_salt="salt",
        prediction=pack_tokens([4]),
        memory_from=1,
        output=pack_tokens([8, 9]),
        text_length=5,
    ),
    f.Resume(3, b"\x01\x02", 6, 5, 9),
    f.Verify(3, 1, 4, pack_tokens([10, 11, 12]), pack_rows([0, 0, 2])),
    f.Cancel(3),
    f.Ping(70000),
]
SERVER: list[f.ServerFrame] = [
    f.Welcome(1, "int8", LIMITS.told(30.0), f.Model("tiny", 512, 1000, pack_tokens([2]), 10, 6)),
    f.Opened(3, b"\x01\x02", 5, 4, -(2**63), 1),
    f.Memory(3, 1, b"0123456789abcdefghij", b"newest"),
    f.Result(
        3,
        1,
        5,
        pack_tokens([11, 12, 13]),
        pack_rows([2, 3]),
        4,
        b"0123456789" * 3,
        b"newest",
        "é ",
        "stop",
        (f.Logprob(11, -0.5, ((11, -0.5), (4, -1.0))), f.Logprob(12, -0.25), f.Logprob(13, float("-inf"))),
        (f.Logprob(2, -3.0),),
        f.Stats(0.25, 4, 9, 1, 2),
    ),
    f.Closed(3, "idle"),
    f.Error("overloaded", "too many texts: try again", True, 3, 2),
    f.Pong(70000),
]

session = st.integers(0, LIMITS.sessions - 1)
unsigned = st.integers(0, 2**32 - 1)
nodes = st.integers(1, 2**16 - 1)
text = st.text(max_size=20)
token = st.integers(0, LIMITS.vocab_size - 1)
logprob = st.floats(max_value=0, allow_nan=False)


def tokens(least: int = 0, most: int = 10) -> st.SearchStrategy[bytes]:
    return st.lists(token, min_size=least, max_size=most).map(pack_tokens)


grammar = st.builds(f.GrammarPart, st.sampled_from(["json_schema", "regex", "lark", "llguidance"]), text)
sampling = st.builds(
    f.Sampling,
    max_tokens=st.none() | st.integers(100, 2**32 - 1),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, MAX_COUNT),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    logit_bias=st.lists(st.tuples(token, st.floats(-100, 100)), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=16).map(tuple),
    stop_token_ids=st.lists(token, max_size=3).map(tuple),
    min_tokens=st.integers(0, 100),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | grammar,
    speculative=st.booleans(),
)


@st.composite
def open_frames(draw: st.DrawFn) -> f.Open:
    prompt, output = draw(tokens(1)), draw(tokens())
    memory_from = draw(st.integers(0, (len(prompt) + len(output)) // 4))
    priority = draw(st.integers(-(2**63), 2**63 - 1))
    return f.Open(draw(session), prompt, draw(sampling), priority, draw(text), draw(tokens()), memory_from, output, draw(unsigned))


@st.composite
def verify_frames(draw: st.DrawFn) -> f.Verify:
    parents: list[int] = []
    for node in range(draw(st.integers(0, LIMITS.tree_nodes))):
        parents.append(draw(st.integers(0, node)))
    carried = [draw(token) for _ in parents]
    chain = draw(st.booleans())
    length = draw(st.integers(1, LIMITS.max_model_len - LIMITS.tree_nodes))
    step = draw(st.integers(1, 2**32 - 1))
    return f.Verify(draw(session), step, length, pack_tokens(carried), b"" if chain else pack_rows(parents))


@st.composite
def result_frames(draw: st.DrawFn) -> f.Result:
    new = draw(st.lists(token, max_size=10))
    accepted = sorted(draw(st.sets(st.integers(1, LIMITS.tree_nodes), max_size=len(new))))
    logprobs = st.builds(f.Logprob, token, logprob, st.lists(st.tuples(token, logprob), max_size=20).map(tuple))
    told = draw(st.none() | st.lists(logprobs, min_size=len(new), max_size=len(new)).map(tuple))
    seconds = st.floats(0, allow_infinity=False)
    return f.Result(
        draw(session),
        draw(unsigned),
        draw(st.integers(0, LIMITS.max_model_len - len(new))),
        pack_tokens(new),
        pack_rows(accepted),
        draw(st.integers(0, 100)),
        draw(st.binary(max_size=1).map(lambda byte: byte * 30)),
        draw(st.sampled_from([b"", b"newest"])),
        draw(text),
        draw(st.sampled_from([None, "stop", "length", "abort", "error"])),
        told,
        draw(st.none() | st.lists(logprobs, max_size=4).map(tuple)),
        draw(st.builds(f.Stats, seconds, unsigned, unsigned, unsigned, unsigned)),
    )


client_frames: st.SearchStrategy[f.ClientFrame] = st.one_of(
    st.builds(
        f.Hello,
        st.lists(unsigned, min_size=1, max_size=16).map(tuple),
        text,
        st.lists(text, min_size=1, max_size=16).map(tuple),
        st.integers(0, 65536),
        st.integers(2**16, 2**32 - 1),
    ),
    open_frames(),
    st.integers(0, LIMITS.max_model_len).flatmap(
        lambda length: st.builds(
            f.Resume, session, st.binary(min_size=1, max_size=64), st.just(length), st.integers(0, length), unsigned
        )
    ),
    verify_frames(),
    st.builds(f.Cancel, session),
    st.builds(f.Ping, unsigned),
)
server_frames: st.SearchStrategy[f.ServerFrame] = st.one_of(
    st.builds(
        f.Welcome,
        unsigned,
        text,
        st.builds(
            f.ServerLimits, st.integers(2**16, 2**32 - 1), nodes, nodes, unsigned, unsigned, st.floats(0, allow_infinity=False)
        ),
        st.builds(f.Model, text, st.integers(1, 2**32 - 1), st.integers(1000, 2**32 - 1), tokens(), unsigned, unsigned),
    ),
    st.integers(0, LIMITS.max_model_len).flatmap(
        lambda length: st.builds(
            f.Opened,
            session,
            st.binary(min_size=1, max_size=64),
            st.just(length),
            st.integers(0, length),
            st.integers(-(2**63), 2**63 - 1),
            unsigned,
        )
    ),
    st.builds(f.Memory, session, st.integers(0, 500), st.sampled_from([b"", b"0123456789"]), st.sampled_from([b"", b"newest"])),
    result_frames(),
    st.builds(f.Closed, session, st.sampled_from(["finished", "cancelled", "idle", "moved", "shutdown"])),
    st.builds(f.Error, text, text, st.booleans(), st.none() | session, st.none() | unsigned),
    st.builds(f.Pong, unsigned),
)
