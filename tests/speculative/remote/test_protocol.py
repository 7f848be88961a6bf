"""Frames arrive as they were sent, within limits; whatever else arrives is one kind of error that says what is wrong."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.errors import EngineError, ProtocolError
from speculative.remote import frames as f
from speculative.remote.limits import Limits
from speculative.remote.packing import pack_rows, pack_tokens, unpack_rows, unpack_tokens
from speculative.remote.protocol import HEADER, agree, decode_client, decode_server, encode, frame_name
from speculative.request import Grammar, SamplingParams
from tests.speculative.remote.samples import CLIENT, LIMITS, SERVER, client_frames, sampling, server_frames

Decode = Callable[[bytes, Limits], Any]


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(HEADER, "little") + message


def written(*fields: Any) -> bytes:
    """A frame with fields as they stand in the array, right or wrong."""
    return framed(msgspec.msgpack.encode(fields))


def refused(decode: Decode, data: bytes, limits: Limits = LIMITS) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(data, limits)
    return caught.value


# There and back


@given(client_frames, st.sampled_from([0, 1, 64, 1000]))
def test_what_an_edge_says_arrives(frame: f.ClientFrame, padding: int) -> None:
    data = encode(frame, padding)
    assert decode_client(data, LIMITS) == frame
    assert padding < 2 or len(data) % padding == 0


@given(server_frames, st.sampled_from([0, 1, 64, 1000]))
def test_what_a_server_says_arrives(frame: f.ServerFrame, padding: int) -> None:
    data = encode(frame, padding)
    assert decode_server(data, LIMITS) == frame
    assert padding < 2 or len(data) % padding == 0


def test_there_is_a_sample_of_every_frame() -> None:
    assert {type(frame) for frame in CLIENT} == set(get_args(f.ClientFrame))
    assert {type(frame) for frame in SERVER} == set(get_args(f.ServerFrame))


def test_the_two_sides_cannot_be_taken_for_one_another() -> None:
    for frame in CLIENT:
        assert refused(decode_server, encode(frame)).code == "unknown_frame"
    for answer in SERVER:
        assert refused(decode_client, encode(answer)).code == "unknown_frame"


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**16 - 1)))
def test_lists_are_packed_and_unpacked(token_ids: list[int], rows: list[int]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids and len(pack_tokens(token_ids)) == 4 * len(token_ids)
    assert unpack_rows(pack_rows(rows)) == rows and len(pack_rows(rows)) == 2 * len(rows)


def test_numbers_that_do_not_fit_are_not_packed() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    for numbers in ([-1], [2**16]):
        with pytest.raises(OverflowError, match="between 0 and 65535"):
            pack_rows(numbers)
    with pytest.raises(OverflowError):
        pack_tokens([2**32])


@given(sampling)
def test_sampling_is_what_the_engine_would_have_been_told(sent: f.Sampling) -> None:
    params = sent.params()
    assert f.Sampling.of(params) == sent
    assert f.Sampling.of(params).params() == params


def test_no_sampling_parameter_is_left_behind() -> None:
    assert f.Sampling.__struct_fields__ == tuple(field.name for field in dataclasses.fields(SamplingParams))
    defaults = f.Sampling()
    assert defaults.params() == SamplingParams()
    grammar = Grammar("lark", 'root ::= "a"')
    assert f.Sampling.of(SamplingParams(grammar=grammar)).params().grammar == grammar


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(ProtocolError, match="open: cannot be written"):
        encode(f.Open(0, pack_tokens([1]), f.Sampling(stop=("\ud800",))))


# The format cannot change unnoticed

GOLDEN = {
    "hello": "1f0000009601920102a43966326392a4696e7438a862666c6f6174313640ce00100000",
    "open": (
        "840000009a0203c40c0100000002000000e7030000dc001207cb3fe0000000000000cb3ff000000000000000cb0000000000000000cb0000"
        "000000000000cb0000000000000000cb3ff0000000000000919205cbbff8000000000000ff91a10a90c20002c092a57265676578a2612bc3"
        "fea473616c74c4040400000001c408080000000900000005"
    ),
    "resume": "0a000000960303c4020102060509",
    "verify": "1b0000009604030104c40c0a0000000b0000000c000000c406000000000200",
    "cancel": "03000000920503",
    "ping": "070000009206ce00011170",
    "welcome": "2f000000951001a4696e743896ce0001000008141002cb403e00000000000096a474696e79cd0200cd03e8c404020000000a06",
    "opened": "13000000971103c40201020504d3800000000000000001",
    "memory": "2200000095120301c414303132333435363738396162636465666768696ac4066e6577657374",
    "result": (
        "a10000009e13030105c40c0b0000000c0000000d000000c4040200030004c41e303132333435363738393031323334353637383930313233"
        "343536373839c4066e6577657374a3c3a920a473746f7093930bcbbfe000000000000092920bcbbfe00000000000009204cbbff000000000"
        "0000930ccbbfd000000000000090930dcbfff000000000000090919302cbc0080000000000009095cb3fd000000000000004090102"
    ),
    "closed": "08000000931403a469646c65",
    "error": "2a0000009615aa6f7665726c6f61646564b9746f6f206d616e792074657874733a2074727920616761696ec30302",
    "pong": "070000009216ce00011170",
}


@pytest.mark.parametrize("frame", [*CLIENT, *SERVER], ids=lambda frame: frame_name(type(frame)))
def test_bytes_are_what_they_were(frame: f.ClientFrame | f.ServerFrame) -> None:
    assert encode(frame).hex() == GOLDEN[frame_name(type(frame))], "another format is another version"


# Limits at their edges


def chain(count: int, length: int = 1) -> f.Verify:
    return f.Verify(0, 1, length, pack_tokens([1] * count))


def bush(count: int, length: int = 1) -> f.Verify:
    return f.Verify(0, 1, length, pack_tokens([1] * count), pack_rows([0] * count))


def opening(**changes: Any) -> f.Open:
    return msgspec.structs.replace(f.Open(0, pack_tokens([1, 2]), f.Sampling()), **changes)


def result(**changes: Any) -> f.Result:
    return msgspec.structs.replace(f.Result(0, 1, 5, pack_tokens([1, 2])), **changes)


@pytest.mark.parametrize(
    ("fits", "does_not", "code", "says"),
    [
        (f.Cancel(15), f.Cancel(16), "limit_exceeded", "cancel.session: is 16, and sessions have numbers below 16"),
        (bush(8), bush(9), "limit_exceeded", "verify.tokens: a tree of 9 nodes, and at most 8 are verified"),
        (chain(20), chain(21), "limit_exceeded", "verify.tokens: a chain of 21 nodes, and at most 20 are verified"),
        (chain(9, 503), chain(9, 504), "invalid_field", "verify.length: the deepest node would be token 513"),
        (bush(8, 511), bush(8, 512), "invalid_field", "verify.length: the deepest node would be token 513"),
        (chain(0, 512), chain(0, 513), "invalid_field", "verify.length"),
        (chain(0, 1), chain(0, 0), "invalid_field", "verify.length: expected `int` >= 1"),
        (
            f.Verify(0, 1, 1, pack_tokens([999])),
            f.Verify(0, 1, 1, pack_tokens([1000])),
            "invalid_field",
            "verify.tokens: token id 1000 is outside the vocabulary of 1000",
        ),
        (
            f.Verify(7, 1, 1, pack_tokens([1, 1]), pack_rows([0, 1])),
            f.Verify(7, 1, 1, pack_tokens([1, 1]), pack_rows([0, 2])),
            "invalid_field",
            "verify.parents: node 1 has row 2 as parent",
        ),
        (opening(memory_from=2), opening(memory_from=3), "invalid_field", "open.memory_from: it is 3, and at most 2"),
        (opening(), opening(prompt=b""), "invalid_field", "open.prompt: is empty"),
        (opening(), opening(prompt=b"12345"), "invalid_field", "open.prompt: has 5 bytes, no multiple of 4"),
        (opening(), opening(output=pack_tokens([1000])), "invalid_field", "open.output: token id 1000"),
        (opening(), opening(prediction=pack_tokens([1000])), "invalid_field", "open.prediction: token id 1000"),
        (
            opening(sampling=f.Sampling(stop_token_ids=(999,))),
            opening(sampling=f.Sampling(stop_token_ids=(1000,))),
            "invalid_field",
            "open.sampling.stop_token_ids: token id 1000",
        ),
        (
            opening(sampling=f.Sampling(logit_bias=((999, 100.0),))),
            opening(sampling=f.Sampling(logit_bias=((1000, 1.0),))),
            "invalid_field",
            "open.sampling.logit_bias: token id 1000",
        ),
        (
            opening(sampling=f.Sampling(temperature=100.0)),
            opening(sampling=f.Sampling(temperature=100.1)),
            "invalid_parameter",
            "open.sampling: temperature must be between 0 and 100",
        ),
        (
            opening(sampling=f.Sampling(stop=("a",) * 16)),
            opening(sampling=f.Sampling(stop=("a",) * 17)),
            "invalid_field",
            "open.sampling.stop: expected `array` of length <= 16",
        ),
        (
            f.Resume(0, b"t", 512, 512, 0),
            f.Resume(0, b"t", 513, 0, 0),
            "invalid_field",
            "resume.length: it is 513, and at most 512",
        ),
        (
            f.Resume(0, b"t" * 64, 5, 5, 0),
            f.Resume(0, b"t", 5, 6, 0),
            "invalid_field",
            "resume.memory_from: it is 6, and at most 5",
        ),
        (
            f.Hello((1,), "", ("int8",)),
            f.Hello((), "", ("int8",)),
            "invalid_field",
            "hello.versions: expected `array` of length >= 1",
        ),
        (
            f.Hello((1,), "", ("int8",), 65536),
            f.Hello((1,), "", ("int8",), 65537),
            "invalid_field",
            "hello.padding: expected `int` <= 65536",
        ),
    ],
)
def test_an_edge_keeps_to_limits(fits: f.ClientFrame, does_not: f.ClientFrame, code: str, says: str) -> None:
    assert decode_client(encode(fits), LIMITS) == fits
    error = refused(decode_client, encode(does_not))
    assert error.code == code and says in str(error)


@pytest.mark.parametrize(
    ("fits", "does_not", "says"),
    [
        (result(first=510), result(first=511), "result.first: the last token's number is 513, and at most 512"),
        (result(accepted=pack_rows([1, 20])), result(accepted=pack_rows([1, 21])), "result.accepted: row 21 is in no tree"),
        (result(accepted=pack_rows([1, 2])), result(accepted=pack_rows([2, 2])), "result.accepted: is no path down a tree"),
        (result(accepted=pack_rows([1])), result(accepted=pack_rows([0])), "result.accepted: is no path down a tree"),
        (result(), result(accepted=pack_rows([1, 2, 3])), "result.accepted: holds 3 rows for 2 tokens"),
        (result(), result(accepted=b"1"), "result.accepted: has 1 bytes, no multiple of 2"),
        (result(memory=b"0123456789"), result(memory=b"012345678"), "result.memory: has 9 bytes, no multiple of a row's 10"),
        (result(newest=b"123456"), result(newest=b"12345"), "result.newest: has 5 bytes instead of 6 or none"),
        (result(logprobs=(f.Logprob(1, 0.0),) * 2), result(logprobs=(f.Logprob(1, 0.0),)), "result.logprobs: holds 1 for 2 tokens"),
        (result(), result(prompt_logprobs=(f.Logprob(1, float("nan")),)), "result.prompt_logprobs: holds a log-probability"),
        (result(), result(prompt_logprobs=(f.Logprob(1, 0.0, ((1000, 0.0),)),)), "result.prompt_logprobs: token id 1000"),
        (result(), result(stats=f.Stats(float("inf"))), "result.stats.server_seconds: is not finite"),
        (result(), result(stats=f.Stats(-1.0)), "result.stats.server_seconds: expected `float` >= 0.0"),
        (f.Memory(0, 511, b"0" * 10), f.Memory(0, 512, b"0" * 10), "memory.rows: the last row's number is 513"),
        (f.Opened(0, b"t", 512, 512, 0), f.Opened(0, b"t", 5, 6, 0), "opened.num_cached: it is 6, and at most 5"),
        (f.Error("new_code", "", session=15), f.Error("new_code", "", session=16), "error.session: is 16"),
        (SERVER[0], msgspec.structs.replace(SERVER[0], model=f.Model("", 0, 1, b"", 0, 0)), "welcome.model.max_model_len: must be"),
        (
            SERVER[0],
            msgspec.structs.replace(SERVER[0], model=f.Model("", 1, 2, pack_tokens([2]), 0, 0)),
            "welcome.model.eos_token_ids",
        ),
    ],
)
def test_a_server_keeps_to_limits(fits: f.ServerFrame, does_not: f.ServerFrame, says: str) -> None:
    assert decode_server(encode(fits), LIMITS) == fits
    assert says in str(refused(decode_server, encode(does_not)))


def test_a_frame_is_as_long_as_it_may_be_and_no_longer() -> None:
    data = encode(f.Cancel(1), padding=LIMITS.frame_bytes)
    assert len(data) == LIMITS.frame_bytes and decode_client(data, LIMITS) == f.Cancel(1)
    error = refused(decode_client, data, replace(LIMITS, frame_bytes=LIMITS.frame_bytes - 1))
    assert error.code == "frame_too_large" and "65536 bytes and at most 65535" in str(error)


def test_faults_of_one_session_name_it_and_others_name_none() -> None:
    assert refused(decode_client, encode(f.Verify(7, 1, 1, pack_tokens([1000])))).session == 7
    assert refused(decode_client, encode(opening(session=3, sampling=f.Sampling(top_p=0.0)))).session == 3
    assert refused(decode_client, written(5, "one")).session is None


def test_an_edge_takes_a_servers_limits_at_its_word_but_frames_as_it_said_itself() -> None:
    welcome = SERVER[0]
    assert isinstance(welcome, f.Welcome) and Limits.of(welcome, 2**17) == replace(LIMITS, frame_bytes=2**17)


def test_no_tree_has_more_nodes_than_rows_can_be_numbered() -> None:
    Limits(tree_nodes=2**16 - 1, chain_nodes=2**16 - 1)
    with pytest.raises(ValueError, match="1 to 65535 nodes, not 64 or, in a chain, 65536"):
        Limits(chain_nodes=2**16)


def test_version_and_format_are_agreed_on() -> None:
    hello = f.Hello((1, 2), "print", ("int2", "bfloat16", "int8"))
    assert agree(hello, "print") == (1, "bfloat16")
    for changes, fingerprint, code in (
        ({"versions": (2,)}, "print", "unsupported_version"),
        ({"formats": ("int2",)}, "print", "unsupported_format"),
        ({}, "another", "wrong_model"),
        ({"fingerprint": ""}, "", "wrong_model"),
    ):
        with pytest.raises(ProtocolError) as caught:
            agree(msgspec.structs.replace(hello, **changes), fingerprint)
        assert caught.value.code == code


def test_a_step_takes_few_bytes() -> None:
    tree = f.Verify(3, 120, 700, pack_tokens(range(9)), pack_rows([0, 0, 1, 1, 2, 3, 5, 6, 7]))
    answer = f.Result(3, 120, 700, pack_tokens(range(4)), pack_rows([1, 3, 6]), 699, bytes(800), stats=f.Stats(0.01, 4, 130))
    assert len(encode(tree)) == 69 and len(encode(answer)) == 800 + 64


def test_before_the_welcome_the_length_of_memory_is_open() -> None:
    memory = f.Memory(0, 0, b"123", b"12")
    assert decode_server(encode(memory), Limits()) == memory


# Messages name frame and field


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (b"", "malformed_frame", "a frame of 0 bytes is shorter than it says"),
        (b"\x05\0\0\0\x92", "malformed_frame", "shorter than it says"),
        (framed(b"\x92\x05\x01") + b"\0\1", "malformed_frame", "not padding"),
        (framed(b""), "malformed_frame", "no msgpack array"),
        (framed(b"\xc1"), "malformed_frame", "no msgpack array"),
        (written("cancel", 1), "malformed_frame", "no msgpack array that begins with its number"),
        (written(99, 1), "unknown_frame", "no frame has the number 99; this side sends 1 (hello), 2 (open)"),
        (written(5), "invalid_field", "cancel: expected `array` of at least length 2"),
        (written(5, 1, 1), "invalid_field", "cancel: expected `array` of at most length"),
        (written(5, 1.5), "invalid_field", "cancel.session: expected `int`"),
        (written(5, -1), "invalid_field", "cancel.session: expected `int` >= 0"),
        (written(5, 2**32), "invalid_field", "cancel.session"),
        (written(4, 1, 1, 1, "text"), "invalid_field", "verify.tokens: expected `bytes`, got `str`"),
        (written(2, 1, b"1234", [None, "warm"]), "invalid_field", "open.sampling.temperature: expected `float`, got `str`"),
        (written(2, 1, b"1234", []), "invalid_field", "open.prompt: token id"),
        (framed(b"\x92\x05\x01\x01"), "malformed_frame", "cancel: MessagePack data is malformed: trailing characters"),
        (framed(b"\x95\x02\x01\xc4\x04\0\0\0\0\x90\x00\xa1\xff"), "malformed_frame", "open"),
        (
            framed(b"\x9f\x01\x91\x01\xa0\x91\xa0\x00\xce\x00\x10\x00\x00" + b"\x91" * 9999),
            "malformed_frame",
            "hello: nested too deeply",
        ),
    ],
)
def test_messages_say_what_is_wrong_and_where(data: bytes, code: str, says: str) -> None:
    error = refused(decode_client, data)
    assert (error.code, says in str(error)) == (code, True), str(error)
    assert isinstance(error, EngineError)


def test_later_versions_may_add_to_the_first_frames_and_to_no_other() -> None:
    assert decode_client(written(1, [1, 2], "print", ["int8"], 0, 2**20, {"new": [1]}), LIMITS) == f.Hello(
        (1, 2), "print", ("int8",)
    )
    welcome = SERVER[0]
    more = [*msgspec.msgpack.decode(encode(welcome)[HEADER:]), "new"]
    assert decode_server(written(*more), LIMITS) == welcome
    assert refused(decode_server, written(22, 1, "new")).code == "invalid_field"


def test_long_values_are_not_quoted_in_full() -> None:
    for wrong in (f.Sampling(stop=("x" * 9999, "")), f.Sampling(grammar=f.GrammarPart("y" * 9999, ""))):  # type: ignore[arg-type]
        assert len(str(refused(decode_client, encode(opening(sampling=wrong))))) == ProtocolError.LONGEST


# Nothing a peer sends does harm


def harmless(data: bytes) -> None:
    for decode in (decode_client, decode_server):
        for limits in (LIMITS, Limits()):
            try:
                decode(data, limits)
            except ProtocolError as error:
                assert error.code in get_args(f.ErrorCode) and len(str(error)) <= ProtocolError.LONGEST


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=40)
)
ANYTHING = st.recursive(ATOMS, lambda some: st.lists(some, max_size=6) | st.dictionaries(st.text(max_size=3), some, max_size=3))


@settings(max_examples=400)
@given(st.binary(max_size=300))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    harmless(data)
    harmless(framed(data))


@settings(max_examples=400)
@given(st.sampled_from([*range(1, 7), *range(16, 23)]), st.lists(ANYTHING, max_size=14))
def test_random_fields_do_no_harm(tag: int, fields: list[Any]) -> None:
    harmless(written(tag, *fields))


@settings(max_examples=600)
@given(st.sampled_from([*CLIENT, *SERVER]), st.data())
def test_mutated_frames_do_no_harm(frame: f.ClientFrame | f.ServerFrame, data: st.DataObject) -> None:
    message = bytearray(encode(frame)[HEADER:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message)))
        match data.draw(st.sampled_from(["put", "insert", "cut", "drop", "repeat"])):
            case "put":
                message[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "insert":
                message[at:at] = data.draw(
                    st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc0", b"\x91" * 3000])
                )
            case "cut":
                del message[at:]
            case "drop":
                del message[at : at + data.draw(st.integers(1, 9))]
            case "repeat":
                message[at:at] = message[at : at + 9]
    harmless(framed(bytes(message)))


@pytest.mark.parametrize("tag", [*range(1, 7), *range(16, 23)])
@pytest.mark.parametrize(
    "huge", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
@pytest.mark.parametrize("before", range(5))
def test_declared_lengths_take_no_memory(tag: int, huge: bytes, before: int) -> None:
    tracemalloc.start()
    harmless(framed(bytes([0x9F, tag]) + b"\x01" * before + huge))
    harmless(framed(b"\xdd\xff\xff\xff\xff" + bytes([tag]) + b"\x01" * before + huge))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_a_full_frame_takes_memory_in_proportion() -> None:
    """The costliest fields are small numbers and empty arrays, a byte each."""
    size = 2**20 - 64
    for costly in (b"\x90", b"\x00", b"\xa0", b"\x93\x00\x00\x90"):
        items = size // len(costly)
        message = b"\x9e\x13\0\0\0\xc4\0\xc4\0\0\xc4\0\xc4\0\xa0\xc0\xc0\xdd" + items.to_bytes(4, "big") + costly * items + b"\x90"
        tracemalloc.start()
        harmless(framed(message))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 200 * 2**20


def test_a_fault_in_the_middle_is_found_without_looking_at_all_pairs() -> None:
    nodes = 2**16 - 1
    limits = Limits(frame_bytes=2**20, tree_nodes=nodes, chain_nodes=nodes, max_model_len=2**17)
    deep = f.Verify(0, 1, 1, pack_tokens([1] * nodes), pack_rows([max(0, node - 1) for node in range(nodes)]))
    assert decode_client(encode(deep), limits) == deep
