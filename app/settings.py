"""Settings: everything a user can set, in one frozen place. Command line > MOASERVE_* environment > TOML file."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from limits import parse_many
from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from app.keys import ApiKeys
from app.templates import read_template
from app.thoughts import ReasoningFormat
from app.tools.formats import ToolCallFormat
from speculative.config import BUNDLED, Compile, DraftPolicy, DType, EngineConfig
from speculative.errors import EngineLoadError
from speculative.memory import MemoryLimit, parse_size

ENV_PREFIX = "MOASERVE_"
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class SettingsError(Exception):
    """A source of settings cannot be used at all: an unreadable file, an unknown environment variable."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """How much key-value cache is kept for later turns beside the engine's: bytes (None: see ``sessions``), for so many seconds."""

    max_bytes: int | None
    ttl: float


@dataclass(frozen=True, slots=True)
class Remote:
    """What edges may have at a time, texts on a connection and trees of each, and how many seconds they get to come back."""

    sessions: int
    in_flight: int
    idle_seconds: float


def _json_object(value: Any) -> Any:
    """A JSON object that came as text, from the command line or the environment."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    if not isinstance(value, dict | None):
        raise ValueError('it must be a JSON object, such as {"enable_thinking": false}')
    return value


class HttpSettings(BaseSettings):
    """What all that serve HTTP are told.

    ``config`` names the TOML file that the rest may come from. ``served_model_name`` are the names clients use, with commas, of
    which answers have the first (default: the model's own). A file ``chat_template`` takes the place of the model's;
    ``chat_template_kwargs`` is what a template is told where callers say nothing of it. ``tool_call_format`` is how the model calls
    tools, ``reasoning_format`` how it writes what it thinks (default: as the template says). Who may ask, how often and how much:
    see ``guard`` and ``keys``; what is kept of answers: see ``sessions``; what is told of requests: see ``metrics`` and
    ``tracing``. ``max_num_seqs`` texts are written together.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    config: Path | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    served_model_name: str | None = None
    chat_template: Path | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, NoDecode, BeforeValidator(_json_object)] = None
    tool_call_format: ToolCallFormat = "auto"
    reasoning_format: ReasoningFormat = "auto"

    vllm_metric_names: bool = False
    otlp_traces_endpoint: str | None = None

    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    rate_limit: str | None = None
    max_queue_requests: int | None = Field(1024, ge=0)
    max_queue_tokens: int | None = Field(None, ge=0)
    max_body_bytes: int = Field(16 * 2**20, ge=1)
    request_timeout: float | None = Field(None, gt=0)
    shutdown_timeout: int = Field(30, ge=0)
    watchdog_timeout: float = Field(120, ge=0)
    store_max_responses: int = Field(10_000, ge=0)
    store_max_bytes: int = Field(256 * 2**20, ge=0)
    store_ttl: float = Field(24 * 3600, gt=0)
    redis_url: SecretStr | None = None
    redis_timeout: float = Field(0.25, gt=0)
    redis_prefix: str = Field("moaserve", min_length=1, pattern=r"^[!-~]+$")
    cors_origins: str | None = None
    allowed_hosts: str | None = None
    forwarded_allow_ips: str | None = None
    root_path: str = ""
    playground: bool = True
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    max_num_seqs: int = Field(32, ge=1)

    @property
    def model_names(self) -> list[str]:
        """The names of ``served_model_name``; none where the model's own is served."""
        return [name for each in (self.served_model_name or "").split(",") if (name := each.strip())]

    @property
    def slots(self) -> int:
        """How many texts are written together, of all that this server has."""
        return self.max_num_seqs

    @property
    def kept_blocks(self) -> KeptBlocks | None:
        """None where there is no key-value cache to keep."""
        return None

    @property
    def remote(self) -> Remote | None:
        """None where no edges are taken."""
        return None

    @field_validator("chat_template")
    @classmethod
    def _template(cls, path: Path | None) -> Path | None:
        if path is not None:
            read_template(path)
        return path

    @field_validator("served_model_name")
    @classmethod
    def _name(cls, names: str | None) -> str | None:
        if names is not None and not names.replace(",", "").strip():
            raise ValueError("it must be a name, or several with commas")
        return names

    @field_validator("rate_limit")
    @classmethod
    def _rate(cls, rates: str | None) -> str | None:
        try:
            parse_many(rates) if rates else None
        except ValueError:
            raise ValueError("it must be rates such as 60/minute or 5/second;1000/day") from None
        return rates

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _proxies(cls, proxies: str | None) -> str | None:
        """uvicorn takes what is no address for the name of a Unix socket's peer, and this server listens on none."""
        if proxies == "*":
            return proxies
        for proxy in filter(None, (each.strip() for each in (proxies or "").split(","))):
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"it must be addresses and networks such as 10.0.0.7,172.16.0.0/12, or * alone: {error}") from None
        return proxies

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _collector(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ValueError("it must be the URL of an OTLP/HTTP collector, such as http://localhost:4318")
        return endpoint

    @model_validator(mode="after")
    def _keys_are_there(self) -> HttpSettings:
        ApiKeys.load(self.api_key, self.api_key_file)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("TLS needs both ssl_certfile and ssl_keyfile")
        return self

    @model_validator(mode="after")
    def _redis_can_be_asked(self) -> HttpSettings:
        if self.redis_url is not None:
            from app.sessions.redis_url import check_url  # half a second to import, which most servers can do without

            try:
                check_url(self.redis_url.get_secret_value())
            except ValueError as error:  # of the whole model: an error of the field would be told with the URL and its password
                raise ValueError(f"--redis-url (MOASERVE_REDIS_URL): {error}") from None
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources, strongest first; the file is named by one of the two stronger ones."""
        assert isinstance(init_settings, InitSettingsSource)
        environment = _StrictEnvironment(settings_cls)
        path = init_settings.init_kwargs.get("config") or environment().get("config")
        if path is None:
            return init_settings, environment
        return init_settings, environment, _toml(settings_cls, Path(path))


class Settings(HttpSettings):
    """What `moaserve serve` was told; the fields from ``model`` on are those of `EngineConfig`, and mean the same."""

    session_max_bytes: int | None = Field(None, ge=0)
    session_ttl: float = Field(24 * 3600, gt=0)
    remote_sessions: int = Field(64, ge=1, le=65536)
    remote_in_flight: int = Field(4, ge=1, le=256)
    remote_idle_seconds: float = Field(60, gt=0, le=86400)

    model: str = Field(BUNDLED, min_length=1)
    drafter: str = Field("auto", min_length=1)
    dtype: DType = "auto"
    device: str = Field("auto", min_length=1)
    max_model_len: int | None = Field(None, ge=2)
    prefill_chunk: int = Field(512, ge=1)
    draft_policy: DraftPolicy = "adaptive"
    draft_depth: int = Field(8, ge=1)
    draft_breadth: int = Field(4, ge=1)
    draft_nodes: int = Field(15, ge=1)
    draft_min_reach: float | None = Field(None, ge=0, le=1)
    draft_temperature: float = Field(1.0, gt=0)
    draft_lookup: int = Field(2, ge=0)
    draft_window: int | None = Field(None, ge=0)
    remote_tree_nodes: int = Field(32, ge=1, le=4096)
    prefix_cache_tokens: int | None = Field(None, ge=0)
    num_threads: int | None = Field(None, ge=1)
    memory_limit: str | None = None
    compile: Compile = "auto"
    tensor_parallel_size: int = Field(1, ge=1)

    @field_validator("memory_limit")
    @classmethod
    def _size(cls, size: str | None) -> str | None:
        if size is not None:
            parse_size(size)
        return size

    @model_validator(mode="after")
    def _engine_agrees(self) -> Settings:
        try:
            self.engine_config()
        except EngineLoadError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def kept_blocks(self) -> KeptBlocks | None:
        """As in HttpSettings; an engine without a prefix cache keeps none."""
        return None if self.prefix_cache_tokens == 0 else KeptBlocks(self.session_max_bytes, self.session_ttl)

    @property
    def remote(self) -> Remote:
        """As in HttpSettings."""
        return Remote(self.remote_sessions, self.remote_in_flight, self.remote_idle_seconds)

    def engine_config(self) -> EngineConfig:
        """The part of the settings that the engine needs."""
        lowers, limit = "max_num_seqs" not in self.model_fields_set, None
        if lowers or self.memory_limit is not None:
            limit = MemoryLimit(None if self.memory_limit is None else parse_size(self.memory_limit), lowers)
        values = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        return EngineConfig(**values | {"memory_limit": limit})


class _StrictEnvironment(EnvSettingsSource):
    """MOASERVE_* variables; one that names no setting is a typing error, and pydantic-settings would drop it silently."""

    def __call__(self) -> dict[str, Any]:
        known = {ENV_PREFIX + name.upper() for name in self.settings_cls.model_fields}
        for variable in sorted(os.environ):
            if variable.upper().startswith(ENV_PREFIX) and variable.upper() not in known:
                raise SettingsError(f"unknown environment variable {variable}; there are: {', '.join(sorted(known))}")
        return super().__call__()


def _toml(settings_cls: type[BaseSettings], path: Path) -> TomlConfigSettingsSource:
    if not path.is_file():
        raise SettingsError(f"config file {path} does not exist")
    try:
        return TomlConfigSettingsSource(settings_cls, toml_file=path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"config file {path} cannot be read: {error}") from error
