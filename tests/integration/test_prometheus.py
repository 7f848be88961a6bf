"""A real Prometheus scrapes a real server and an edge: every panel and every alert finds what it asks for."""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from websockets.sync.client import connect

from speculative.edge_export import export_edge
from tests.app.sessions.redis_server import redis_server
from tests.app.test_dashboards import DASHBOARDS, PROMETHEUS, ROOT, table
from tests.integration.conftest import Server, start_server, stop_server

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="needs prometheus and promtool (apt-get install prometheus)",
    ),
]
ALERTS: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
QUERIES = {f"{board['title']}: {panel['title']}: {e}": e for board in DASHBOARDS for panel, e in table.queries(board)} | {
    rule["alert"]: re.sub(r"\s(?:==|<|>)\s[\d.]+", "", rule["expr"]).replace(" unless ", " and ") for rule in ALERTS
}


def promtool(*arguments: str | Path) -> str:
    run = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_promtool_finds_nothing_wrong() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", PROMETHEUS / "alerts.yml")
    assert "SUCCESS" in promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    cases = ROOT / "tests" / "prometheus" / "alerts_test.yml"
    assert "SUCCESS" in promtool("test", "rules", cases)
    expected = [
        (each["alertname"], bool(each.get("exp_alerts")))
        for test in yaml.safe_load(cases.read_text())["tests"]
        for each in test["alert_rule_test"]
    ]
    assert {name for name, fires in expected if fires} == {rule["alert"] for rule in ALERTS}
    assert {name for name, fires in expected if not fires} == {rule["alert"] for rule in ALERTS}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Server]:
    with redis_server() as redis:
        server = start_server("--num-threads", "1", "--redis-url", redis.url)
        yield server
        stop_server(server)


@pytest.fixture(scope="module")
def edge(loaded: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = tmp_path_factory.mktemp("bundle") / "edge"
    export_edge("bundled", "bundled", bundle)
    address = loaded.root_url.replace("http", "ws", 1)
    server = start_server("--server", address, "--bundle", str(bundle), "--compile", "off", "--num-threads", "1", command="edge")
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def prometheus(loaded: Server, edge: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Prometheus with our alerts, scraping both once a second; its URL."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    targets = [each.root_url.removeprefix("http://") for each in (loaded, edge)]
    config["scrape_configs"] = [{"job_name": "moaserve", "static_configs": [{"targets": targets}]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            until(lambda: process.poll() is None and is_ready(f"http://{address}"), (folder / "log").read_text)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool], why: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)


def ask(server: Server, **extra: Any) -> int:
    body = {"messages": [{"role": "user", "content": "Book a table for two."}], "temperature": 0, "max_tokens": 40} | extra
    return httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=60).status_code


def respond(server: Server, **extra: Any) -> str:
    """One turn of a conversation that the server keeps; its id."""
    answer = httpx.post(f"{server.base_url}/responses", json={"input": "Hello.", "max_output_tokens": 8} | extra, timeout=60)
    return str(answer.json()["id"])


def confuse(server: Server) -> None:
    """Tell a server what no edge would."""
    with connect(server.root_url.replace("http", "ws", 1) + "/v1/speculative/sessions") as socket:
        socket.send(b"?")
        assert socket.recv(timeout=30)


def samples(prometheus: str, expression: str) -> list[float]:
    """An expression's values now, with Grafana's variables set as on a dashboard; those that are no number are left out."""
    for name, value in {"model_name": ".*", "instance": ".*", "__rate_interval": "1m", "__range": "1h"}.items():
        expression = expression.replace(f"${name}", value)
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    values = [float(sample["value"][1]) for sample in answer["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def test_every_panel_and_alert_has_data_after_a_short_load(loaded: Server, edge: Server, prometheus: str) -> None:
    until(lambda: samples(prometheus, "up") == [1.0, 1.0], lambda: "Prometheus does not scrape server and edge")

    def empty() -> list[str]:
        return [name for name, query in QUERIES.items() if not samples(prometheus, query)]

    def answered() -> bool:
        """Some load at each try: a rate wants two scrapes with work between them."""
        assert ask(loaded) == 200
        assert ask(loaded, max_tokens=0) == 400
        respond(loaded, previous_response_id=respond(loaded))
        assert ask(edge) == 200
        confuse(loaded)
        return not empty()

    until(answered, empty)
    rules = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"][0]["rules"]
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in ALERTS}
    firing = {alert["labels"]["alertname"] for alert in httpx.get(f"{prometheus}/api/v1/alerts").json()["data"]["alerts"]}
    assert firing == set()


def test_dashboards_show_no_metric_that_nobody_tells(loaded: Server, edge: Server) -> None:
    text = "".join(httpx.get(f"{server.root_url}/metrics").text for server in (loaded, edge))
    told = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    shown = {name for query in QUERIES.values() for name in table.metrics_of(query, table.metrics())}
    assert len(shown) > 25
    assert {name for name in shown if not {name, f"{name}_total"} & told} == set()


def test_grafanas_variables_find_the_model_and_the_servers(loaded: Server, edge: Server, prometheus: str) -> None:
    until(lambda: samples(prometheus, "moaserve_engine_up") == [1.0, 1.0], lambda: "Prometheus does not scrape server and edge")
    instances = sorted(each.root_url.removeprefix("http://") for each in (loaded, edge))
    for label, values in (("model_name", ["concierge"]), ("instance", instances)):
        answer = httpx.get(f"{prometheus}/api/v1/label/{label}/values", params={"match[]": "moaserve_engine_up"}).json()
        assert answer["data"] == values
