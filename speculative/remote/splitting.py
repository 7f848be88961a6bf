"""Frames that are too long for their peer, as two that say the same."""

from __future__ import annotations

from msgspec.structs import replace

from speculative.remote.frames import Memory, Result, ServerFrame

_TOKEN_BYTES = 4


def split(frame: ServerFrame, row_bytes: int) -> tuple[ServerFrame, ServerFrame] | None:
    """Two shorter frames that together say what ``frame`` does, in order; None where nothing more can be taken apart.

    Memory goes ahead of a result, then log-probabilities of the prompt. Of tokens and text the first half goes ahead as a result of
    the step before, which has been answered already; which rows were accepted is then not told.
    """
    if isinstance(frame, Memory):
        return _split_memory(frame, row_bytes)
    if not isinstance(frame, Result):
        return None
    if frame.memory or frame.newest:
        ahead = Memory(frame.session, frame.memory_first, frame.memory, frame.newest)
        return ahead, replace(frame, memory_first=0, memory=b"", newest=b"")
    if frame.prompt_logprobs:
        half = -(-len(frame.prompt_logprobs) // 2)
        of_prompt = Result(frame.session, frame.step, frame.first, b"", prompt_logprobs=frame.prompt_logprobs[:half])
        return of_prompt, replace(frame, prompt_logprobs=frame.prompt_logprobs[half:] or None)
    return _split_text(frame)


def _split_memory(frame: Memory, row_bytes: int) -> tuple[Memory, Memory] | None:
    count = len(frame.rows) // row_bytes if row_bytes else 0
    if count > 1:
        half = count // 2
        return (
            Memory(frame.session, frame.first, frame.rows[: half * row_bytes]),
            Memory(frame.session, frame.first + half, frame.rows[half * row_bytes :], frame.newest),
        )
    if count and frame.newest:
        return Memory(frame.session, frame.first, frame.rows), Memory(frame.session, frame.first + 1, b"", frame.newest)
    return None


def _split_text(frame: Result) -> tuple[Result, Result] | None:
    count, characters = len(frame.tokens) // _TOKEN_BYTES, len(frame.text_delta)
    tokens, text = count // 2, characters // 2
    if not tokens and not text:
        return None
    ahead = Result(
        frame.session,
        max(0, frame.step - 1),
        frame.first,
        frame.tokens[: tokens * _TOKEN_BYTES],
        text_delta=frame.text_delta[:text],
        logprobs=None if frame.logprobs is None else frame.logprobs[:tokens],
        stats=frame.stats,
    )
    rest = replace(
        frame,
        first=frame.first + tokens,
        tokens=frame.tokens[tokens * _TOKEN_BYTES :],
        accepted=b"",
        text_delta=frame.text_delta[text:],
        logprobs=None if frame.logprobs is None else frame.logprobs[tokens:],
    )
    return ahead, rest
