"""Settings of `moaserve edge`."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator

from app.settings import HttpSettings
from speculative.config import Compile, DType, MemoryFormat
from speculative.edge.config import EdgeConfig, Offline
from speculative.edge.opening import Server

ONE_KEY = "must be one key, on one line, of characters that an HTTP header can hold"
"""Said here, as the WebSocket library quotes a header that cannot be, key and all."""


class EdgeSettings(HttpSettings):
    """What `moaserve edge` was told; the fields from ``bundle`` on are those of `EdgeConfig`, and mean the same."""

    port: int = Field(8001, ge=0, le=65535)

    server: str
    server_api_key: SecretStr | None = None
    server_api_key_file: Path | None = None
    server_ca_file: Path | None = None

    bundle: Path
    memory_format: MemoryFormat = "int8"
    offline: Offline = "correct"
    reconnect_timeout: float = Field(1.0, ge=0)
    dtype: DType = "auto"
    compile: Compile = "auto"
    num_threads: int | None = Field(None, ge=1)
    max_num_seqs: int = Field(4, ge=1)
    draft_depth: int = Field(8, ge=1)
    draft_breadth: int = Field(8, ge=1)
    draft_nodes: int = Field(64, ge=1)
    draft_temperature: float = Field(1.0, gt=0)
    draft_lookup: int = Field(2, ge=0)

    @field_validator("server")
    @classmethod
    def _address(cls, server: str) -> str:
        if not server.startswith(("ws://", "wss://")) or not server.split("://", 1)[1].strip("/"):
            raise ValueError("it must be the address of a MoA Serve server, such as wss://example.org or ws://127.0.0.1:8000")
        return server

    @model_validator(mode="after")
    def _server_lets_in(self) -> EdgeSettings:
        if self.server_key() is not None and re.match("wss?://[^/]*@", self.server):
            raise ValueError(
                "--server names a user, and there is a key for the server too: a request can say who asks in one way only"
            )
        if self.server_ca_file is not None and not self.server_ca_file.is_file():
            raise ValueError(f"--server-ca-file: there is no file {self.server_ca_file}")
        if self.server_ca_file is not None and not self.server.startswith("wss://"):
            raise ValueError(f"--server-ca-file is for servers with TLS, and {self.server} has none: give an address with wss://")
        return self

    def server_key(self) -> str | None:
        """The key for the server, which its file holds alone; ValueError where both are given, there is no such file, or no header
        can hold it.

        Blanks around a key are not its own: secrets that come from files end in a newline.
        """
        file = self.server_api_key_file
        if self.server_api_key is not None and file is not None:
            raise ValueError("give one of server_api_key and server_api_key_file")
        if self.server_api_key is not None:
            key = self.server_api_key.get_secret_value().strip()
            if not _fits_a_header(key):
                raise ValueError(f"server_api_key {ONE_KEY}")
            return key or None
        if file is None:
            return None
        try:
            key = file.read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"--server-api-key-file {file} cannot be read: {error}") from None
        if not key or not _fits_a_header(key):
            raise ValueError(f"--server-api-key-file {file} {ONE_KEY}")
        return key

    def edge_config(self) -> EdgeConfig:
        """The part of the settings that the edge's engine needs."""
        return EdgeConfig(
            server=Server(self.server, self.server_key(), self.server_ca_file),
            bundle=self.bundle,
            memory_format=self.memory_format,
            dtype=self.dtype,
            compile=self.compile,
            num_threads=self.num_threads,
            max_num_seqs=self.max_num_seqs,
            offline=self.offline,
            reconnect_timeout=self.reconnect_timeout,
            draft_depth=self.draft_depth,
            draft_breadth=self.draft_breadth,
            draft_nodes=self.draft_nodes,
            draft_temperature=self.draft_temperature,
            draft_lookup=self.draft_lookup,
        )


def _fits_a_header(key: str) -> bool:
    return key.isprintable() and all(ord(character) < 256 for character in key)
