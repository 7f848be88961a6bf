"""What the manifests promise, as far as it shows without a cluster: they keep to their schemas and agree with program and pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import jsonschema
import kubernetes_validate
import pytest
import yaml
from fastapi.routing import APIRoute

from app.cluster_settings import ClusterSettings
from app.routes.health import router
from app.settings import ENV_PREFIX, Settings
from speculative.memory import parse_size

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
STORING_S = 2  # what still waits at shutdown is stored within
Manifest = dict[str, Any]

TEXT = {"type": "string", "minLength": 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
# The fields that we use, as https://prometheus-operator.dev/docs/api-reference/api and
# https://ray-project.github.io/kuberay/reference/api describe them; a field that is not here is a typo or wants a line here.
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "podMetricsEndpoints"],
    "properties": {
        "jobLabel": TEXT,
        "selector": {"type": "object", "additionalProperties": False, "properties": {"matchLabels": LABELS}},
        "podMetricsEndpoints": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "port": TEXT,
                    "path": TEXT,
                    "interval": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                    "scrapeTimeout": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                },
            },
        },
    },
}
GROUP = {"rayStartParams": LABELS, "template": {"type": "object", "required": ["spec"]}}
RAY_SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["serveConfigV2", "rayClusterConfig"],
    "properties": {
        "upgradeStrategy": {"additionalProperties": False, "properties": {"type": {"enum": ["NewCluster", "None"]}}},
        "rayClusterDeletionDelaySeconds": {"type": "integer", "minimum": 0},
        "excludeHeadPodFromServeSvc": {"type": "boolean"},
        "serveConfigV2": TEXT,
        "rayClusterConfig": {
            "type": "object",
            "additionalProperties": False,
            "required": ["headGroupSpec"],
            "properties": {
                "rayVersion": TEXT,
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {"additionalProperties": False, "properties": {"idleTimeoutSeconds": {"type": "integer"}}},
                "headGroupSpec": {"type": "object", "additionalProperties": False, "required": ["template"], "properties": GROUP},
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["groupName", "maxReplicas", "minReplicas", "template"],
                        "properties": GROUP
                        | {"groupName": TEXT}
                        | {name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")},
                    },
                },
            },
        },
    },
}
KUSTOMIZATION = {
    "type": "object",
    "additionalProperties": False,
    "required": ["resources"],
    "properties": {
        "apiVersion": {"const": "kustomize.config.k8s.io/v1beta1"},
        "kind": {"const": "Kustomization"},
        "resources": {"type": "array", "items": TEXT},
        "images": {"type": "array"},
        "patches": {"type": "array"},
    },
}
OTHERS = {"PodMonitor": POD_MONITOR, "RayService": RAY_SERVICE}


def read(path: Path) -> Manifest:
    told = yaml.safe_load(path.read_text())
    assert isinstance(told, dict)
    return told


def build(folder: str) -> dict[tuple[str, str], Manifest]:
    """What `kubectl apply -k` would send, by kind and name: resources, then images, then patches."""
    told = read(FOLDER / folder / "kustomization.yaml")
    found: dict[tuple[str, str], Manifest] = {}
    for each in told["resources"]:
        if each.endswith(".yaml"):
            one = read(FOLDER / folder / each)
            more = {(one["kind"], one["metadata"]["name"]): one}
        else:
            more = build((FOLDER / folder / each).resolve().relative_to(FOLDER).as_posix())
        assert not more.keys() & found.keys()
        found |= more
    for image in told.get("images", []):
        for manifest in found.values():
            for container in containers(manifest):
                if container["image"].split(":")[0] == image["name"]:
                    container["image"] = f"{image['name']}:{image['newTag']}"
    for patch in told.get("patches", []):
        key = (patch["target"]["kind"], patch["target"]["name"])
        found[key] = jsonpatch.apply_patch(found[key], yaml.safe_load(patch["patch"]))
    return found


def templates(manifest: Manifest) -> list[Manifest]:
    """The pods that it makes."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [spec["template"]] if "template" in spec else []


def containers(manifest: Manifest) -> list[Manifest]:
    return [container for template in templates(manifest) for container in template["spec"]["containers"]]


FOLDERS = ("server", "own-model", "gpu", "redis", "monitoring", "ray")
BUILT = {folder: build(folder) for folder in FOLDERS}
MANIFESTS = {f"{folder} {kind} {name}": each for folder, found in BUILT.items() for (kind, name), each in found.items()}
PODS = [
    pytest.param(template, id=f"{name} {number}")
    for name, manifest in MANIFESTS.items()
    for number, template in enumerate(templates(manifest))
]
OURS = [each for each in PODS if any(c["image"].startswith("moaserve:") for c in each.values[0]["spec"]["containers"])]
SERVER = BUILT["server"]["Deployment", "moaserve"]["spec"]["template"]
RAY = BUILT["ray"]["RayService", "moaserve"]["spec"]


def variables(container: Manifest) -> dict[str, Manifest]:
    return {each["name"]: each for each in container.get("env", [])}


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_keeps_to_its_schema(name: str) -> None:
    manifest = MANIFESTS[name]
    if schema := OTHERS.get(manifest["kind"]):
        jsonschema.validate(manifest["spec"], schema)
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]}
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_pods_of_the_ray_service_keep_to_their_schema() -> None:
    found = templates(BUILT["ray"]["RayService", "moaserve"])
    assert len(found) == 2
    for number, template in enumerate(found):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": f"pod-{number}"}, "template": template}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("change", [("replica", 1), ("template", None)])
def test_the_schemas_see_mistakes(change: tuple[str, object]) -> None:
    for kind in (("Deployment", "moaserve"), ("RayService", "moaserve")):
        manifest = BUILT["server" if kind[0] == "Deployment" else "ray"][kind]
        spec = manifest["spec"] if kind[0] == "Deployment" else manifest["spec"]["rayClusterConfig"]["headGroupSpec"]
        wrong = {name: value for name, value in {**spec, change[0]: change[1]}.items() if value is not None}
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            if kind[0] == "Deployment":
                kubernetes_validate.validate({**manifest, "spec": wrong}, kubernetes_validate.latest_version(), strict=True)
            else:
                cluster = {**manifest["spec"]["rayClusterConfig"], "headGroupSpec": wrong}
                jsonschema.validate({**manifest["spec"], "rayClusterConfig": cluster}, RAY_SERVICE)


def test_every_file_belongs_to_something_that_can_be_applied() -> None:
    listed = set()
    for path in FILES:
        if path.name == "kustomization.yaml":
            told = read(path)
            jsonschema.validate(told, KUSTOMIZATION)
            listed |= {(path.parent / each).resolve() for each in told["resources"]}
    assert {path for path in FILES if path.name != "kustomization.yaml"} | {
        FOLDER / "redis",
        FOLDER / "server",
        FOLDER / "own-model",
    } == listed
    assert {path.parent.name for path in FILES} == set(FOLDERS)


@pytest.mark.parametrize("pod", OURS)
def test_every_variable_of_ours_is_a_setting_with_a_value_that_it_takes(
    pod: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = pod["spec"]["containers"][0]
    keys = tmp_path / "api_keys"
    keys.write_text("key\n")
    found = {name: each for name, each in variables(container).items() if name.startswith(ENV_PREFIX)}
    assert found
    for name, each in found.items():
        value = each.get("value")
        if value is None:  # a limit of the container, told in bytes
            value = str(parse_size(container["resources"]["limits"]["memory"].rstrip("B")))
            assert each["valueFrom"]["resourceFieldRef"] == {"containerName": container["name"], "resource": "limits.memory"}
        monkeypatch.setenv(name, str(keys) if name == "MOASERVE_API_KEY_FILE" else value)
    settings = Settings()
    assert settings.redis_url is not None and settings.api_key_file == keys


def test_a_gpus_memory_is_not_limited_by_that_of_its_container() -> None:
    here, there = (variables(containers(BUILT[folder]["Deployment", "moaserve"])[0]) for folder in ("own-model", "gpu"))
    assert here.keys() - there.keys() == {"MOASERVE_MEMORY_LIMIT"}


@pytest.mark.parametrize("pod", PODS)
def test_every_pod_is_confined(pod: Manifest) -> None:
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


@pytest.mark.parametrize("pod", PODS)
def test_services_give_no_pod_variables_that_look_like_settings(pod: Manifest) -> None:
    assert pod["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("pod", OURS)
def test_our_pods_run_as_the_image_does_and_can_write_where_it_must(pod: Manifest) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    spec = pod["spec"]
    user, group = spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]
    assert f"\nUSER {user}:{group}\n" in dockerfile and spec["securityContext"]["fsGroup"] == group
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    for path in ("/cache", "/tmp"):
        assert "emptyDir" in volumes[mounts[path]["name"]] and not mounts[path].get("readOnly")
    assert "HOME=/cache" in dockerfile


@pytest.mark.parametrize("pod", OURS)
def test_keys_are_read_where_the_secret_is_mounted(pod: Manifest) -> None:
    container = pod["spec"]["containers"][0]
    path = Path(variables(container)["MOASERVE_API_KEY_FILE"]["value"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == mounts[str(path.parent)]]
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert f"create secret generic {volume['secret']['secretName']} --from-file={path.name}" in page


@pytest.mark.parametrize("pod", OURS)
def test_running_requests_get_their_time_when_a_pod_ends(pod: Manifest) -> None:
    container = pod["spec"]["containers"][0]
    shutdown = int(variables(container)["MOASERVE_SHUTDOWN_TIMEOUT"]["value"])
    waiting = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["spec"]["terminationGracePeriodSeconds"] > waiting + shutdown + STORING_S


def test_probes_ask_for_what_the_server_has_at_its_port() -> None:
    container = SERVER["spec"]["containers"][0]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == variables(container)["MOASERVE_PORT"]["value"]
    paths = {route.path for route in router.routes if isinstance(route, APIRoute)}
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert [probe["path"] for probe in probes] == ["/ready", "/ready", "/health"]
    assert {probe["path"] for probe in probes} <= paths
    assert {probe["port"] for probe in probes} == {port["name"]}
    startup = container["startupProbe"]
    period = re.search(r"--start-period=(\d+)m", (ROOT / "Dockerfile").read_text())
    assert period is not None and startup["periodSeconds"] * startup["failureThreshold"] == 60 * int(period[1])


def selected(selector: dict[str, str]) -> Iterator[Manifest]:
    """Pods with such labels, of all folders."""
    for pod in PODS:
        template = pod.values[0]
        if selector.items() <= template["metadata"]["labels"].items():
            assert isinstance(template, dict)
            yield template


@pytest.mark.parametrize(
    "name", [name for name in MANIFESTS if name.split()[1] in ("Service", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy")]
)
def test_selectors_find_pods_and_their_ports(name: str) -> None:
    spec = MANIFESTS[name]["spec"]
    selector = spec.get("selector") or spec["podSelector"]
    found = list(selected(selector.get("matchLabels", selector)))
    assert found
    named = {port["name"]: port["containerPort"] for pod in found for c in pod["spec"]["containers"] for port in c["ports"]}
    asked = [port["targetPort"] for port in spec.get("ports", [])]
    asked += [endpoint["port"] for endpoint in spec.get("podMetricsEndpoints", [])]
    asked += [port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])]
    assert {port for port in asked if port not in named and port not in named.values()} == set()


def test_the_autoscaler_has_what_it_scales() -> None:
    target = BUILT["server"]["HorizontalPodAutoscaler", "moaserve"]["spec"]["scaleTargetRef"]
    deployment = BUILT["server"][target["kind"], target["name"]]
    assert target["apiVersion"] == deployment["apiVersion"]
    assert "replicas" not in deployment["spec"]  # applying it again would undo what the autoscaler did


def test_servers_find_redis() -> None:
    service = BUILT["redis"]["Service", "moaserve-redis"]
    url = f"redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/0"
    for pod in OURS:
        assert variables(pod.values[0]["spec"]["containers"][0])["MOASERVE_REDIS_URL"]["value"] == url
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]
    (redis,) = containers(BUILT["redis"]["Deployment", "moaserve-redis"])
    assert redis["image"] == re.sub(r"\$\{\w+:-(.*)\}", r"\1", compose["image"])
    assert [word for word in redis["args"] if not word.endswith("mb")] == [
        word for word in compose["command"] if "REDIS" not in word
    ]


def test_redis_has_room_for_what_servers_keep() -> None:
    (redis,) = containers(BUILT["redis"]["Deployment", "moaserve-redis"])
    most = parse_size(redis["args"][redis["args"].index("--maxmemory") + 1].removesuffix("b") + "iB")  # Redis' mb are MiB
    kept = 2**30 + Settings().store_max_bytes
    assert 1.2 * kept <= most < parse_size(redis["resources"]["limits"]["memory"])


def test_images_are_those_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    names = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", services[name]["image"]) for name in ("moaserve", "moaserve-gpu")}
    assert containers(BUILT["server"]["Deployment", "moaserve"])[0]["image"] == names["moaserve"]
    assert containers(BUILT["gpu"]["Deployment", "moaserve"])[0]["image"] == names["moaserve-gpu"]
    assert {each["image"] for each in containers(BUILT["ray"]["RayService", "moaserve"])} == {names["moaserve"] + "-ray"}


def test_the_monitor_names_the_job_that_alerts_ask_for() -> None:
    label = BUILT["monitoring"]["PodMonitor", "moaserve"]["spec"]["jobLabel"]
    job = SERVER["metadata"]["labels"][label]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy/prometheus/alerts.yml").read_text()


def test_all_ray_pods_are_told_the_same() -> None:
    head, worker = templates(BUILT["ray"]["RayService", "moaserve"])
    assert head["spec"]["containers"][0]["env"] == worker["spec"]["containers"][0]["env"]
    assert head["spec"]["securityContext"] == worker["spec"]["securityContext"]


def test_what_ray_serve_is_told_keeps_to_its_schema() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: pip install ray[serve]")
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(RAY["serveConfigV2"]))
    ports = {port["name"]: port["containerPort"] for port in containers(BUILT["ray"]["RayService", "moaserve"])[1]["ports"]}
    assert config.http_options.port == ports["serve"]


def test_the_ray_service_runs_what_the_serve_config_file_does() -> None:
    ours, file = yaml.safe_load(RAY["serveConfigV2"]), yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    (application,), (of_file,) = ours["applications"], file["applications"]
    for name in ("name", "route_prefix", "import_path"):
        assert application[name] == of_file[name]
    assert {name: ours[name] for name in ("proxy_location", "http_options")} == {
        name: file[name] for name in ("proxy_location", "http_options")
    }
    args = application["args"]
    settings = ClusterSettings(**{name: value for name, value in args.items() if name != "ingresses"})
    worker = next(each for each in RAY["rayClusterConfig"]["workerGroupSpecs"])
    # One replica on a node of two CPUs, with its proxy and an ingress: so as many pods as replicas.
    assert (worker["minReplicas"], worker["maxReplicas"]) == (settings.replicas, settings.max_replicas)


def test_the_servers_metrics_are_scraped_of_one_ray_pod_alone() -> None:
    endpoints = BUILT["monitoring"]["PodMonitor", "moaserve-ray"]["spec"]["podMetricsEndpoints"]
    head, worker = (
        {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        for template in templates(BUILT["ray"]["RayService", "moaserve"])
    )
    assert [endpoint["port"] for endpoint in endpoints] == ["metrics", "http"]
    assert head["http"] == worker["serve"] and "http" not in worker and "metrics" in head and "metrics" in worker


@pytest.mark.parametrize("folder", FOLDERS)
def test_pages_name_every_folder(folder: str) -> None:
    assert f"deploy/kubernetes/{folder}" in (ROOT / "docs/kubernetes.md").read_text()
