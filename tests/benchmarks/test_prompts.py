import gzip
import itertools
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from benchmarks.prompts import BUNDLED_PROMPTS, PromptError, load_conversations, load_prompts
from models.loader import BUNDLED, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    return tokenizer


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path, tokenizer: PreTrainedTokenizerBase, **changes: int) -> list[str]:
    prompts = load_prompts(path, tokenizer, **{"count": 10, "max_tokens": 500, "seed": 0, **changes})
    return [tokenizer.decode(list(prompt.token_ids)) for prompt in prompts]


def test_a_dialogue_is_cut_before_an_answer_and_a_question_is_asked(tmp_path: Path, tokenizer) -> None:
    dialogue = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    path = write(tmp_path / "p.jsonl", dialogue)
    assert load(path, tokenizer) == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]
    path = write(tmp_path / "q.jsonl", {"turns": ["Why?", "And then?"]})
    assert load(path, tokenizer) == ["<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"]


def test_contents_in_parts_are_the_texts_that_they_hold(tmp_path: Path, tokenizer) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    path = write(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": parts}]})
    assert load(path, tokenizer) == ["<|im_start|>user\nHi\nthere<|im_end|>\n<|im_start|>assistant\n"]
    path = write(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})
    with pytest.raises(PromptError, match="line 1: not a dialogue, a question or a prompt"):
        load(path, tokenizer)


def test_plain_prompts_and_gzip_are_read(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "p.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "Once upon a time"}) + "\n")
    assert load(path, tokenizer) == ["Once upon a time"]


def test_a_conversation_is_asked_answer_by_answer_as_far_as_there_is_room(tmp_path: Path, tokenizer) -> None:
    said = [(role, f"{role} {turn}") for turn in range(4) for role in ("user", "assistant")]
    dialogue = {"source": "chat", "messages": [{"role": role, "content": content} for role, content in said]}
    path = write(tmp_path / "c.jsonl", dialogue, {"prompt": "Once upon a time"})
    prompts = load_conversations(path, tokenizer, count=10, max_tokens=500, seed=0)
    whole = [each for each in prompts if each.source == "chat"]
    assert [len(each.messages) for each in whole] == [1, 3, 5, 7]
    assert [tokenizer.decode(list(each.token_ids)) for each in prompts if each not in whole] == ["Once upon a time"]
    for before, after in itertools.pairwise(whole):
        assert after.text.startswith(before.text) and after.token_ids[: len(before.token_ids)] == before.token_ids
    assert len({each.conversation for each in prompts}) == 2 and len({each.conversation for each in whole}) == 1
    room = len(whole[2].token_ids)
    longest = load_conversations(path, tokenizer, count=10, max_tokens=room, seed=0)
    assert [each for each in longest if each.source == "chat"] == whole[:3]
    assert {each.conversation for each in load_conversations(path, tokenizer, count=1, max_tokens=500, seed=0)} == {"1"}


def test_a_files_own_answers_are_counted_where_they_are_asked_for(tmp_path: Path, tokenizer) -> None:
    call = {"type": "function", "function": {"name": "Book", "arguments": '{"time": "7 pm"}'}}
    path = write(
        tmp_path / "p.jsonl",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "At 7"}, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"turns": ["Why?", "And then?"], "reference": ["Because", "Nothing"]},
        {"prompt": "Once", "reference": "upon a time"},
        {"prompt": "Twice"},
    )

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompts = load_prompts(path, tokenizer, count=10, max_tokens=500, seed=0, with_answers=True)
    by_message = {prompt.messages[0]["content"]: prompt for prompt in prompts}
    found = {content: prompt.answer_tokens for content, prompt in by_message.items()}
    called = found.pop("At 7")
    ended = length("Hello<|im_end|>")
    assert found == {"Hi": ended, "Why?": length("Because"), "Once": length("upon a time"), "Twice": None}
    assert called is not None and called > length('{"time": "7 pm"}')
    assert tokenizer.decode(list(by_message["Hi"].token_ids)) == by_message["Hi"].text
    assert all(prompt.answer_tokens is None for prompt in load_prompts(path, tokenizer, count=10, max_tokens=500, seed=0))


def test_long_prompts_are_left_out_and_a_seed_draws_the_same(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": "word " * n} for n in range(1, 30)))
    few = load(path, tokenizer, max_tokens=10, count=5, seed=3)
    assert few == load(path, tokenizer, max_tokens=10, count=5, seed=3)
    assert len(few) == 5 and all(len(tokenizer(text)["input_ids"]) <= 10 for text in few)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{oops\n", "not JSONL, line 1"),
        ("[" * 200_000 + "\n", "not JSONL, line 1"),
        ("3\n", "not JSONL, line 1: an object is wanted"),
        ('{"text": "x"}\n', "line 1: not a dialogue"),
        ('{"turns": []}\n', "line 1: not a dialogue"),
        ('{"messages": []}\n', "line 1: not a dialogue"),
        ('{"prompt": null}\n', "line 1: not a dialogue.*a text is wanted, not None"),
        ('{"prompt": ["x", "y"]}\n', "line 1: not a dialogue.*a text is wanted"),
        ('{"turns": [null]}\n', "line 1: not a dialogue.*a text is wanted, not None"),
        ('{"turns": ["x"], "tools": [3]}\n', "line 1: not a dialogue"),
        ('{"prompt": "\\ud800"}\n', "line 1: half a surrogate pair"),
        ('{"turns": ["\\ud800"]}\n', "line 1: half a surrogate pair"),
        ("", "holds no prompt"),
        (None, "cannot read"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, tokenizer, content: str | None, message: str) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(PromptError, match=message):
        load(path, tokenizer)


def test_damaged_archives_are_named(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "p.jsonl.gz"
    whole = gzip.compress("".join(json.dumps({"prompt": f"{n} {n * 7919}"}) + "\n" for n in range(5000)).encode())
    for damaged in (whole[: len(whole) // 2], whole[:30] + b"\xff" * 500 + whole[530:], b"no gzip"):
        path.write_bytes(damaged)
        with pytest.raises(PromptError, match=r"cannot read .*p\.jsonl\.gz"):
            load(path, tokenizer)


def test_answers_as_long_as_the_model_holds_leave_no_room_for_prompts(tmp_path: Path, tokenizer) -> None:
    with pytest.raises(PromptError, match="--max-tokens leaves no room for a prompt"):
        load(write(tmp_path / "p.jsonl", {"prompt": "x"}), tokenizer, max_tokens=-88)


def test_the_bundled_prompts_all_fit_a_short_context(tokenizer) -> None:
    assert len(load(BUNDLED_PROMPTS, tokenizer, count=64)) == 64
