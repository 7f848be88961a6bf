"""Requests that a model cannot run."""

from __future__ import annotations

from speculative.config import ModelInfo
from speculative.errors import ContextLengthError, InvalidRequestError
from speculative.request import Request


def check_request(request: Request, info: ModelInfo) -> None:
    """Raise InvalidRequestError (ContextLengthError) where prompt or parameters do not fit the model."""
    prompt, limit = request.prompt_token_ids, info.max_model_len
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    biased = tuple(token for token, _ in request.params.logit_bias)
    for name, tokens in (("prompt", prompt), ("stop_token_ids", request.params.stop_token_ids), ("logit_bias", biased)):
        outside = next((token for token in tokens if not 0 <= token < info.vocab_size), None)
        if outside is not None:
            raise InvalidRequestError(f"token id {outside} is outside the vocabulary of {info.vocab_size}", param=name)
    if len(prompt) >= limit:
        raise ContextLengthError(
            # OpenAI's words, by which clients tell this error from others.
            f"This model's maximum context length is {limit} tokens. However, your prompt is too long: it has {len(prompt)}.",
            param="prompt",
        )
    wanted = request.params.max_tokens
    if wanted is not None and len(prompt) + wanted > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, your prompt has {len(prompt)} and max_tokens "
            f"asks for {wanted} more. Shorten the prompt or ask for at most {limit - len(prompt)} tokens.",
            param="max_tokens",
        )
