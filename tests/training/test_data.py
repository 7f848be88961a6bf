"""Corpora: which tokens are the assistant's, what is refused, what is kept on disk."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from training import data
from training.corpus import Corpus, stored
from training.data import load_corpus
from training.errors import DataError

CHAT = [
    {"role": "system", "content": "yes"},
    {"role": "user", "content": "one tea\n"},
    {"role": "assistant", "content": "tea please "},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "cup", "arguments": "{}"}}]},
    {"role": "tool", "content": "four"},
    {"role": "assistant", "content": "thanks ✓"},
    {"role": "user", "content": "more"},
]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Corpus:
    return load_corpus(str(path), tokenizer, path.parent / "cache", progress=False, **options)


def responses(corpus: Corpus, index: int, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Text of each run of response tokens."""
    ids, mask = corpus.row(index, 10_000)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [tokenizer.decode(ids[start:end]) for start, end in edges.reshape(-1, 2)]


def test_assistant_turns_and_their_end_of_turn_tokens_are_responses(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    corpus = load(write(tmp_path / "chat.jsonl", {"messages": CHAT, "tools": [{"function": {"name": "cup"}}]}), tokenizer)
    # The tokenizer knows ASCII alone, so the tick is lost; what follows it is not.
    assert responses(corpus, 0, tokenizer) == ["tea please <|im_end|>", "<call>cup</call><|im_end|>", "thanks <|im_end|>"]
    text = tokenizer.decode(corpus.row(0, 10_000)[0])
    assert text.startswith("<|im_start|>system\nTools: cup<|im_end|>\n<|im_start|>system\nyes<|im_end|>")
    assert text.endswith("thanks <|im_end|>"), "nothing after the last response is kept"


def test_conversations_keep_their_order_and_those_without_an_assistant_are_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    rows = [{"messages": [{"role": "user", "content": "tea"}, {"role": "assistant", "content": word}]} for word in ("one", "two")]
    path = tmp_path / "chat.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(rows[0]) + "\n\n" + json.dumps({"messages": CHAT[:2]}) + "\n" + json.dumps(rows[1]) + "\n")
    corpus = load(path, tokenizer)
    assert [responses(corpus, index, tokenizer) for index in range(len(corpus))] == [["one<|im_end|>"], ["two<|im_end|>"]]


def test_truncation_decides_what_is_usable(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    chat = {"messages": [{"role": "user", "content": "tea"}, {"role": "assistant", "content": "one two three"}]}
    corpus = load(write(tmp_path / "chat.jsonl", chat), tokenizer)
    ids, mask = corpus.row(0, 10_000)
    first = int(np.flatnonzero(mask)[0])
    assert corpus.usable(len(ids)).tolist() == [0]
    assert corpus.usable(first + 2).tolist() == [0]
    assert corpus.usable(first + 1).tolist() == []
    assert corpus.lengths(5).tolist() == [5]
    assert len(corpus.row(0, 5)[0]) == 5


def test_a_turn_shown_otherwise_once_more_follows_is_no_response(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """As templates do that drop earlier reasoning."""
    changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    changed.chat_template = tokenizer.chat_template.replace(
        "(m.content or '')", "(m.content or '' if loop.last or m.role != 'assistant' else 'no')"
    )
    corpus = load(write(tmp_path / "chat.jsonl", {"messages": CHAT[:7]}), changed)
    assert responses(corpus, 0, tokenizer) == ["thanks <|im_end|>"]


def test_a_second_load_reads_the_cache_and_changed_text_or_template_does_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, write_chats: Callable[[Path, int], Path], monkeypatch: pytest.MonkeyPatch
):
    path = write_chats(tmp_path / "chat.jsonl", 3)
    first = load(path, tokenizer)
    changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    changed.chat_template = tokenizer.chat_template.replace("Tools", "Cups")
    keys = {first.key, load(path, changed).key, load(write_chats(path, 4), tokenizer).key}
    assert len(keys) == 3
    monkeypatch.setattr(data, "tokenize", lambda *_, **__: pytest.fail("tokenised again"))
    again = load(write_chats(path, 3), tokenizer)
    assert again.key == first.key
    assert np.array_equal(again.tokens, first.tokens) and np.array_equal(again.response, first.response)


@pytest.mark.parametrize("part", ["tokens", "response", "offsets"])
@pytest.mark.parametrize("size", [0, 60, -1])
def test_a_damaged_cache_is_made_anew_with_a_warning(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    write_chats: Callable[[Path, int], Path],
    capsys: pytest.CaptureFixture[str],
    part: str,
    size: int,
):
    path, cache = write_chats(tmp_path / "chat.jsonl", 3), tmp_path / "cache"
    first = load(path, tokenizer)
    file = cache / first.key / f"{part}.npy"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match=f"the tokenised text in {cache / first.key} is damaged"):
        stored(cache / first.key)
    again = load_corpus(str(path), tokenizer, cache, progress=True)
    assert f"{cache / first.key} is damaged" in capsys.readouterr().err
    assert again.tokens.tolist() == stored(cache / first.key).tokens.tolist() and len(again) == 3
    assert [each.name for each in cache.iterdir()] == [first.key]


def test_what_killed_programs_left_in_the_cache_goes_once_it_is_old(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, write_chats: Callable[[Path, int], Path]
):
    for name in (".corpus-old", ".corpus-new"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "tokens.npy").write_bytes(b"half")
    os.utime(tmp_path / "cache" / ".corpus-old", (0, 0))
    corpus = load(write_chats(tmp_path / "chat.jsonl", 3), tokenizer)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {".corpus-new", corpus.key}


def test_conversations_without_an_assistant_are_counted_also_from_the_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    path = write(tmp_path / "chat.jsonl", {"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": CHAT[:1]})
    assert [load(path, tokenizer).left_out for _ in range(2)] == [2, 2]
    (kept,) = (tmp_path / "cache").iterdir()
    (kept / "left_out.npy").unlink()  # earlier versions did not keep it
    assert load(path, tokenizer).left_out == 0


def test_a_broken_off_tokenisation_leaves_no_cache_entry(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    path = write(tmp_path / "chat.jsonl", {"messages": CHAT}, {"messages": []})
    with pytest.raises(DataError):
        load(path, tokenizer)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{oops", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "a text holds half a surrogate pair"),
        ("[1]", 'expected an object with "messages", found list'),
        ('{"text": "tea"}', '"messages" must be a non-empty list'),
        ('{"messages": []}', '"messages" must be a non-empty list'),
        ('{"messages": ["tea"]}', r'messages\[0\] must be an object with a "role"'),
        ('{"messages": [{"role": "user", "content": 3}]}', r"messages\[0\].content must be text or null"),
        ('{"messages": [{"role": "user", "content": "tea"}], "tools": {}}', '"tools" must be a list'),
        ('{"messages": [{"role": "user", "content": "tea"}], "tools": [3]}', "the chat template refuses"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: str, complaint: str):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"chat\.jsonl:2: {complaint}"):
        load(path, tokenizer)


def test_missing_and_unreadable_files_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        load(tmp_path / "absent.jsonl", tokenizer)
    (tmp_path / "chat.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"chat\.jsonl\.gz: cannot be read"):
        load(tmp_path / "chat.jsonl.gz", tokenizer)
    whole = gzip.compress("".join(json.dumps({"messages": CHAT, "n": n * 7919}) + "\n" for n in range(3000)).encode())
    for damaged in (whole[: len(whole) // 2], whole[:30] + b"\xff" * 500 + whole[530:]):
        (tmp_path / "chat.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"chat\.jsonl\.gz: cannot be read"):
            load(tmp_path / "chat.jsonl.gz", tokenizer)
    with pytest.raises(DataError, match="is a folder; name a"):
        load(tmp_path, tokenizer)
    with pytest.raises(DataError, match="no conversation has an assistant turn"):
        load(write(tmp_path / "users.jsonl", {"messages": CHAT[:2]}), tokenizer)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="no chat template"):
        load(write(tmp_path / "chat.jsonl", {"messages": CHAT}), bare)


def test_a_dataset_name_is_read_from_its_messages_column(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    import datasets

    asked: list[tuple[str, str]] = []

    def fake(path: str, *, split: str) -> datasets.Dataset:
        asked.append((path, split))
        return datasets.Dataset.from_list([{"messages": CHAT[1:3]}])

    monkeypatch.setattr(datasets, "load_dataset", fake)
    corpus = load_corpus("owner/chats:train_sft", tokenizer, tmp_path, progress=False)
    assert asked == [("owner/chats", "train_sft")]
    assert responses(corpus, 0, tokenizer) == ["tea please <|im_end|>"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([{"text": "tea"}]))
    with pytest.raises(DataError, match='no "messages" column; it has text'):
        load_corpus("owner/chats", tokenizer, tmp_path, progress=False)


def test_frequent_tokens_are_those_of_responses_only():
    tokens = np.array([9, 9, 9, 9, 4, 7, 7, 4, 4, 2], dtype=np.int32)
    response = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1], dtype=bool)
    corpus = Corpus(tokens, response, np.array([0, 10]), "key")
    assert corpus.frequent_response_tokens(2).tolist() == [4, 7]
    assert corpus.frequent_response_tokens(3).tolist() == [4, 7, 2]
    assert corpus.response_share(corpus.frequent_response_tokens(2)) == 5 / 6
