"""The image and the stack as `docker compose up` brings them up.

Run with `make test-docker`. It needs an engine and its compose command; the first build takes minutes. Where no images can be
pulled, point PYTHON_IMAGE, REDIS_IMAGE, PROMETHEUS_IMAGE and GRAFANA_IMAGE at stand-ins that the engine has: Debian with Python
3.11, pip and venv; redis-server with redis-cli; prometheus as the entry point, with promtool. A compose file of your own may be
laid over ours: COMPOSE_FILE=docker-compose.yml:yours.yml.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from models.tiles import has_operators
from speculative.edge_export import export_edge

pytestmark = [pytest.mark.docker, pytest.mark.integration]

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "I would like a table for two in San Jose."}]
MINUTES = 60.0


def engine_missing() -> str | None:
    """Why there is no engine to test with, or None."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        return "no Docker engine runs, or this user may not ask it"
    return None


def compose_command() -> list[str] | None:
    """The compose plugin, or the program of its own that came before it."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    return None


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def wait_until_healthy(container: str) -> None:
    """Wait for the engine's own event, from the container's beginning on."""
    began = docker("inspect", "-f", "{{.Created}}", container)
    command = ["docker", "events", "--since", began, "--filter", f"container={container}", "--format", "{{json .}}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as events:
        assert events.stdout is not None
        late = threading.Timer(5 * MINUTES, events.kill)
        late.start()
        try:
            healthy = any('"health_status: healthy"' in event for event in events.stdout)
        finally:
            late.cancel()
            events.kill()
    assert healthy, docker("inspect", "-f", "{{json .State}}", container) + "\n" + docker("logs", container)


def until(condition: Callable[[], object], timeout: float = 2 * MINUTES) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.5)  # Prometheus asks every few seconds and tells nobody


@dataclass(frozen=True)
class Stack:
    """A compose project of its own, on ports that the engine chose."""

    command: list[str]
    environment: dict[str, str]

    def compose(self, *arguments: str, files: str = "") -> str:
        environment = dict(self.environment)
        environment["COMPOSE_FILE"] += files
        run = subprocess.run([*self.command, *arguments], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return run.stdout.strip()

    def container(self, service: str) -> str:
        return self.compose("ps", "-q", service)

    def url(self, service: str, port: int) -> str:
        return "http://" + self.compose("port", service, str(port))

    def inside(self, service: str, *command: str) -> str:
        return docker("exec", self.container(service), *command)


@pytest.fixture(scope="module")
def project() -> Iterator[Stack]:
    """The stack, built but not started; gone afterwards, its volumes too."""
    if reason := engine_missing():
        pytest.skip(reason)
    command = compose_command()
    if command is None:
        pytest.skip("neither the compose plugin nor docker-compose is installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOASERVE_")}
    environment |= {name: "0" for name in ("MOASERVE_PORT", "EDGE_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")}
    environment |= {"COMPOSE_PROJECT_NAME": f"moaserve-test-{os.getpid()}", "COMPOSE_PROFILES": "cpu"}
    environment |= {"SERVER_IMAGE": "moaserve:test", "MOASERVE_NUM_THREADS": "1"}
    environment.setdefault("COMPOSE_FILE", "docker-compose.yml")
    stack = Stack(command, environment)
    stack.compose("build", "moaserve")
    try:
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="module")
def stack(project: Stack) -> Stack:
    """Server, Redis and Prometheus, healthy."""
    project.compose("up", "--detach", "moaserve", "redis", "prometheus")
    for service in ("redis", "prometheus", "moaserve"):
        wait_until_healthy(project.container(service))
    return project


@pytest.fixture
def run_image(project: Stack) -> Iterator[Callable[..., str]]:
    """Starts the image by itself, `docker run`'s options first; the container's id."""
    containers = []

    def start(*options: str, arguments: tuple[str, ...] = ()) -> str:
        command = ("run", "--detach", "--publish", "127.0.0.1::8000", "--env", "MOASERVE_NUM_THREADS=1", *options)
        containers.append(docker(*command, project.environment["SERVER_IMAGE"], *arguments))
        return containers[-1]

    yield start
    for container in containers:
        docker("rm", "--force", "--volumes", container)


def published(container: str) -> str:
    return "http://" + docker("port", container, "8000").splitlines()[0]


def test_it_answers_chats_and_probes(stack: Stack) -> None:
    url = stack.url("moaserve", 8000)
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/ready").status_code == 200
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    options = {"model": "concierge", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert whole.choices[0].message.content
    assert whole.choices[0].message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_prometheus_reads_its_metrics(stack: Stack) -> None:
    httpx.post(f"{stack.url('moaserve', 8000)}/v1/completions", json={"prompt": "Hi", "max_tokens": 4}, timeout=MINUTES)
    url = stack.url("prometheus", 9090)

    def targets() -> list[dict]:
        return httpx.get(f"{url}/api/v1/targets").json()["data"]["activeTargets"]

    def tokens() -> list[dict]:
        query = {"query": "sum(moaserve_generation_tokens_total) > 0"}
        return httpx.get(f"{url}/api/v1/query", params=query).json()["data"]["result"]

    until(lambda: any(target["health"] == "up" and "moaserve:8000" in target["scrapeUrl"] for target in targets()))
    until(tokens)


def test_an_edge_answers_as_its_server_does(stack: Stack, tmp_path: Path) -> None:
    export_edge("bundled", "bundled", tmp_path / "bundle")
    stack.environment["BUNDLE_DIR"] = str(tmp_path / "bundle")
    stack.compose("up", "--detach", "--no-deps", "edge")
    wait_until_healthy(stack.container("edge"))
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    own, edges = (httpx.post(f"{stack.url(name, 8000)}/v1/chat/completions", json=body).json() for name in ("moaserve", "edge"))
    assert own["choices"] == edges["choices"]
    assert edges["metrics"]["edge"]["num_server_calls"] > 1 and edges["metrics"]["edge"]["offline_tokens"] == 0
    prometheus = stack.url("prometheus", 9090)
    until(lambda: httpx.get(f"{prometheus}/api/v1/query", params={"query": "moaserve_edge_server_up"}).json()["data"]["result"])


def test_redis_is_a_bounded_cache_that_the_server_alone_reaches(stack: Stack) -> None:
    reached = stack.inside("moaserve", "python", "-c", "import redis; print(redis.Redis(host='redis').ping())")
    assert reached == "True"
    said = stack.inside("redis", "redis-cli", "config", "get", "max*policy").split()
    assert said == ["maxmemory-policy", "allkeys-lru"]
    assert int(stack.inside("redis", "redis-cli", "config", "get", "maxmemory").split()[1]) == 512 * 2**20
    assert json.loads(docker("inspect", "-f", "{{json .HostConfig.PortBindings}}", stack.container("redis"))) in (None, {})
    networks = {service: json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", stack.container(service)))
                for service in ("redis", "prometheus")}  # fmt: skip
    assert not networks["redis"].keys() & networks["prometheus"].keys()


@pytest.mark.parametrize("service", ["moaserve", "redis", "prometheus"])
def test_no_service_has_rights_it_could_lose(stack: Stack, service: str) -> None:
    status = dict(line.split(":\t", 1) for line in stack.inside(service, "cat", "/proc/1/status").splitlines())
    assert "0" not in status["Uid"].split()
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    with pytest.raises(subprocess.CalledProcessError):
        stack.inside(service, "touch", "/written")


def test_the_image_holds_no_build_tools(project: Stack) -> None:
    look = "! command -v g++ && id -u && ls -A /cache"
    said = docker("run", "--rm", "--entrypoint", "sh", project.environment["SERVER_IMAGE"], "-c", look)
    assert said == "10001"  # and no file of pip's or anyone's in the cache


def test_a_mounted_model_is_served_to_any_user_and_stops_in_order(run_image: Callable[..., str]) -> None:
    confined = ("--user", "4321:4321", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/cache", "--cap-drop", "ALL")
    model = f"{ROOT / 'models' / 'pretrained' / 'concierge'}:/models/mine:ro"
    container = run_image("--volume", model, *confined, arguments=("--model", "/models/mine", "--drafter", "ngram"))
    wait_until_healthy(container)
    url = published(container)
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8}, timeout=MINUTES)
    assert answer.json()["choices"][0]["message"]["content"]
    if has_operators():
        said = subprocess.run(["docker", "logs", container], check=True, capture_output=True, text=True)
        assert "by our operators (" in said.stdout + said.stderr
    docker("stop", "--time", "60", container)
    assert docker("inspect", "-f", "{{.State.ExitCode}}", container) == "0"


def test_it_stops_in_order_while_it_loads(run_image: Callable[..., str]) -> None:
    container = run_image()
    with subprocess.Popen(["docker", "logs", "--follow", container], stderr=subprocess.PIPE, text=True) as log:
        assert log.stderr is not None
        assert log.stderr.readline().startswith("Loading")
        docker("stop", "--time", "60", container)
    assert docker("inspect", "-f", "{{.State.ExitCode}}", container) == "0"


def test_a_mistake_ends_the_container_with_its_reason(run_image: Callable[..., str]) -> None:
    container = run_image(arguments=("--model", "/models/absent"))
    assert docker("wait", container) == "1"
    log = subprocess.run(["docker", "logs", container], capture_output=True, text=True, check=True).stderr
    assert "/models/absent" in log and "Traceback" not in log


def test_keys_come_from_a_file(project: Stack, stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one\n")
    (tmp_path / "keys").chmod(0o644)
    environment = project.environment | {"API_KEYS_FILE": str(tmp_path / "keys"), "GRAFANA_PASSWORD_FILE": str(tmp_path / "keys")}
    environment["COMPOSE_PROJECT_NAME"] += "-keys"
    keyed = Stack(project.command, environment)
    overlay = ":docker-compose.secrets.yml"
    try:
        keyed.compose("up", "--detach", "moaserve", files=overlay)
        wait_until_healthy(keyed.container("moaserve"))
        url = keyed.url("moaserve", 8000)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-one"}).status_code == 200
        assert "sk-one" not in docker("inspect", keyed.container("moaserve"))
    finally:
        keyed.compose("down", "--volumes", "--timeout", "5", files=overlay)


def test_grafana_has_the_dashboards(stack: Stack) -> None:
    image = yaml.safe_load(stack.compose("config"))["services"]["grafana"]["image"]
    if all(subprocess.run(["docker", *ask, image], capture_output=True).returncode for ask in (["image", "inspect"], ["pull"])):
        pytest.skip(f"{image} cannot be pulled here")
    files = list((ROOT / "grafana" / "dashboards").glob("*.json"))
    assert files
    stack.compose("up", "--detach", "grafana")
    wait_until_healthy(stack.container("grafana"))
    with httpx.Client(base_url=stack.url("grafana", 3000), auth=("admin", "admin")) as client:
        found = {board["title"] for board in client.get("/api/search", params={"type": "dash-db"}).json()}
        assert found == {json.loads(file.read_text())["title"] for file in files}
        for source in client.get("/api/datasources").json():
            assert client.get(f"/api/datasources/uid/{source['uid']}/health").json()["status"] == "OK"
