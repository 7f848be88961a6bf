"""GET /metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.deps import ServingDep

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=Response)
async def metrics(http: Request, serving: ServingDep) -> Response:
    """All metrics, in the format that the scraper asks for."""
    text, content_type = await serving.metrics.exposition(http.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})
