"""Settings of `moaserve ray`, and of the application that a Serve config file names."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SecretStr, model_validator

from app.settings import KeptBlocks, Settings


class ClusterSettings(Settings):
    """What `moaserve ray` was told. ``max_num_seqs`` and all of the engine's settings are each replica's.

    With ``max_replicas`` above ``replicas`` there are more of them under load. ``replica_cpus`` and ``replica_gpus`` are what Ray
    sets aside for each. A request waits ``failover_timeout`` seconds for a replica. ``address`` is the cluster's (None: one of this
    machine's own, which ends with the command).
    """

    replicas: int = Field(2, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    target_load: float = Field(0.8, gt=0, le=1)
    replica_cpus: float = Field(1.0, ge=0)
    replica_gpus: float = Field(0.0, ge=0)
    failover_timeout: float = Field(60.0, gt=0)
    address: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _most_are_not_fewer(self) -> ClusterSettings:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) must be at least replicas ({self.replicas})")
        return self

    @property
    def slots(self) -> int:
        """As in HttpSettings: those of all replicas that there may be."""
        return self.max_num_seqs * (self.max_replicas or self.replicas)

    @property
    def kept_blocks(self) -> KeptBlocks | None:
        """None: replicas keep blocks of key-value cache themselves (`ReplicaSettings`), so that none goes through an ingress."""
        return None

    def given(self) -> dict[str, Any]:
        """What was set, as plain values, for those who are to make the same settings elsewhere."""
        values = {name: getattr(self, name) for name in self.model_fields_set - {"config"}}
        return {name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in values.items()}


class ReplicaSettings(ClusterSettings):
    """The same, where the engine is."""

    @property
    def kept_blocks(self) -> KeptBlocks | None:
        """As in Settings."""
        return None if self.prefix_cache_tokens == 0 else KeptBlocks(self.session_max_bytes, self.session_ttl)
