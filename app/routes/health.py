"""GET /health and /ready: probes for whoever runs the server."""

from __future__ import annotations

from fastapi import APIRouter

from app.deps import ServingDep
from app.errors import UnavailableError
from app.responses import Probe, refusals

router = APIRouter(tags=["health"], responses=refusals(503))


@router.get("/health")
async def health(serving: ServingDep) -> Probe:
    """200 while the engine lives, loading included; restart the server otherwise."""
    if not serving.engine.alive:
        raise UnavailableError("The engine is not running.")
    return Probe(status="ok")


@router.get("/ready")
async def ready(serving: ServingDep) -> Probe:
    """200 once the model is loaded; send no requests otherwise."""
    serving.model_info()
    return Probe(status="ok")
