"""What Prometheus sees, and the probes."""

import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from app.errors import ApiError
from app.main import create_app
from app.metric_names import ERROR_CODES
from app.metrics import Metrics
from app.recording import FLUSH_S, POSITIONS
from app.settings import Settings
from speculative.config import EdgeStatus
from speculative.errors import EngineNotReadyError, EngineStepError
from speculative.request import RequestOutput, RequestStats
from tests.app.fakes import CONTEXT, FakeEngine, chat_body

CHAT = "/v1/chat/completions"


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels but model_name, which every one of ours has to carry."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        if not family.name.startswith("moaserve_"):
            continue
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
        ("prefix_cache_queries_total",): 3,
        ("prefix_cache_hits_total",): 2,
        ("request_queue_time_seconds_sum",): 0.125,
        ("request_prefill_time_seconds_sum",): 0.125,
        ("request_decode_time_seconds_sum",): 1,
        ("request_prompt_tokens_sum",): 3,
        ("request_generation_tokens_sum",): 3,
        ("engine_up",): 1,
        ("engine_ready",): 1,
        ("engine_busy_seconds",): 0,
        ("spec_decode_max_depth",): 8,
        ("spec_decode_max_nodes",): 9,
        ("engine_steps_total",): 7,
        ("engine_step_seconds_total", "draft"): 1.5,
        ("engine_step_seconds_total", "verify"): 2.5,
        ("memory_planned_bytes", "kv_cache"): 4096,
        ("model_info", "cpu", "moa", "float32", str(CONTEXT), version("moaserve")): 1,
    }
    assert {name: samples.get(name) for name in expected} == expected


@pytest.mark.parametrize(("alive", "told"), [(True, {}), (False, {("engine_up",): 0})])
async def test_without_a_model_it_is_told_whether_there_will_be_one(
    app: Any, engine: FakeEngine, alive: bool, told: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def info(_: FakeEngine) -> None:
        raise EngineNotReadyError("The model is still loading.")

    monkeypatch.setattr(FakeEngine, "info", property(info))
    monkeypatch.setattr(engine, "alive", alive)
    text = generate_latest(app.state.serving.metrics.registry).decode()
    gauges = [sample for family in text_string_to_metric_families(text) if family.type == "gauge" for sample in family.samples]
    assert {(sample.name.removeprefix("moaserve_"),): sample.value for sample in gauges if "moaserve" in sample.name} == told


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


async def test_series_that_have_not_begun_stand_at_0(client: httpx.AsyncClient) -> None:
    """Rates would miss the first event of a series that begins with it."""
    samples = await scrape(client)
    assert samples[("generation_tokens_total",)] == 0
    assert samples[("request_success_total", "error")] == 0
    assert samples[("request_errors_total", "service_unavailable", "503")] == 0
    assert samples[("time_to_first_token_seconds_count",)] == 0


async def test_nothing_is_told_of_a_model_that_is_not_there(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.ready = False
    await client.post(CHAT, json=chat_body())
    text = (await client.get("/metrics")).text
    assert "moaserve_num_requests_running{" not in text
    assert 'moaserve_request_errors_total{code="service_unavailable",model_name="",status="503"} 1.0' in text


def test_a_long_request_is_counted_while_it_runs() -> None:
    metrics = Metrics()
    recorder = metrics.request("tiny")
    counted = []
    for step in range(1, 4):
        stats = RequestStats(
            prompt_tokens=5,
            completion_tokens=2 * step,
            num_drafts=step,
            num_draft_tokens=3 * step,
            num_accepted_draft_tokens=step,
            acceptance_histogram=(0, step),
            first_token_time=10.0,
            last_token_time=10 + FLUSH_S * (step - 1),
        )
        recorder.output(RequestOutput("r", (1, 2), "", None, stats))
        counted.append({name: value_of(metrics, name) for name in ("generation_tokens", "spec_decode_num_drafts", "prompt_tokens")})
    assert [each["generation_tokens"] for each in counted] == [2, 4, 6]
    assert [each["spec_decode_num_drafts"] for each in counted] == [1, 2, 3]
    assert [each["prompt_tokens"] for each in counted] == [5, 5, 5]
    recorder.output(RequestOutput("r", (), "", "abort", RequestStats()))  # what a stopping engine says
    recorder.end()
    assert value_of(metrics, "generation_tokens") == 6
    accepted = metrics.registry.get_sample_value(
        "moaserve_spec_decode_num_accepted_tokens_per_pos_total", {"model_name": "tiny", "position": "0"}
    )
    assert accepted == 3


def value_of(metrics: Metrics, name: str) -> float:
    value = metrics.registry.get_sample_value(f"moaserve_{name}_total", {"model_name": "tiny"})
    assert value is not None
    return value


def test_tokens_of_a_step_are_as_many_observations() -> None:
    metrics = Metrics()
    one = metrics.histograms["inter_token_latency_seconds"]
    for amount in (0.001, 0.0011, 0.3, 99.0):
        one.labels("a").observe_equal(amount, 3)
        for _ in range(3):
            one.labels("b").observe(amount)
    (family,) = one.collect()
    values = {label: [s.value for s in family.samples if s.labels["model_name"] == label] for label in "ab"}
    assert values["a"] == pytest.approx(values["b"])


async def test_labels_are_bounded() -> None:
    metrics = Metrics()
    metrics.watch(FakeEngine(), lambda: "tiny")
    metrics.error(418, "teapot")
    metrics.error(418, "coffee")
    recorder = metrics.request("tiny")
    stats = RequestStats(prompt_tokens=1, completion_tokens=500, acceptance_histogram=(0,) * 499 + (1,), last_token_time=1.0)
    recorder.output(RequestOutput("r", (7,) * 500, "", "stop", stats))
    recorder.end()
    text = (await metrics.exposition(""))[0].decode()
    assert 'code="other",model_name="tiny",status="418"} 2.0' in text
    assert f'position="{POSITIONS - 1}"' in text
    assert f'position="{POSITIONS}"' not in text


@pytest.mark.parametrize(
    ("body", "engine_error", "labels"),
    [
        (chat_body(temperature=9), None, ("invalid_value", "400")),
        (chat_body(model="gpt"), None, ("model_not_found", "404")),
        (chat_body(max_tokens=1000), None, ("context_length_exceeded", "400")),
        (chat_body(), EngineStepError(), ("internal_error", "500")),
        (chat_body(stream=True), EngineStepError(), ("internal_error", "500")),
        (chat_body(), RuntimeError(), ("internal_error", "500")),
        (chat_body(stream=True), RuntimeError(), ("internal_error", "500")),
    ],
)
async def test_each_error_counts_once_by_status_and_code(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], engine_error: Exception | None, labels: tuple[str, str]
) -> None:
    engine.error = engine_error
    await client.post(CHAT, json=body)
    await client.get("/no/such/route")
    errors = {name[1:]: value for name, value in (await scrape(client)).items() if name[0] == "request_errors_total" and value}
    assert errors == {labels: 1, ("not_found", "404"): 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_responses_count_once(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.error = EngineStepError()
    await client.post("/v1/responses", json={"model": "tiny", "input": "Hi", "stream": stream})
    assert (await scrape(client))[("request_errors_total", "internal_error", "500")] == 1


async def test_refusals_of_the_guard_count_and_those_of_probes_do_not(engine: FakeEngine) -> None:
    app = create_app(Settings(api_key="secret", served_model_name="tiny"), engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.post(CHAT, json=chat_body())
        engine.alive = engine.ready = False
        assert (await client.get("/health")).status_code == 503
        engine.alive = engine.ready = True
        samples = await scrape(client)
    assert samples[("request_errors_total", "invalid_api_key", "401")] == 1
    assert samples[("request_errors_total", "service_unavailable", "503")] == 0


def test_every_error_code_of_the_api_is_known_to_the_metrics() -> None:
    told = set(
        re.findall(r"""\bcode(?:: str)? ?= ?"([a-z_]+)\"""", "".join(path.read_text() for path in Path("app").rglob("*.py")))
    )
    assert len(told) > 15
    assert told <= ERROR_CODES.keys()
    for kind in ApiError.__subclasses__():
        assert kind.status in ERROR_CODES.values()


async def test_vllm_names_are_the_same_values_beside_ours(engine: FakeEngine) -> None:
    app = create_app(Settings(vllm_metric_names=True), engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.post(CHAT, json=chat_body())
        families = list(text_string_to_metric_families((await client.get("/metrics")).text))

    def values(prefix: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        samples = [sample for family in families for sample in family.samples if sample.name.startswith(prefix)]
        return {(one.name.removeprefix(prefix), frozenset(one.labels.items())): one.value for one in samples}

    ours, theirs = values("moaserve_"), values("vllm:")
    engine_label = ("engine", "0")
    assert all(engine_label in labels for _, labels in theirs)
    for (name, labels), value in theirs.items():
        assert ours[name, labels - {engine_label}] == value
    assert {"num_requests_running", "generation_tokens_total", "time_to_first_token_seconds_bucket"} <= {name for name, _ in theirs}
    finished = frozenset({engine_label, ("model_name", "tiny"), ("finished_reason", "stop")})
    assert theirs["request_success_total", finished] == 1


async def test_vllm_names_are_not_told_unless_asked_for(client: httpx.AsyncClient) -> None:
    assert "vllm:" not in (await client.get("/metrics")).text


async def test_the_process_and_python_are_told_of(client: httpx.AsyncClient) -> None:
    names = {family.name for family in text_string_to_metric_families((await client.get("/metrics")).text)}
    assert {"python_info", "python_gc_collections"} <= names
    if Path("/proc/self/stat").exists():
        assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= names


async def test_they_are_written_off_the_event_loop(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def encode(registry: Collector) -> bytes:
        threads.append(threading.get_ident())
        return generate_latest(registry)

    monkeypatch.setattr("app.metrics.choose_encoder", lambda _accept: (encode, "text/plain"))
    assert ("num_requests_running",) in await scrape(client)
    assert len(threads) == 1 and threads != [threading.get_ident()]


async def test_openmetrics_is_told_to_whoever_asks_for_it(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


@contextmanager
def no_more_files() -> Iterator[None]:
    """None can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_scrape_opens_no_files(client: httpx.AsyncClient) -> None:
    before = await scrape(client)
    with no_more_files():
        assert (await scrape(client)).keys() == before.keys()


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
@pytest.mark.parametrize("version", ["abc", "1.x.0", "1.0.0-rc"])
async def test_a_version_that_is_none_gets_the_plain_format(client: httpx.AsyncClient, kind: str, version: str) -> None:
    response = await client.get("/metrics", headers={"accept": f"{kind}; version={version}"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert not response.text.endswith("# EOF\n")


@pytest.mark.parametrize("version", ["", "2.x", "99", "=", "1.0.0; escaping=?"])
async def test_no_version_is_too_odd(client: httpx.AsyncClient, version: str) -> None:
    for kind in ("application/openmetrics-text", "text/plain"):
        assert (await client.get("/metrics", headers={"accept": f"{kind}; version={version}"})).status_code == 200


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
    engine.edge = EdgeStatus(False, False, None, 0, 0, 0, 0, 0)  # its drafter writes alone
    assert await probe() == [200, 200, 200]
    engine.edge = replace(engine.edge, refuses=True)
    assert await probe() == [200, 503, 200]
    assert (await client.get("/ready")).json()["error"]["code"] == "service_unavailable"
    assert (await client.get("/v1/models")).status_code == 200
    engine.edge = None
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
