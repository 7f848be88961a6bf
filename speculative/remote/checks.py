"""What types cannot say of frames: numbers within limits, lists of whole numbers, parents that make a tree."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from speculative.errors import InvalidRequestError, ProtocolError
from speculative.remote.frames import (
    Cancel,
    ClientFrame,
    Closed,
    Error,
    Hello,
    Logprob,
    Memory,
    Open,
    Opened,
    Ping,
    Pong,
    Result,
    Resume,
    ServerFrame,
    Verify,
    Welcome,
)
from speculative.remote.limits import Limits
from speculative.remote.packing import row_array, token_array


def check_client(frame: ClientFrame, limits: Limits) -> None:
    """Raise ProtocolError where a decoded frame of an edge breaks ``limits`` or makes no sense in itself."""
    match frame:
        case Open():
            _session(frame, limits)
            _check_open(frame, limits)
        case Resume():
            _session(frame, limits)
            _at_most(frame, "length", frame.length, limits.max_model_len)
            _at_most(frame, "memory_from", frame.memory_from, frame.length)
        case Verify():
            _session(frame, limits)
            _check_verify(frame, limits)
        case Cancel():
            _session(frame, limits)
        case Hello() | Ping():
            pass


def check_server(frame: ServerFrame, limits: Limits) -> None:
    """Raise ProtocolError where a decoded frame of a server breaks ``limits`` or makes no sense in itself."""
    match frame:
        case Welcome():
            model = frame.model
            for name in ("max_model_len", "vocab_size"):
                if not getattr(model, name):
                    _refuse(frame, f"model.{name}", "must be at least 1, got 0")
            _tokens(frame, "model.eos_token_ids", model.eos_token_ids, model.vocab_size)
            _finite(frame, "limits.idle_seconds", [frame.limits.idle_seconds])
        case Opened():
            _session(frame, limits)
            _at_most(frame, "length", frame.length, limits.max_model_len)
            _at_most(frame, "num_cached", frame.num_cached, frame.length)
        case Memory():
            _session(frame, limits)
            _memory(frame, "rows", frame.first, frame.rows, frame.newest, limits)
        case Result():
            _session(frame, limits)
            _check_result(frame, limits)
        case Closed():
            _session(frame, limits)
        case Error():
            if frame.session is not None:
                _session(frame, limits)
        case Pong():
            pass


def _check_open(frame: Open, limits: Limits) -> None:
    prompt = _tokens(frame, "prompt", frame.prompt, limits.vocab_size)
    output = _tokens(frame, "output", frame.output, limits.vocab_size)
    _tokens(frame, "prediction", frame.prediction, limits.vocab_size)
    if not prompt:
        _refuse(frame, "prompt", "is empty: a text begins with at least one token")
    _at_most(frame, "memory_from", frame.memory_from, prompt + output)
    sampling = frame.sampling
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", (token for token, _ in sampling.logit_bias))):
        for token in ids:
            if token >= limits.vocab_size:
                _refuse(frame, f"sampling.{name}", f"token id {token} is outside the vocabulary of {limits.vocab_size}")
    try:
        sampling.params()
    except InvalidRequestError as error:
        raise ProtocolError("invalid_parameter", f"open.sampling: {error}", session=frame.session) from None


def _check_verify(frame: Verify, limits: Limits) -> None:
    count = _tokens(frame, "tokens", frame.tokens, limits.vocab_size)
    depth = count
    most, kind = limits.chain_nodes, "chain"
    if frame.parents:
        _whole(frame, "parents", frame.parents, 2)
        parents = row_array(frame.parents)
        if len(parents) != count:
            _refuse(frame, "parents", f"holds {len(parents)} rows for {count} tokens; leave it empty for a chain")
        wrong = np.flatnonzero(parents > np.arange(count))
        if len(wrong):
            node = int(wrong[0])
            _refuse(frame, "parents", f"node {node} has row {int(parents[node])} as parent: a parent's row is at most {node}")
        if (parents != np.arange(count)).any():
            most, kind = limits.tree_nodes, "tree"
    if count > most:
        name = f"{kind}_nodes"
        _refuse(frame, "tokens", f"a {kind} of {count} nodes, and at most {most} are verified ({name})", code="limit_exceeded")
    if kind == "tree":
        depths = [0]
        for parent in parents.tolist():  # no more than tree_nodes
            depths.append(depths[parent] + 1)
        depth = max(depths)
    if frame.length + depth > limits.max_model_len:
        last = frame.length + depth
        _refuse(
            frame, "length", f"the deepest node would be token {last} of a text of at most {limits.max_model_len}: draft less deep"
        )


def _check_result(frame: Result, limits: Limits) -> None:
    count = _tokens(frame, "tokens", frame.tokens, limits.vocab_size)
    _at_most(frame, "first", frame.first + count, limits.max_model_len, "the last token's number")
    _whole(frame, "accepted", frame.accepted, 2)
    rows = row_array(frame.accepted)
    if len(rows) > count:
        _refuse(frame, "accepted", f"holds {len(rows)} rows for {count} tokens")
    if len(rows) and (not rows[0] or (rows[1:] <= rows[:-1]).any()):
        _refuse(frame, "accepted", "is no path down a tree: rows begin at 1 and go up")
    if len(rows) and rows[-1] > max(limits.tree_nodes, limits.chain_nodes):
        _refuse(frame, "accepted", f"row {int(rows[-1])} is in no tree that could have been sent")
    _memory(frame, "memory", frame.memory_first, frame.memory, frame.newest, limits)
    if frame.logprobs is not None and len(frame.logprobs) != count:
        _refuse(frame, "logprobs", f"holds {len(frame.logprobs)} for {count} tokens")
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(frame, name, getattr(frame, name) or (), limits)
    _finite(frame, "stats.server_seconds", [frame.stats.server_seconds])


def _check_logprobs(frame: Result, name: str, logprobs: Iterable[Logprob], limits: Limits) -> None:
    for each in logprobs:
        for token, logprob in ((each.token_id, each.logprob), *each.top):
            if token >= limits.vocab_size:
                _refuse(frame, name, f"token id {token} is outside the vocabulary of {limits.vocab_size}")
            if math.isnan(logprob):
                _refuse(frame, name, "holds a log-probability that is no number")


def _session(frame: Open | Resume | Verify | Cancel | Opened | Memory | Result | Closed | Error, limits: Limits) -> None:
    if frame.session is not None and frame.session >= limits.sessions:
        name = type(frame).__name__.lower()
        message = f"is {frame.session}, and sessions have numbers below {limits.sessions}: close one and use its number again"
        raise ProtocolError("limit_exceeded", f"{name}.session: {message}")  # no error could speak of such a session


def _tokens(frame: ClientFrame | ServerFrame, field: str, data: bytes, vocab_size: int) -> int:
    """How many token ids a field holds."""
    _whole(frame, field, data, 4)
    ids = token_array(data)
    if len(ids) and (largest := int(ids.max())) >= vocab_size:
        _refuse(frame, field, f"token id {largest} is outside the vocabulary of {vocab_size}")
    return len(ids)


def _whole(frame: ClientFrame | ServerFrame, field: str, data: bytes, size: int) -> None:
    if len(data) % size:
        _refuse(frame, field, f"has {len(data)} bytes, no multiple of {size}")


def _memory(frame: Memory | Result, field: str, first: int, rows: bytes, newest: bytes, limits: Limits) -> None:
    if limits.row_bytes is not None:
        if len(rows) % limits.row_bytes if limits.row_bytes else rows:
            _refuse(frame, field, f"has {len(rows)} bytes, no multiple of a row's {limits.row_bytes}")
        if limits.row_bytes:
            _at_most(frame, field, first + len(rows) // limits.row_bytes, limits.max_model_len, "the last row's number")
    if limits.newest_bytes is not None and len(newest) not in (0, limits.newest_bytes):
        _refuse(frame, "newest", f"has {len(newest)} bytes instead of {limits.newest_bytes} or none")


def _at_most(frame: ClientFrame | ServerFrame, field: str, value: int, most: int, what: str = "it") -> None:
    if value > most:
        _refuse(frame, field, f"{what} is {value}, and at most {most} is possible here")


def _finite(frame: ClientFrame | ServerFrame, field: str, values: Iterable[float]) -> None:
    if not all(map(math.isfinite, values)):
        _refuse(frame, field, "is not finite")


def _refuse(frame: ClientFrame | ServerFrame, field: str, message: str, code: str = "invalid_field") -> NoReturn:
    name = type(frame).__name__.lower()
    step = frame.step if isinstance(frame, Verify) else None
    raise ProtocolError(code, f"{name}.{field}: {message}", session=getattr(frame, "session", None), step=step)
