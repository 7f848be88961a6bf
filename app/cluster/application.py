"""The Ray Serve application: engines behind an ingress, as a Serve config file names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from ray import serve
from ray.serve.deployment import Application, Deployment
from ray.serve.handle import DeploymentHandle

from app.cluster.fleet import RayFleet
from app.cluster.replica import EngineReplica
from app.cluster.router import router_config
from app.cluster_settings import ClusterSettings
from app.settings import SettingsError
from speculative.replicas.engine import ReplicatedEngine

ENGINE: Final = "engine"
MOST_ONGOING: Final = 100_000
"""Calls that Serve lets a replica have: requests wait in the engine, which knows their priorities."""

SERVES_OWN: Final = frozenset({"address", "config", "forwarded_allow_ips", "host", "port", "ssl_certfile", "ssl_keyfile"})
"""Settings of `moaserve ray` that its own HTTP server follows: here Ray's proxies listen."""

INGRESS_OWN: Final = frozenset({"api_key", "api_key_file", "chat_template", "ssl_certfile", "ssl_keyfile"})
"""Settings that only ingresses follow, and files that are to be where they are; keys stay with who needs them."""


def build(args: Mapping[str, Any]) -> Application:
    """The application of a Serve config file, whose ``args`` are settings of `moaserve ray`, and the number of ``ingresses``.

    Raises SettingsError for settings that Serve has itself. Secrets are better in the environment of Ray's workers
    (MOASERVE_API_KEY, MOASERVE_REDIS_URL).
    """
    if here := sorted(SERVES_OWN & args.keys()):
        raise SettingsError(f"{', '.join(here)}: give these to Ray Serve (http_options), not to the application")
    given = {name: value for name, value in args.items() if name != "ingresses"}
    settings = ClusterSettings(**given)
    ingress = serve.deployment(
        name="ingress",
        num_replicas=int(args.get("ingresses", 1)),
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
    )(Ingress)
    return ingress.bind(given, engines(settings))


def engines(settings: ClusterSettings) -> Application:
    """The engines alone."""
    given = {name: value for name, value in settings.given().items() if name not in INGRESS_OWN}
    return engine_deployment(settings).bind(given)


def engine_deployment(settings: ClusterSettings) -> Deployment:
    """How Serve runs the engines."""
    options: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        options = {
            "autoscaling_config": {
                "min_replicas": settings.replicas,
                "max_replicas": settings.max_replicas,
                "target_ongoing_requests": settings.max_num_seqs * settings.target_load,
                "policy": {"policy_function": "app.cluster.autoscaling:wanted_replicas"},
            }
        }
    return serve.deployment(
        name=ENGINE,
        ray_actor_options={"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus},
        max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=1,  # rounded up to one replica more: an update takes none away before another is ready
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        request_router_config=router_config(slack=settings.max_num_seqs),
        **options,
    )(EngineReplica)


@serve.ingress()
class Ingress:
    """The HTTP application, as `moaserve serve` has it, in front of the engines."""

    def __init__(self, given: Mapping[str, Any], engines: DeploymentHandle[Any]) -> None:
        self._settings = ClusterSettings(**given)
        self._engines = engines

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve."""
        from app.logs import configure
        from app.main import create_app

        configure(self._settings.log_level, self._settings.log_format)

        async def handle() -> DeploymentHandle[Any]:
            return self._engines

        async def nothing() -> None:
            """The engines are Serve's to end."""

        return create_app(self._settings, ReplicatedEngine(RayFleet(handle, nothing), self._settings.failover_timeout))
