"""`moaserve ray`."""

from __future__ import annotations

import inspect
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from app.commands import options, serving
from app.commands.serve import serve

if TYPE_CHECKING:
    from app.cluster_settings import ClusterSettings

REPLICAS = "Replicas"


def _replica_options(
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines, each with the model. (default: 2)", rich_help_panel=REPLICAS)
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(help="As many under load, by their queues and KV caches. (default: as --replicas)", rich_help_panel=REPLICAS),
    ] = None,
    target_load: Annotated[
        float | None,
        typer.Option(
            help="Share of slots, and of KV caches, above which there are to be more. (default: 0.8)", rich_help_panel=REPLICAS
        ),
    ] = None,
    replica_cpus: Annotated[
        float | None,
        typer.Option(help="CPUs that Ray sets aside for each; parts of one too. (default: 1)", rich_help_panel=REPLICAS),
    ] = None,
    replica_gpus: Annotated[
        float | None, typer.Option(help="GPUs that Ray sets aside for each. (default: 0)", rich_help_panel=REPLICAS)
    ] = None,
    failover_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a request waits for a replica when there is none. (default: 60)", rich_help_panel=REPLICAS),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster that runs already: host:port, ray://host:port or auto. (default: one of this machine's own)",
            rich_help_panel=REPLICAS,
        ),
    ] = None,
) -> None: ...


def ray(**given: Any) -> None:
    """Serve a model with several engines on Ray, as one server.

    Takes the options of moaserve serve besides these; those of the engine hold for each replica. An answer whose replica dies
    goes on at another, and is the same. On SIGHUP the settings are read anew (--config) and the
    replicas replaced, one after the other.

    Needs moaserve's extra ray.

    For example:

      moaserve ray --replicas 3 --port 8123
    """
    settings = _settings(given)
    try:
        from app.cluster.local import LocalCluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        options.fail("moaserve ray needs Ray: pip install 'moaserve[ray]'")

    cluster = LocalCluster(settings, lambda: _settings(given))
    code = serving.serve(settings, cluster.engine, f"{settings.model} in {settings.replicas} replicas")
    if cluster.is_beginning:  # Python would wait for the thread, which may wait for a cluster that does not answer
        logging.shutdown()
        os._exit(code)
    raise typer.Exit(code)


def _settings(given: dict[str, Any]) -> ClusterSettings:
    from app.cluster_settings import ClusterSettings

    return options.settings_of(ClusterSettings, given)


def _take_options() -> None:
    """Give the command the options of `moaserve serve`, behind its own."""
    parameters = {
        name: parameter.replace(annotation=get_type_hints(function, include_extras=True)[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for function in (_replica_options, serve)
        for name, parameter in inspect.signature(function).parameters.items()
    }
    ray.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]  # what Typer reads
    ray.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}


_take_options()
