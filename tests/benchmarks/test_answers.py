"""What counts as right: calls and numbers are read out of answers, not compared as text."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import cli
from benchmarks.answers import NUMBERS, REPLIES, TOOL_CALLS, Question, answer, is_right, read_questions, said_calls, said_number
from benchmarks.prompts import PromptError
from models.loader import BUNDLED, load_tokenizer
from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.loading import load_engine
from speculative.request import Request, RequestOutput

CALL = '<tool_call>\n{"name": "Book", "arguments": {"day": "Friday", "seats": 2}}\n</tool_call>'


def test_calls_are_compared_as_what_they_mean():
    question = Question(TOOL_CALLS, (1,), [("Book", {"seats": 2, "day": "Friday"})])
    assert is_right(question, CALL)
    assert not is_right(question, CALL.replace("2", "3"))
    assert not is_right(question, CALL.replace("Book", "Buy"))
    assert not is_right(question, "Shall I book?")
    assert not is_right(question, CALL + CALL), "one was asked for"
    assert said_calls(CALL.replace('"seats": 2', '"seats": ')) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6*7 = 42\nThe answer is 42.", 42),
        ("The answer is 3. No. The answer is $1,250.50.", 1250.5),
        ("The answer is -4.", -4),
        ("It is 42.", None),
    ],
)
def test_numbers_are_the_last_one_said(text: str, number: float | None):
    assert said_number(text) == number
    assert is_right(Question(NUMBERS, (1,), 42.0), text) == (number == 42)


def test_replies_are_the_same_text():
    assert is_right(Question(REPLIES, (1,), "Hello."), "Hello.\n")
    assert not is_right(Question(REPLIES, (1,), "Hello."), "Hello!")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_a_file_gives_questions_of_each_kind(tmp_path: Path):
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    calls = [{"id": "1", "type": "function", "function": {"name": "Book", "arguments": '{"day": "Friday"}'}}]
    rows = [
        {"source": "sgd", "messages": [said("user", "Book."), said("assistant", None, tool_calls=calls), said("user", "Thanks.")]},
        {"source": "gsm8k", "messages": [said("user", "1+1?"), said("assistant", "The answer is 2.")]},
        {"source": "small-talk", "messages": [said("user", "Hi."), said("assistant", "Hello.")]},
        {"source": "python", "messages": [said("user", "Code?"), said("assistant", "No.")]},
    ]
    path = write(tmp_path / "chats.jsonl", rows * 3)
    questions = read_questions(path, tokenizer, count=2, max_tokens=100, seed=0)
    assert {kind: len(each) for kind, each in questions.items()} == {TOOL_CALLS: 2, NUMBERS: 2, REPLIES: 2}
    assert questions[TOOL_CALLS][0].expected == [("Book", {"day": "Friday"})]
    prompt = tokenizer.decode(list(questions[TOOL_CALLS][0].token_ids))
    assert "Book." in prompt and "Friday" not in prompt and prompt.endswith("<|im_start|>assistant\n")
    with pytest.raises(PromptError, match="holds no tool call"):
        read_questions(write(tmp_path / "none.jsonl", rows[3:]), tokenizer, count=2, max_tokens=100, seed=0)
    with pytest.raises(PromptError, match="line 1: not a dialogue"):
        read_questions(write(tmp_path / "bad.jsonl", [{"turns": ["x"]}]), tokenizer, count=2, max_tokens=100, seed=0)


@pytest.mark.integration
def test_answers_are_the_engines_own(tmp_path: Path):
    engine = load_engine(EngineConfig(compile="off", dtype="float32", max_num_seqs=2))
    assert engine.tokenizer is not None
    rows = [
        {"source": "small-talk", "messages": [said("user", text), said("assistant", "x")]}
        for text in ("Hi.", "Who are you?", "Bye.")
    ]
    asked = read_questions(write(tmp_path / "chats.jsonl", rows), engine.tokenizer, count=3, max_tokens=100, seed=0)[REPLIES]
    finished: list[int] = []
    texts = list(answer(engine, asked, 100, lambda: finished.append(1)))
    assert len(finished) == 3 and all(text and "<|im_end|>" not in text for text in texts)
    assert [is_right(Question(REPLIES, q.token_ids, text), text) for q, text in zip(asked, texts, strict=True)] == [True] * 3
    assert texts == [text for question in asked for text in answer(engine, [question], 100, lambda: None)]


@pytest.mark.integration
def test_an_interrupt_leaves_figures_of_the_questions_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first text is the longest: those beside it that end before do not count without it, as only short ones would."""
    step, ended = Engine.step, list[str]()

    def interrupted(engine: Engine) -> list[RequestOutput]:
        if ended[-1:] == [last]:
            raise KeyboardInterrupt
        outputs = step(engine)
        ended.extend(each.request_id for each in outputs if each.finish_reason is not None and each.request_id.isdigit())
        return outputs

    monkeypatch.setattr(Engine, "step", interrupted)
    lengths = iter([40, 2, 2, 40])
    monkeypatch.setattr(Engine, "add", lambda engine, asked: add(engine, asked, lengths))
    rows = [{"source": "small-talk", "messages": [said("user", f"Number {n}."), said("assistant", "x")]} for n in range(4)]
    path, result = write(tmp_path / "chats.jsonl", rows), tmp_path / "r.json"
    options = ["--prompts", str(path), "--max-num-seqs", "2", "--drafter", "none", "--json", str(result)]
    options += ["--compile", "off", "--num-threads", "1"]
    last = "0"
    done = CliRunner().invoke(cli, ["bench", "answers", *options])
    assert done.exit_code == 1 and "it was interrupted after 3 of 4 questions" in done.output
    assert ended[:3] == ["1", "2", "0"]
    assert json.loads(result.read_text())["answers"] == {REPLIES: {"right": 0, "asked": 3}}
    ended.clear()
    lengths, last = iter([40, 2, 2, 40]), "2"
    result.unlink()
    done = CliRunner().invoke(cli, ["bench", "answers", *options])
    assert done.exit_code == 130 and not result.exists(), "nothing stands before the first"


def add(engine: Engine, request: Request, lengths: Iterator[int], _add: Any = Engine.add) -> None:
    """Ask for a text of the next length; what steps cost is measured by requests with other names."""
    if request.request_id.isdigit():
        request = replace(request, params=replace(request.params, max_tokens=next(lengths), ignore_eos=True))
    _add(engine, request)


@pytest.mark.integration
def test_strict_tools_leave_no_call_outside_their_schemas(tmp_path: Path):
    """What is asked for suits no argument that there is, and each answer is a call all the same."""
    engine = load_engine(EngineConfig(compile="off", dtype="float32", max_num_seqs=2))
    assert engine.tokenizer is not None
    parameters = {"type": "object", "properties": {"zone": {"enum": ["north"]}, "area": {"enum": ["x"]}}, "required": ["zone"]}
    function = {"name": "FindRestaurants", "description": "Find restaurants", "parameters": parameters}
    calls = [{"id": "1", "type": "function", "function": {"name": "FindRestaurants", "arguments": "{}"}}]
    asked = "I want to find an Italian restaurant in San Jose."
    row = {
        "tools": [{"type": "function", "function": function}],
        "messages": [said("user", asked), said("assistant", None, tool_calls=calls)],
    }
    path = write(tmp_path / "chats.jsonl", [row])
    for strict in (False, True):
        (question,) = read_questions(path, engine.tokenizer, count=1, max_tokens=200, seed=0, strict_tools=strict)[TOOL_CALLS]
        (text,) = answer(engine, [question], 100, lambda: None)
        called = said_calls(text)
        assert called, text
        ((name, arguments),) = called
        assert name == "FindRestaurants"
        assert (arguments in ({"zone": "north"}, {"area": "x", "zone": "north"})) == strict
