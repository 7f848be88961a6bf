import pytest
from tokenizers import Tokenizer

from models.loader import BUNDLED
from speculative.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED["target"] / "tokenizer.json"))


@pytest.mark.parametrize("text", ["Hello there, how are you?", "naïve café – 漢字 🙂🙂 done", "def f(x):\n    return x\n"])
def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_in_its_middle_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂").ids
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_stay_out_but_tool_call_tags_do_not(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("<|im_start|>Hi<tool_call>x</tool_call><|im_end|>").ids
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == "Hi<tool_call>x</tool_call>"


def feed(tokenizer: Tokenizer, text: str, *stop: str) -> tuple[str, bool]:
    detokenizer = Detokenizer(tokenizer, stop)
    out = ""
    for token in tokenizer.encode(text).ids:
        out += detokenizer.add(token)
        if detokenizer.stopped:
            return out, True
    return out + detokenizer.flush(), False


def test_text_ends_before_the_stop_string(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, "one two\nUser: three", "\nUser:") == ("one two", True)


def test_the_earliest_of_several_stop_strings_counts(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, "alpha beta gamma", "gamma", "beta") == ("alpha ", True)


def test_what_only_looked_like_a_stop_string_is_given_out(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, "a STO", "STOP") == ("a STO", False)
    assert feed(tokenizer, "STOMP aSTOP b", "STOP") == ("STOMP a", True)


@pytest.mark.parametrize("stop", ["o", "xyz", "world, wide", "d!"])
def test_nothing_given_out_is_ever_taken_back(tokenizer: Tokenizer, stop: str) -> None:
    text = "Hello world, wide world!"
    out, stopped = feed(tokenizer, text, stop)
    assert stopped == (stop in text)
    assert out == (text[: text.index(stop)] if stopped else text)
