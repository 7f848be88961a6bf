"""Chat completions that do not stream: what reaches the engine, and what comes back."""

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from app import chat
from app.main import create_app
from app.messages import Message, TemplateOptions
from app.settings import Settings
from models.loader import BUNDLED, load_tokenizer
from tests.app.fakes import FakeEngine, chat_body, events

CHAT = "/v1/chat/completions"


async def test_the_whole_response(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=chat_body())
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 2.0,  # 3 accepted and 3 bonus tokens in 3 steps
                "draft_acceptance_rate": 0.25,
                "acceptance_histogram": [1, 1, 1],
                "num_spec_steps": 3,
                "num_accepted_draft_tokens": 3,
                "num_draft_tokens": 12,
                "num_spec_tokens": 6,
                "num_target_calls": 5,
                "tokens_per_second": 2.0,  # 2 tokens after the first in 1 second
            }
        },
    }
    assert response.headers["x-request-id"]


async def test_several_choices_share_a_prompt_and_take_consecutive_seeds(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.scripts = [("a", "b"), ("c",), ("d", "e", "f")]
    body = (await client.post(CHAT, json=chat_body(n=3, seed=2**63 - 2))).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, "ab"), (1, "c"), (2, "def")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 6)
    assert [request.params.seed for request in engine.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert len({request.request_id for request in engine.requests}) == 3
    metrics = body["metrics"]["speculative_decoding"]
    assert (metrics["num_target_calls"], metrics["acceptance_histogram"]) == (15, [3, 3, 3])
    assert metrics["tokens_per_second"] == 3.0  # 1 + 0 + 2 tokens after the first ones, in the 1 second that all took together


async def test_the_models_sampling_defaults_yield_to_the_request(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(CHAT, json=chat_body())
    await client.post(CHAT, json=chat_body(temperature=0, top_p=0.5, top_k=9, min_p=0.1, seed=-4, stop="x", speculative=False))
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.7, 0.95, 0, 0.0)  # the model's, else OpenAI's
    assert (first.seed, first.stop, first.max_tokens, first.speculative) == (None, (), None, True)
    assert (second.temperature, second.top_p, second.top_k, second.min_p) == (0.0, 0.5, 9, 0.1)
    assert (second.seed, second.stop, second.speculative) == (-4, ("x",), False)


@pytest.mark.parametrize("limits", [{"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}])
async def test_both_names_of_the_limit(client: httpx.AsyncClient, engine: FakeEngine, limits: dict[str, int]) -> None:
    await client.post(CHAT, json=chat_body(**limits))
    assert engine.requests[0].params.max_tokens == 5


async def test_the_limit_ends_with_length(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.finish = "length"
    assert (await client.post(CHAT, json=chat_body())).json()["choices"][0]["finish_reason"] == "length"


async def test_the_model_may_be_left_out_and_the_content_type_too(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=b'{"messages": [{"role": "user", "content": "Hi"}]}')
    assert response.json()["model"] == "tiny"


async def test_messages_as_the_template_gets_them(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parsed = call | {"function": {"name": "add", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}}
    broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a":'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ann"},
        # as openai's SDKs dump an assistant message, after parse() or a stream too, and as others hand them on
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": [parsed, broken]}
        | {"parsed": {"a": 1}, "reasoning_content": None, "reasoning_details": [], "provider_specific_fields": {}},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    response = await client.post(CHAT, json=chat_body(messages=messages))
    assert response.status_code == 200, response.text
    assert engine.tokenizer.conversations == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one\ntwo", "name": "Ann"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call | {"function": {"name": "add", "arguments": {"a": 1}}}, broken],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ]
    ]


async def test_thoughts_reach_templates_that_render_them(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked, again = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    for thoughts in ("so be it", "", None):
        said = {"role": "assistant", "content": "Yes", "reasoning_content": thoughts}
        assert (await client.post(CHAT, json=chat_body(messages=[asked, said, again]))).status_code == 200
        told = {"reasoning_content": thoughts} if thoughts else {}
        assert engine.tokenizer.conversations[-1][1] == {"role": "assistant", "content": "Yes"} | told


async def test_what_other_models_said_is_understood(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {"role": "user", "content": "a"}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    cited = [{"type": "url_citation", "url_citation": {"url": "http://a", "title": "a", "start_index": 0, "end_index": 1}}]
    history: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": "", "refusal": "No."}, {"content": "No."}),
        ({"content": "Yes", "refusal": "", "annotations": cited}, {"content": "Yes"}),
        ({"content": "Yes", "reasoning": "so be it", "thinking_blocks": None}, {"content": "Yes", "reasoning_content": "so be it"}),
        ({"content": "Yes", "reasoning": "so", "reasoning_content": "so"}, {"content": "Yes", "reasoning_content": "so"}),
        ({"content": None, "reasoning": "so", "reasoning_details": [{"type": "x"}]}, {"content": "", "reasoning_content": "so"}),
        (
            {"content": "", "tool_calls": [call | {"provider_specific_fields": None, "extra_content": {"google": {}}}]},
            {"content": "", "tool_calls": [call | {"function": {"name": "add", "arguments": {}}}]},
        ),
    ]
    for said, told in history:
        response = await client.post(CHAT, json=chat_body(messages=[asked, {"role": "assistant"} | said, asked]))
        assert response.status_code == 200, response.text
        assert engine.tokenizer.conversations[-1][1] == {"role": "assistant"} | told


async def test_a_penalty_may_have_llama_cpps_name(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.post(CHAT, json=chat_body(repeat_penalty=1.25))).status_code == 200
    assert engine.requests[0].params.repetition_penalty == 1.25


async def test_no_calls_are_no_list_of_calls(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": role, "content": "Hi", "tool_calls": []} for role in ("user", "assistant")]
    assert (await client.post(CHAT, json=chat_body(messages=messages))).status_code == 200
    assert engine.tokenizer.conversations == [[{"role": role, "content": "Hi"} for role in ("user", "assistant")]]


async def test_arguments_that_no_parser_follows_stay_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": deep}}
    response = await client.post(CHAT, json=chat_body(messages=[{"role": "assistant", "content": "Hi", "tool_calls": [call]}]))
    assert response.status_code == 200, response.text
    assert engine.tokenizer.conversations[0][0]["tool_calls"] == [call]


def test_a_real_tokenizer_renders_the_template_and_adds_nothing() -> None:
    vocabulary = {"[bos]": 0, "user": 1, "hello": 2, "assistant": 3}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[bos]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="[bos]")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )
    assert chat.prompt_tokens(tokenizer, [Message(role="user", content="hello")], TemplateOptions()) == [1, 2, 3]


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(Exception, match="/v1/completions"):
        chat.prompt_tokens(object(), [Message(role="user", content="hello")], TemplateOptions())


async def test_openais_client_reads_it(app: Any) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    async with AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http) as openai:
        whole = await openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        assert (whole.choices[0].message.content, whole.usage and whole.usage.total_tokens) == ("Hello, world", 6)
        stream = await openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world"
        assert chunks[-1].usage and chunks[-1].usage.total_tokens == 6
        assert [model.id async for model in openai.models.list()] == ["tiny"]


async def test_models(client: httpx.AsyncClient) -> None:
    tiny = {"id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "moaserve", "max_model_len": 100}
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [tiny]}
    assert (await client.get("/v1/models/tiny")).json() == tiny
    assert (await client.get("/v1/models/org/other")).json()["error"]["code"] == "model_not_found"


async def test_a_model_is_asked_for_by_all_of_its_names(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(Settings(served_model_name="org/one, gpt-4o,"), engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["org/one", "gpt-4o"]
        for name in ("org/one", "gpt-4o"):
            assert (await client.post(CHAT, json=chat_body(model=name))).json()["model"] == "org/one"
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
        refused = (await client.post(CHAT, json=chat_body(model="tiny"))).json()["error"]
        assert refused["message"] == "The model 'tiny' does not exist; this server serves 'org/one', 'gpt-4o'."
    with pytest.raises(ValidationError, match="it must be a name, or several with commas"):
        Settings(served_model_name=" , ")


async def test_the_openapi_document_shows_what_may_be_sent(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert {"type": "string", "minLength": 1} in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    assert schemas["ChatCompletionRequest"]["additionalProperties"] is False


async def test_every_sampling_parameter_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    given = {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [4, 5],
    }
    others = {"logit_bias": {"7": -100, "8": 2.5}, "logprobs": True, "top_logprobs": 4, "priority": -3, "cache_salt": "mine"}
    response = await client.post(CHAT, json=chat_body(**given, **others))
    assert response.status_code == 200, response.text
    request = engine.requests[0]
    for name, value in given.items():
        assert getattr(request.params, name) == (tuple(value) if isinstance(value, list) else value)
    assert request.params.logit_bias == ((7, -100.0), (8, 2.5))
    assert (request.params.logprobs, request.params.prompt_logprobs, request.priority) == (4, None, -3)


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, {"add_generation_prompt": True, "continue_final_message": False}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": False}),
        ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"add_generation_prompt": True, "continue_final_message": False, "enable_thinking": False},
        ),
    ],
)
async def test_how_the_template_is_to_be_rendered(
    client: httpx.AsyncClient, engine: FakeEngine, options: dict[str, Any], passed: dict[str, Any]
) -> None:
    assert (await client.post(CHAT, json=chat_body(**options))).status_code == 200
    assert engine.tokenizer.options == [passed]


async def test_an_answer_that_was_begun_is_continued() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    messages = [Message(role="user", content="Hi"), Message(role="assistant", content="Hello, I am")]
    ids = chat.prompt_tokens(tokenizer, messages, TemplateOptions(continue_final_message=True))
    assert tokenizer is not None and tokenizer.decode(ids).endswith("assistant\nHello, I am")


@pytest.mark.parametrize(
    "rendered",
    [
        "{{ message.content }}",
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
        "{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}",
    ],
)
def test_templates_get_contents_in_the_form_that_they_render(rendered: str) -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    tokenizer.chat_template = f"{{% for message in messages %}}<|im_start|>{{{{ message.role }}}} {rendered}{{% endfor %}}"
    contents = ["Be kind.", "Hello there", "", "I am"]
    messages = [Message(role="system" if not place else "user", content=content) for place, content in enumerate(contents)]
    ids = chat.prompt_tokens(tokenizer, messages, TemplateOptions())
    expected = "".join(f"<|im_start|>{message.role} {message.content}" for message in messages)
    assert tokenizer.decode(ids) == expected
    continued = [*messages, Message(role="assistant", content="I say")]
    ids = chat.prompt_tokens(tokenizer, continued, TemplateOptions(continue_final_message=True))
    assert tokenizer.decode(ids) == f"{expected}<|im_start|>assistant I say"


@pytest.mark.parametrize("content", ["abcde", [{"type": "text", "text": "abcde"}]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prediction_reaches_the_engine_and_usage_tells_what_came_of_it(
    client: httpx.AsyncClient, engine: FakeEngine, content: Any, stream: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await client.post(CHAT, json=chat_body(prediction={"type": "content", "content": content}, **options))
    usage = (events(response)[-1] if stream else response.json())["usage"]
    assert engine.requests[0].prediction == tuple(map(ord, "abcde"))
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 2)
