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
    """200 once the model is loaded; send no requests otherwise."""
    serving.model_info()
    return Probe(status="ok")
