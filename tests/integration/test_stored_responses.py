"""Real servers that keep sessions in a real Redis."""

from __future__ import annotations

import signal

import openai
import pytest

from tests.app.sessions.redis_server import redis_server
from tests.integration.conftest import Server, start_server, stop_server

pytestmark = pytest.mark.integration

ASK = "I would like a table for two in San Jose."


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def test_a_conversation_survives_its_server_and_answers_survive_redis() -> None:
    with redis_server("--requirepass", "pass-word") as redis:
        options = [
            "--redis-url",
            f"unix://:pass-word@{redis.socket}",
            "--num-threads",
            "1",
            "--dtype",
            "float32",
            "--redis-timeout",
            "2",
        ]
        server = start_server(*options)
        with client_of(server) as client:
            first = client.responses.create(model="concierge", input=ASK, temperature=0, max_output_tokens=16)
        server.process.kill()
        server.process.wait()
        server.reader.join()
        server.process.stdout.close()

        server = start_server(*options)
        client = client_of(server)
        try:
            second = client.responses.create(
                model="concierge", input="At seven.", previous_response_id=first.id, temperature=0, max_output_tokens=16
            )
            chat = client.chat.completions.create(
                model="concierge",
                messages=[
                    {"role": "user", "content": ASK},
                    {"role": "assistant", "content": first.output_text},
                    {"role": "user", "content": "At seven."},
                ],
                temperature=0,
                max_tokens=16,
            )
            assert second.output_text == chat.choices[0].message.content
            assert server.metric("moaserve_session_store_up") == 1

            redis.signal(signal.SIGSTOP)
            for _ in range(3):
                again = client.responses.create(model="concierge", input=ASK, temperature=0, max_output_tokens=16)
                assert again.output_text == first.output_text
            assert server.metric("moaserve_session_store_up") == 0
            with pytest.raises(openai.BadRequestError, match="Previous response"):
                client.responses.create(model="concierge", input="At seven.", previous_response_id=first.id)
        finally:
            client.close()
            assert stop_server(server) == 0
            redis.signal(signal.SIGCONT)
        assert "pass-word" not in "".join(server.log)
        assert sum("is away" in line for line in server.log) == 1
