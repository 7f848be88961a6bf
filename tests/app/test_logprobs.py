"""Log-probabilities, echoes and the best of several answers, whole and streamed."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from app.tokens import TokenTexts
from models.loader import BUNDLED, load_tokenizer
from tests.app.fakes import FakeEngine, chat_body, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def entry(token: str, top: int = 0) -> dict[str, Any]:
    """The fake engine's log-probability of a token, as the chat API words it."""
    code = ord(token)
    others = [{"token": chr(code + place), "logprob": -code / 100 - place, "bytes": [code + place]} for place in range(top)]
    return {"token": token, "logprob": -code / 100, "bytes": [code], "top_logprobs": others}


async def test_chat_log_probabilities(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = ("x", "y")
    choice = (await client.post(CHAT, json=chat_body(logprobs=True, top_logprobs=2))).json()["choices"][0]
    assert choice["logprobs"] == {"content": [entry("b", 2), entry("c", 2)], "refusal": None}
    assert engine.requests[0].params.logprobs == 2


async def test_streamed_log_probabilities_come_with_their_tokens_even_where_text_lags(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.script = ("", "xy", "")
    chunks = events(await client.post(CHAT, json=chat_body(logprobs=True, stream=True)))
    told = [(chunk["choices"][0]["delta"].get("content"), chunk["choices"][0]["logprobs"]) for chunk in chunks]
    assert told == [
        ("", None),
        ("", {"content": [entry("b")], "refusal": None}),
        ("xy", {"content": [entry("c")], "refusal": None}),
        ("", {"content": [entry("d")], "refusal": None}),
        (None, None),
    ]


async def test_completion_log_probabilities_are_parallel_lists(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = ("b", "c")
    body = (await client.post(TEXT, json={"prompt": "ab", "logprobs": 1})).json()
    assert body["choices"][0]["text"] == "bc"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["b", "c"],
        "token_logprobs": [-0.98, -0.99],
        "top_logprobs": [{"b": -0.98}, {"c": -0.99}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["xyz", [120, 121, 122]])
async def test_an_echoed_prompt_comes_first_with_its_log_probabilities(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, prompt: Any
) -> None:
    engine.script = ("b", "c")
    response = await client.post(
        TEXT,
        json={"prompt": [prompt, prompt] if isinstance(prompt, str) else prompt, "echo": True, "logprobs": 0, "stream": stream},
    )
    documents = events(response) if stream else [response.json()]
    choices = [choice for one in documents for choice in one["choices"] if choice["index"] == 0]
    assert "".join(choice["text"] for choice in choices) == "xyzbc"
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for name in told:
            told[name] += (choice["logprobs"] or {}).get(name, [])
    assert told == {
        "tokens": list("xyzbc"),
        "token_logprobs": [None, -1.21, -1.22, -0.98, -0.99],
        "top_logprobs": [None, {"y": -1.21}, {"z": -1.22}, {"b": -0.98}, {"c": -0.99}],
        "text_offset": [0, 1, 2, 3, 4],
    }


async def test_without_logprobs_an_echo_is_text_alone(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    choice = (await client.post(TEXT, json={"prompt": "xyz", "echo": True, "max_tokens": 0})).json()["choices"][0]
    assert (choice["text"][:3], choice["logprobs"]) == ("xyz", None)
    assert (engine.requests[0].params.max_tokens, engine.requests[0].params.prompt_logprobs) == (0, None)


async def test_the_best_answers_are_those_with_the_likeliest_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    # The fake engine's n-th token is less likely than the one before: shorter answers are better by the mean.
    engine.scripts = [("p", "q", "r"), ("long", "er"), ("short",), ("1", "2"), ("3",), ("4", "5", "6")]
    body = (await client.post(TEXT, json={"prompt": ["ab", "c"], "n": 2, "best_of": 3})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "short"),
        (1, "longer"),
        (2, "3"),
        (3, "12"),
    ]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 12)  # what was generated, not what is shown


@pytest.mark.parametrize(("options", "param"), [({"best_of": 2, "n": 3}, "best_of"), ({"best_of": 2, "stream": True}, "best_of")])
async def test_a_best_that_cannot_be_known_is_refused(client: httpx.AsyncClient, options: dict[str, Any], param: str) -> None:
    error = (await client.post(TEXT, json={"prompt": "a", **options})).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")


async def test_usage_in_every_chunk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(await client.post(CHAT, json=chat_body(**options)))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


def test_the_bundled_tokenizers_tokens_are_the_bytes_of_their_text() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    tokens = TokenTexts(tokenizer)
    text = "Zażółć 🎭 gęślą\tjaźń, 日本語\n\n  x"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokens.bytes, ids)) == text.encode()
    assert any("\ufffd" in tokens.text(token) for token in ids)
    end = tokenizer.eos_token_id
    assert tokens.text(end) == tokenizer.eos_token
    assert tokens.bytes(len(tokenizer) + 5) == b""


def offsets_of(prompt: str, generated: str, begins: str = "") -> tuple[list[str], list[int]]:
    """Texts and offsets of an echoed prompt, before which the tokenizer puts the token ``begins``, and of what follows it."""
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    first = [tokenizer.convert_tokens_to_ids(begins)] if begins else []
    ids = [*first, *tokenizer.encode(prompt, add_special_tokens=False)]
    texts, offsets = TokenTexts(tokenizer), TokenTexts(tokenizer).offsets()
    more = tokenizer.encode(generated, add_special_tokens=False)
    begun = [*offsets.of_prompt(ids, prompt), *offsets.more(more)]
    offsets.cut(1)
    assert offsets.more(more[1:]) == begun[len(ids) + 1 :]
    return [texts.text(token) for token in [*ids, *more]], begun


@pytest.mark.parametrize("begins", ["", "<|im_start|>"])
@pytest.mark.parametrize("prompt", ["The café is 日本", "<|im_end|>🎭 yes", ""])
def test_offsets_are_places_in_the_text(prompt: str, begins: str) -> None:
    text = prompt + " one 🎭, two é"
    texts, offsets = offsets_of(prompt, text.removeprefix(prompt), begins)
    assert offsets[0] == 0 and offsets == sorted(offsets) and len(prompt) in offsets
    for token, place in zip(texts[bool(begins) :], offsets[bool(begins) :], strict=True):
        assert "\ufffd" in token or text.startswith(token, place)


def test_offsets_of_what_goes_on_count_the_space_that_begins_it() -> None:
    tokenizer = Tokenizer(BPE({"<unk>": 0, "a": 1, "b": 2, "▁": 3}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    texts = TokenTexts(SimpleNamespace(backend_tokenizer=tokenizer))
    assert texts.offsets().more([3, 1, 2]) == [0, 0, 1]
    goes_on = texts.offsets(before=[1])
    assert goes_on.of_prompt([1], "a") == [0]
    assert goes_on.more([3, 1, 2]) == [1, 2, 3]
    goes_on.cut(0)
    assert goes_on.more([3, 1, 2]) == [1, 2, 3]
