"""What an ingress needs of the model that replicas serve: its tokenizer, and what requests must be like."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from models.errors import CheckpointError
from models.loader import load_tokenizer, resolve_target
from speculative.config import ModelInfo, RemoteInfo
from speculative.errors import EngineLoadError
from speculative.replicas.messages import ReplicaState
from speculative.request import Request
from speculative.texts import Texts
from speculative.validation import check_runnable


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target that replicas serve, without its weights."""

    info: ModelInfo
    remote: RemoteInfo
    tokenizer: PreTrainedTokenizerBase | None
    texts: Texts

    @classmethod
    def load(cls, state: ReplicaState) -> ServedModel:
        """The one of a replica, read from the same place; raises EngineLoadError."""
        try:
            tokenizer = load_tokenizer(resolve_target(state.model))
        except (CheckpointError, OSError) as error:
            raise EngineLoadError(f"the tokenizer of {state.model} cannot be loaded here: {error}") from error
        return cls.of(state, tokenizer)

    @classmethod
    def of(cls, state: ReplicaState, tokenizer: PreTrainedTokenizerBase | None) -> ServedModel:
        """The same with a tokenizer that is loaded."""
        info, remote = state.info, state.remote
        return cls(info, remote, tokenizer, Texts(tokenizer, info.vocab_size, remote.eos_token_ids))

    def validate(self, request: Request) -> None:
        """Raise InvalidRequestError (ContextLengthError) for a request that cannot run: as `Engine.validate`."""
        check_runnable(request, self.info, self.texts, sends_memory=bool(self.remote.memory_bytes))

    def row_bytes(self, request: Request) -> int:
        """Bytes of a row of the memory that a request is sent; 0 where it is sent none."""
        return self.remote.memory_bytes[request.memory][0] if request.memory is not None else 0
