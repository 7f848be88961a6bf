import random

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

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


def test_special_tokens_that_are_known_need_not_be_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>naïve🙂<|im_end|><|im_end|><|im_end|> text<|im_end|>").ids
    special = {token for token, each in tokenizer.get_added_tokens_decoder().items() if each.special}
    detokenizer, known = Detokenizer(tokenizer), Detokenizer(tokenizer, special=special)
    assert [known.add(token) for token in ids] == [detokenizer.add(token) for token in ids]
    assert known.flush() == detokenizer.flush() == ""


@pytest.fixture(scope="module")
def falling_back() -> Tokenizer:
    """As Llama 2's: characters without a token are bytes, of which the decoder makes characters where all in a row are valid."""
    characters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c"]
    model = BPE({token: number for number, token in enumerate(characters)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("a <0x0A> <0xF0> b", "a\n\ufffdb"),
        ("a <0xC3> <0xA9> <0xF0> ▁ b <0x0A> c", "aé\ufffd b\nc"),
        ("a <0xC3> <0xA9> <0xF0> <0x9F> <0x99> <0x82> b", "aé🙂b"),
    ],
)
def test_bytes_that_are_no_character_change_nothing_that_has_been_told(falling_back: Tokenizer, written: str, told: str) -> None:
    detokenizer = Detokenizer(falling_back)
    pieces = [detokenizer.add(falling_back.token_to_id(token)) for token in written.split()]
    assert "".join(pieces) + detokenizer.flush() == told


@pytest.mark.parametrize(
    ("before", "written", "told"),
    [
        ("", "▁ a", "a"),
        ("a b", "▁ a", " a"),
        ("a ▁ b c a b c", "▁ ▁ a", "  a"),
        ("a <0xC3> <0xA9>", "<0xC3> <0xA9> ▁", "é "),
        ("a b", "<0xF0> <0x9F> <0x99> <0x82>", "🙂"),
        ("a <0xF0>", "▁ b", " b"),
    ],
)
def test_a_text_that_goes_on_keeps_its_first_space(falling_back: Tokenizer, before: str, written: str, told: str) -> None:
    strip = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(falling_back.model)
    tokenizer.decoder = strip
    first, following = ([tokenizer.token_to_id(token) for token in text.split()] for text in (before, written))
    detokenizer = Detokenizer(tokenizer, before=first)
    text = "".join(map(detokenizer.add, following)) + detokenizer.flush()
    if not tokenizer.decode(first).endswith("\ufffd"):
        assert tokenizer.decode(first) + text == tokenizer.decode([*first, *following])
        assert text == told


def test_whatever_bytes_are_drawn_text_goes_on(falling_back: Tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(100):
        detokenizer = Detokenizer(falling_back)
        ids = [draw.randrange(1, 257) if draw.random() < 0.5 else draw.randrange(257, 261) for _ in range(60)]
        text = "".join(map(detokenizer.add, ids)) + detokenizer.flush()
        assert sum(text.count(letter) for letter in "abc ") >= sum(token >= 257 for token in ids)


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


def test_a_stop_string_counts_in_text_that_waited_to_the_end(tokenizer: Tokenizer) -> None:
    token = tokenizer.token_to_id("ĠÃ")  # a space and half a character
    detokenizer = Detokenizer(tokenizer, (" ",))
    assert (detokenizer.add(token), detokenizer.flush(), detokenizer.stopped) == ("", "", True)
    detokenizer = Detokenizer(tokenizer, (" ",), min_tokens=2)
    assert (detokenizer.add(token), detokenizer.flush(), detokenizer.stopped) == ("", " \ufffd", False)


@pytest.mark.parametrize(
    ("min_tokens", "told", "stopped"),
    [(3, "a ", True), (4, "a ", True), (5, "a b b c d c d", False)],
)
def test_a_stop_string_ends_the_text_unless_it_is_complete_within_the_least_tokens(
    tokenizer: Tokenizer, min_tokens: int, told: str, stopped: bool
) -> None:
    ids = [tokenizer.encode(piece).ids for piece in ("a", " b", " b", " c", " d", " c", " d")]
    assert all(len(each) == 1 for each in ids)
    detokenizer = Detokenizer(tokenizer, ("b b c d",), min_tokens=min_tokens)
    out = ""
    for (token,) in ids:
        out += detokenizer.add(token)
        if detokenizer.stopped:
            break
    assert (out + detokenizer.flush(), detokenizer.stopped) == (told, stopped)
