"""Streams as servers send them, in pieces as networks cut them."""

from __future__ import annotations

import pytest

from benchmarks.serving.events import EventReader
from tests.benchmarks.serving.scripted import event, said, told

STREAM = said("Two") + said(" tables") + said("") + said(".", "stop") + told(5, cached=3)


def read(*pieces: tuple[float, bytes]) -> EventReader:
    reader = EventReader()
    for now, data in pieces:
        reader.feed(now, data)
    return reader


def test_texts_are_stamped_when_they_came_and_empty_ones_are_none() -> None:
    reader = read((1.0, said("")), (2.0, said("Two")), (2.5, said(" tables")), (2.75, said("")), (4.0, said(".", "stop") + told(5)))
    assert reader.end() is None
    assert (reader.first, reader.last, reader.gaps) == (2.0, 4.0, [0.5, 1.5])
    assert reader.usage is not None and (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (7, 5)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize("breaks", [b"\n", b"\r\n"])
def test_pieces_make_no_difference_but_to_when_an_event_is_whole(size: int, breaks: bytes) -> None:
    stream = STREAM.replace(b"\n", breaks)
    reader = read(*((float(place), stream[place : place + size]) for place in range(0, len(stream), size)))
    whole = read((0.0, STREAM))
    assert reader.end() is None and whole.end() is None
    assert reader.text == whole.text and len(reader.gaps) == len(whole.gaps) == 2
    assert reader.usage == whole.usage and reader.usage is not None and reader.usage.cached_tokens == 3
    first_line_ends = stream.index(b"\n")
    assert reader.first == first_line_ends // size * size


def test_an_answer_without_text_has_an_end() -> None:
    reader = read((3.0, said("", "stop")), (4.0, told(1)))
    assert reader.end() is None and (reader.first, reader.last) == (None, 3.0)


def test_chats_speak_by_content_reasoning_and_calls() -> None:
    def delta(**content: object) -> bytes:
        return event(choices=[{"index": 0, "delta": content, "finish_reason": None}], usage=None)

    calls = [{"index": 0, "function": {"name": "book"}}]
    parts = [delta(role="assistant", content=""), delta(reasoning_content="Hm"), delta(content="Yes"), delta(tool_calls=calls)]
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]) + told(3)
    reader = read(*((float(number), part) for number, part in enumerate(parts)), (9.0, end))
    assert reader.end() is None
    assert (reader.first, reader.gaps, reader.last) == (1.0, [1.0, 1.0], 9.0)


def test_what_speculation_gained_is_read_where_it_is_told() -> None:
    metrics = {"speculative_decoding": {"num_spec_steps": 4, "num_accepted_draft_tokens": 9, "num_target_calls": 6, "more": [1]}}
    last = event(choices=[{"index": 0, "text": ".", "finish_reason": "stop"}], metrics=metrics)
    reader = read((0.0, last + told(13)))
    assert reader.end() is None and reader.speculation is not None
    found = reader.speculation
    assert (found.num_spec_steps, found.num_accepted_draft_tokens, found.num_target_calls) == (4, 9, 6)


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (said("Two"), "broke off"),
        (b"", "no stream of events"),
        (b'{"choices": []}', "no stream of events"),
        (said("Two", "stop") + b"data: [DONE]\n\n", "include_usage"),
        (said("Two") + event(error={"message": "the engine failed"}) + b"data: [DONE]\n\n", "the engine failed"),
        (said("Two") + b"data: {oops\n\n", "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(stream: bytes, problem: str) -> None:
    assert problem in str(read((0.0, stream)).end())
