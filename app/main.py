"""create_app: an application out of settings and an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from app.deps import Serving, ServingEngine
from app.description import Described
from app.errors import add_error_handlers
from app.guard import Guard
from app.middleware import AccessLog, ErrorCount, Head, NoSocket, Unexpected
from app.routes import chat, completions, health, metrics, models, playground, responses, tokenize, verify
from app.settings import HttpSettings
from app.tracing import TraceContext

STORING_S = 2.0
"""What texts that have just ended get to be stored when the server stops."""


def create_app(settings: HttpSettings, engine: ServingEngine) -> FastAPI:
    """The HTTP application; it starts the engine at startup, without waiting for the model, and stops it at shutdown."""
    serving = Serving.of(settings, engine)
    serving.metrics.watch(engine, serving.model_name)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        app.prepare()
        serving.stores.start()
        await engine.start()
        try:
            yield
        finally:
            if serving.remote is not None:
                await serving.remote.close()
            if serving.conversations is not None:
                await serving.conversations.close(STORING_S)
            await engine.stop()
            await serving.jobs.close()
            await serving.stores.close()
            if serving.tracing is not None:
                await asyncio.to_thread(serving.tracing.shutdown)

    app = Described(
        title="MoA Serve",
        version=version("moaserve"),
        description="OpenAI-compatible LLM server with Mixture-of-Attentions speculative decoding.",
        lifespan=lifespan,
        redirect_slashes=False,
        strict_content_type=False,
    )
    # Not by FastAPI's parameter, which warns, nor by uvicorn's option, which takes every path for one that a proxy has stripped.
    app.root_path = settings.root_path.rstrip("/")
    app.state.serving = serving
    for routes in (chat, completions, responses, models, tokenize, health, metrics):
        app.include_router(routes.router)
    if serving.remote is not None:
        app.include_router(verify.router)
    if settings.playground:
        app.include_router(playground.router)
    app.add_middleware(Head)
    app.add_middleware(NoSocket)
    app.add_middleware(Unexpected)
    app.add_middleware(Guard, settings=settings, keys=serving.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip() for origin in settings.cors_origins.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    if serving.tracing is not None:
        app.add_middleware(TraceContext, tracing=serving.tracing)
    app.add_middleware(ErrorCount, count=serving.metrics.error)
    app.add_middleware(AccessLog)  # the outermost: it sees refusals too
    add_error_handlers(app)
    return app
