"""GET /health and /ready: probes for whoever runs the server."""

from __future__ import annotations

import logging

from fastapi import APIRouter

from app.deps import ServingDep
from app.errors import UnavailableError
from app.responses import Probe, refusals
from app.watchdog import ailment

logger = logging.getLogger("moaserve.app")
router = APIRouter(tags=["health"], responses=refusals(403, 503))


@router.get("/health")
async def health(serving: ServingDep) -> Probe:
    """200 while the engine lives and works, loading included; restart the server otherwise."""
    if said := ailment(serving.engine, serving.settings.watchdog_timeout):
        if serving.engine.alive:
            logger.error("the engine has been at one step for %.0f s", serving.engine.busy_seconds)
        raise UnavailableError(said)
    return Probe(status="ok")


@router.get("/ready")
async def ready(serving: ServingDep) -> Probe:
    """200 once the model is loaded; send no requests otherwise. On an edge 503 too while it answers nothing without its server."""
    serving.model_info()
    edge = serving.engine.status().edge
    if edge is not None and edge.refuses:
        # Where that server is, and what is wrong, are told to those who have a key.
        raise UnavailableError("The server that verifies for this edge is out of reach.")
    return Probe(status="ok")
