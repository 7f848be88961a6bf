"""Chat templates that a server is given, and models that cannot be asked chats."""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from app.commands import serving
from app.deps import Serving
from app.main import create_app
from app.settings import Settings
from models.loader import BUNDLED, load_tokenizer
from tests.app.fakes import FakeEngine, chat_body

TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant] "


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    loaded = load_tokenizer(BUNDLED["target"])
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("marked", ["", "\ufeff"])
async def test_a_template_takes_the_place_of_the_models(tmp_path: Path, tokenizer: Any, marked: str) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(marked + TEMPLATE, encoding="utf-8")
    engine = FakeEngine()
    engine.tokenizer = tokenizer
    transport = httpx.ASGITransport(create_app(Settings(chat_template=file), engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (
            await client.post("/v1/chat/completions", json=chat_body(messages=[{"role": "user", "content": "Good day"}]))
        ).status_code == 200
        information = (await client.get("/tokenizer_info")).json()
    assert tokenizer.decode(engine.requests[0].prompt_token_ids) == f"{tokenizer.bos_token or ''}[user] Good day\n[assistant] "
    assert information["chat_template"] == TEMPLATE


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe{", "cannot be read"),
        (b"Conversation:\n{% for message in messages %}\n{{ message.content }\n", "line 3: unexpected '}'"),
        (b"{% for message in messages %}{{ message.content }}", "line 1: Unexpected end of template"),
    ],
)
def test_files_that_are_no_templates_are_refused_before_a_model_is_loaded(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValidationError, match=why) as caught:
        Settings(chat_template=file)
    assert caught.value.errors()[0]["loc"] == ("chat_template",)


@pytest.mark.parametrize(
    ("template", "path", "warning"),
    [
        ("{{ messages[0].content }}", "chat/completions", None),
        (None, "completions", "has no chat template"),
        ("{{ raise_exception('Only systems may speak') }}", "completions", "Only systems may speak"),
        ("{{ messages[0].content", "completions", "cannot render these messages"),
    ],
)
def test_who_serves_a_model_is_told_at_the_start_that_chats_will_be_refused(
    tokenizer: Any, template: str | None, path: str, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.tokenizer = tokenizer
    tokenizer.chat_template = template
    with caplog.at_level(logging.WARNING):
        assert serving.example(Serving.of(Settings(), engine))[0] == path
    assert [warning in record.getMessage() for record in caplog.records] == ([True] if warning else [])
