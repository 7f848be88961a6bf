"""create_app: an application out of settings and an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from app.deps import Serving, ServingEngine
from app.errors import add_error_handlers
from app.metrics import Metrics
from app.middleware import AccessLog
from app.routes import chat, completions, health, metrics, models, tokenize
from app.settings import Settings


def create_app(settings: Settings, engine: ServingEngine) -> FastAPI:
    """The HTTP application; it starts the engine at startup, without waiting for the model, and stops it at shutdown."""
    serving = Serving(settings, engine, Metrics())
    serving.metrics.watch(engine.status, serving.model_name)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(
        title="MoA Serve",
        version=version("moaserve"),
        description="OpenAI-compatible LLM server with Mixture-of-Attentions speculative decoding.",
        lifespan=lifespan,
        redirect_slashes=False,
        strict_content_type=False,
    )
    app.state.serving = serving
    for routes in (chat, completions, models, tokenize, health, metrics):
        app.include_router(routes.router)
    app.add_middleware(AccessLog)
    add_error_handlers(app)
    return app
