"""GET /health and /ready: probes for whoever runs the server."""

from __future__ import annotations

import logging

from fastapi import APIRouter

from app.deps import ServingDep
from app.errors import UnavailableError
from app.responses import Probe, refusals

logger = logging.getLogger("moaserve.app")
router = APIRouter(tags=["health"], responses=refusals(403, 503))


@router.get("/health")
async def health(serving: ServingDep) -> Probe:
    """200 while the engine lives and works, loading included; restart the server otherwise."""
    limit = serving.settings.watchdog_timeout
    if not serving.engine.alive:
        raise UnavailableError("The engine is not running.")
    if limit and (busy := serving.engine.busy_seconds) > limit:
        logger.error("the engine has been at one step for %.0f s", busy)
        raise UnavailableError(f"The engine has not finished a step for {limit:g} seconds.")
    return Probe(status="ok")


@router.get("/ready")
async def ready(serving: ServingDep) -> Probe:
    """200 once the model is loaded; send no requests otherwise."""
    serving.model_info()
    return Probe(status="ok")
