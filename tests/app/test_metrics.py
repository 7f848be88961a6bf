"""What Prometheus sees, and the probes."""

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.main import create_app
from app.settings import Settings
from tests.app.fakes import FakeEngine, chat_body

CHAT = "/v1/chat/completions"


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels but model_name, which every one has to carry."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            samples[(sample.name.removeprefix("moaserve_"), *labels.values())] = sample.value
    return samples


async def test_one_request_counts_once_everywhere(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json=chat_body())
    samples = await scrape(client)
    expected = {
        ("num_requests_running",): 2,
        ("num_requests_waiting",): 3,
        ("kv_cache_usage_perc",): 0.25,
        ("prompt_tokens_total",): 3,
        ("generation_tokens_total",): 3,
        ("request_success_total", "stop"): 1,
        ("spec_decode_num_drafts_total",): 3,
        ("spec_decode_num_draft_tokens_total",): 12,
        ("spec_decode_num_accepted_tokens_total",): 3,
        # 2, 0 and 1 draft tokens were accepted: the first position in two verifications, the second in one
        ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 2,
        ("spec_decode_num_accepted_tokens_per_pos_total", "1"): 1,
        ("time_to_first_token_seconds_count",): 1,
        ("time_to_first_token_seconds_sum",): 0.25,
        ("inter_token_latency_seconds_count",): 2,
        ("inter_token_latency_seconds_sum",): 1.0,
        ("e2e_request_latency_seconds_count",): 1,
        ("request_acceptance_length_sum",): 2,
        ("request_tokens_per_second_sum",): 2,
        ("request_target_calls_sum",): 5,
    }
    assert {name: samples.get(name) for name in expected} == expected


async def test_metrics_of_two_applications_are_apart(client: httpx.AsyncClient, settings: Any) -> None:
    from app.main import create_app

    create_app(settings, FakeEngine())
    await client.post(CHAT, json=chat_body())
    assert (await scrape(client))[("generation_tokens_total",)] == 3


@pytest.mark.parametrize(("finish", "error", "reason"), [("length", None, "length"), ("stop", RuntimeError(), "error")])
async def test_how_requests_end(
    client: httpx.AsyncClient, engine: FakeEngine, finish: str, error: Exception | None, reason: str
) -> None:
    engine.finish, engine.error = finish, error
    await client.post(CHAT, json=chat_body(stream=True, n=1))
    samples = await scrape(client)
    assert samples[("request_success_total", reason)] == 1
    assert samples[("generation_tokens_total",)] == 3


async def test_probes_follow_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def probe() -> list[int]:
        return [(await client.get(path)).status_code for path in ("/health", "/ready", "/metrics")]

    engine.ready = False  # loading
    assert await probe() == [200, 503, 200]
    engine.ready = True
    assert await probe() == [200, 200, 200]
    engine.busy_seconds = 119
    assert await probe() == [200, 200, 200]
    engine.busy_seconds = 121
    assert await probe() == [503, 200, 200]
    engine.busy_seconds = 0
    engine.ready = engine.alive = False
    assert await probe() == [503, 503, 200]
    assert (await client.get("/health")).json()["error"]["code"] == "service_unavailable"


async def test_the_watchdog_can_be_turned_off(engine: FakeEngine) -> None:
    engine.busy_seconds = 1e9
    transport = httpx.ASGITransport(create_app(Settings(watchdog_timeout=0), engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/health")).status_code == 200


async def test_the_application_starts_and_stops_the_engine(app: Any, engine: FakeEngine) -> None:
    async with app.router.lifespan_context(app):
        assert engine.calls == ["start"]
    assert engine.calls == ["start", "stop"]
