"""What the image and the compose file promise, as far as it shows without an engine."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from app.edge_settings import EdgeSettings
from app.settings import ENV_PREFIX, HttpSettings, Settings
from tests.deploy.test_systemd import ENDING_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SECRETS = yaml.safe_load((ROOT / "docker-compose.secrets.yml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def default(value: str) -> str:
    """A value of the compose file as it is where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_every_mounted_path_exists() -> None:
    mounts = [default(mount).split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])]
    paths = {mount for mount in mounts if mount.startswith(".")}
    assert paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {mount for mount in mounts if not mount.startswith(".")} <= set(COMPOSE["volumes"])


def test_every_variable_of_ours_is_a_setting() -> None:
    services = [*SERVICES.items(), *SECRETS["services"].items()]
    told: dict[type[HttpSettings], set[str]] = {Settings: set(), EdgeSettings: set()}
    for service, each in services:
        kind = EdgeSettings if service == "edge" else Settings
        told[kind] |= {name for name in each.get("environment", {}) if name.startswith(ENV_PREFIX)}
    assert "MOASERVE_API_KEY_FILE" in told[Settings] and "MOASERVE_BUNDLE" in told[EdgeSettings]
    for kind, variables in told.items():
        assert variables - {ENV_PREFIX + name.upper() for name in kind.model_fields} == set()


def test_every_image_is_pinned_and_can_be_replaced() -> None:
    images = [service["image"] for service in SERVICES.values()]
    images += [service["build"]["args"]["PYTHON_IMAGE"] for service in SERVICES.values() if "build" in service]
    for image in images:
        assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*\}", image), image
    python = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert python is not None
    assert {default(image) for image in images if "python" in image} == {python[1]}


def test_versions_agree_with_the_package() -> None:
    version = PROJECT["project"]["version"]
    assert f"\nARG VERSION={version}\n" in DOCKERFILE
    assert default(SERVICES["moaserve"]["image"]) == default(SERVICES["edge"]["image"]) == f"moaserve:{version}"
    assert default(SERVICES["moaserve-gpu"]["image"]) == f"moaserve:{version}-cuda"


def test_torch_comes_from_where_the_makefile_takes_it() -> None:
    index = re.search(r"^CPU_TORCH_INDEX := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert index is not None and f"--index-url {index[1]} " in DOCKERFILE


def test_operators_are_built_into_what_is_installed_and_the_compiler_stays_behind() -> None:
    building, final = re.split(r"^FROM .*$", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert building.index("--target /opt/moaserve .") < building.index(
        "cd /opt/moaserve; /opt/venv/bin/python -m models.prebuilding"
    )
    assert "models.prebuilding" not in final and final.count("g++") == 1
    assert final.index('if [ "$WITH_COMPILER" = 1 ]') < final.index("g++")


def test_nothing_is_open_to_other_machines_unless_asked() -> None:
    published = [default(port) for service in SERVICES.values() for port in service.get("ports", [])]
    assert sorted(port for port in published) == [
        "127.0.0.1:3000:3000",
        "127.0.0.1:8000:8000",
        "127.0.0.1:8000:8000",  # the other server: of the two only one starts
        "127.0.0.1:8001:8000",
        "127.0.0.1:9090:9090",
    ]
    assert SERVICES["redis"]["networks"] == ["sessions"]
    assert COMPOSE["networks"]["sessions"]["internal"]


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "MOASERVE_HOST" in service.get("environment", {})])
class TestWhatServesTheApi:
    def test_keys_from_files_are_wanted_by_all_that_can_be_opened_to_others(self, name: str) -> None:
        assert "${BIND_ADDRESS:-" in SERVICES[name]["ports"][0]
        secured = SECRETS["services"][name]
        assert secured["secrets"] == ["api_keys"]
        assert secured["environment"]["MOASERVE_API_KEY_FILE"] == "/run/secrets/api_keys"

    def test_who_may_ask_is_said_once_for_all(self, name: str) -> None:
        told = {"MOASERVE_" + each for each in ("API_KEY", "RATE_LIMIT", "ALLOWED_HOSTS", "CORS_ORIGINS", "FORWARDED_ALLOW_IPS")}
        assert told | {"MOASERVE_SHUTDOWN_TIMEOUT"} <= SERVICES[name]["environment"].keys()

    def test_running_requests_have_their_time_to_finish(self, name: str) -> None:
        grace = int(default(SERVICES[name]["stop_grace_period"]).removesuffix("s"))
        assert grace >= Settings.model_fields["shutdown_timeout"].default + ENDING_S


def test_what_has_one_name_is_built_in_one_way() -> None:
    builds: dict[str, list[object]] = {}
    for service in SERVICES.values():
        if "build" in service:
            builds.setdefault(service["image"], []).append(service["build"])
    assert len(builds["${SERVER_IMAGE:-moaserve:0.1.0}"]) == 2
    assert all(build == of_one[0] for of_one in builds.values() for build in of_one)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert service["pids_limit"] and service["mem_limit"]
    assert "healthcheck" in service or ("build" in service and "HEALTHCHECK" in DOCKERFILE)


def test_one_server_starts() -> None:
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert profiles == {"moaserve": ["cpu"], "moaserve-gpu": ["gpu"], "edge": ["edge"]}
    assert "\nCOMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()


def test_the_build_sees_every_package() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {name.removesuffix(".*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= sent
    assert all((ROOT / path).exists() for path in sent)


class Probes(BaseHTTPRequestHandler):
    """Answers as `server.statuses` says, and remembers the hosts it was asked for."""

    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
        self.send_response(self.server.statuses[self.path])  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def probes() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Probes) as server:
        server.hosts, server.statuses = [], {"/ready": 200, "/health": 200}  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check_health(port: int, **environment: str) -> int:
    command = [sys.executable, "-I", str(ROOT / "deploy/docker/healthcheck.py")]
    return subprocess.run(command, env={"MOASERVE_PORT": str(port), **environment}, stdout=subprocess.DEVNULL).returncode


@pytest.mark.parametrize(("ready", "health", "code"), [(200, 200, 0), (503, 200, 1), (200, 503, 1)])
def test_the_health_check_asks_both_probes(probes: ThreadingHTTPServer, ready: int, health: int, code: int) -> None:
    probes.statuses = {"/ready": ready, "/health": health}  # type: ignore[attr-defined]
    assert check_health(probes.server_port) == code


def test_the_health_check_asks_for_a_host_that_is_answered(probes: ThreadingHTTPServer) -> None:
    assert check_health(probes.server_port, MOASERVE_ALLOWED_HOSTS="*.example.org,moaserve") == 0
    assert probes.hosts == ["health.example.org"] * 2  # type: ignore[attr-defined]


def test_the_health_check_fails_where_nothing_listens(probes: ThreadingHTTPServer) -> None:
    probes.shutdown()
    probes.server_close()
    assert check_health(probes.server_port) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_health_check_takes_the_servers_own_certificate(probes: ThreadingHTTPServer, tmp_path: Path) -> None:
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=example.org"]
    subprocess.run([*making, "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    probes.socket = context.wrap_socket(probes.socket, server_side=True)
    assert check_health(probes.server_port, MOASERVE_SSL_CERTFILE=str(tmp_path / "cert.pem")) == 0
