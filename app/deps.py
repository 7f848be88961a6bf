"""Typed dependencies: what a route asks for by its parameter's type. Nothing here is global; all hangs on the application."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, cast

import anyio
from fastapi import Depends
from fastapi.requests import HTTPConnection

from app.admission import Admission
from app.keys import ApiKeys
from app.metric_names import Watched
from app.metrics import Metrics
from app.responses_api.background import BackgroundJobs
from app.sessions.conversations import Conversations
from app.sessions.engine import BlockEngine
from app.sessions.opening import Stores
from app.sessions.store import ResponseStore
from app.settings import HttpSettings
from app.templates import read_template
from app.tracing import Tracing
from speculative.config import ModelInfo
from speculative.errors import EngineNotReadyError
from speculative.remote.host import Host, RemoteEngine
from speculative.remote.limits import Limits
from speculative.remote.registry import SessionRegistry
from speculative.request import Grammar, Request, RequestOutput


class ServingEngine(Watched, Protocol):
    """What HTTP needs of `speculative.async_engine.AsyncEngine` or an edge's engine; tests put an in-memory one in their place."""

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer; raises EngineNotReadyError before, InvalidRequestError where there is none."""

    async def start(self) -> None:
        """Begin to load."""

    async def stop(self) -> None:
        """End everything."""

    def validate(self, request: Request) -> None:
        """Raise InvalidRequestError or ContextLengthError for a request that cannot run."""

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError for a grammar that cannot be followed; it may take seconds, in any thread."""

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs as they come; closing the generator aborts the request."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What one application serves with, kept as ``app.state.serving``."""

    settings: HttpSettings
    engine: ServingEngine
    metrics: Metrics
    keys: ApiKeys
    admission: Admission
    stores: Stores
    conversations: Conversations | None
    remote: SessionRegistry | None
    chat_template: str | None = None
    tracing: Tracing | None = None
    jobs: BackgroundJobs = field(default_factory=BackgroundJobs)
    tokenizing: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    compiling: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    @classmethod
    def of(cls, settings: HttpSettings, engine: ServingEngine) -> Serving:
        """An engine, as ``settings`` say that it is to be served; raises SettingsError where they cannot be followed here."""
        keys = ApiKeys.load(settings.api_key, settings.api_key_file)
        limits = settings.max_queue_requests, settings.max_queue_tokens
        admission = Admission(settings.slots, *limits, several_keys=keys.several)
        metrics = Metrics(vllm_names=settings.vllm_metric_names)
        stores = Stores.of(settings, metrics.store_observer(lambda: _model_name(settings, engine)))
        # Only settings of engines that have blocks say that they are kept.
        conversations = Conversations(cast(BlockEngine, engine), stores.blocks) if stores.blocks is not None else None
        tracing = Tracing(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
        template = read_template(settings.chat_template) if settings.chat_template is not None else None
        remote = _remote(settings, engine, metrics)
        return cls(settings, engine, metrics, keys, admission, stores, conversations, remote, template, tracing)

    @property
    def store(self) -> ResponseStore:
        """Where responses are kept between requests."""
        return self.stores.responses

    @property
    def tokenizer(self) -> Any:
        """The engine's, with the chat template that is to be used; raises as `ServingEngine.tokenizer` does."""
        tokenizer = self.engine.tokenizer
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """What the chat template is told, where callers say nothing of it."""
        return self.settings.chat_template_kwargs or {}

    def model_info(self) -> ModelInfo:
        """The loaded model; raises EngineNotReadyError while there is none, or no longer."""
        if not self.engine.ready:
            raise EngineNotReadyError("The model is still loading, or the server is shutting down.")
        return self.engine.info

    def model_name(self) -> str:
        """What answers call the loaded model."""
        return _model_name(self.settings, self.engine)

    def model_names(self) -> list[str]:
        """All names by which clients may ask for it, that one first."""
        return self.settings.model_names or [self.engine.info.name]


def _model_name(settings: HttpSettings, engine: ServingEngine) -> str:
    return settings.model_names[0] if settings.model_names else engine.info.name


def _remote(settings: HttpSettings, engine: ServingEngine, metrics: Metrics) -> SessionRegistry | None:
    if (remote := settings.remote) is None:
        return None

    def model_name() -> str:
        return _model_name(settings, engine)

    # Only settings of engines that take trees say that edges may come.
    host = cast(RemoteEngine, engine)
    limits = Limits(sessions=remote.sessions, in_flight=remote.in_flight)
    return SessionRegistry(Host(host, metrics.remote_observer(model_name), model_name, limits, remote.idle_seconds))


async def _serving(connection: HTTPConnection) -> Serving:
    serving: Serving = connection.app.state.serving
    return serving


def owner_of(connection: HTTPConnection) -> str:
    """Whose key the caller has; without keys all callers are one."""
    owner: str = getattr(connection.state, "owner", "")
    return owner


async def _owner(connection: HTTPConnection) -> str:
    return owner_of(connection)


async def _take_rate(connection: HTTPConnection) -> Callable[[], None]:
    take: Callable[[], None] = connection.state.take_rate
    return take


ServingDep = Annotated[Serving, Depends(_serving)]
OwnerDep = Annotated[str, Depends(_owner)]
TakeRateDep = Annotated[Callable[[], None], Depends(_take_rate)]
"""Counts one more request of a caller who asks many on one connection; raises TooManyRequestsError."""
