"""Requests that a model cannot run."""

from __future__ import annotations

from speculative.config import ModelInfo
from speculative.errors import ContextLengthError, InvalidRequestError
from speculative.request import OfferedTree, Request
from speculative.sequence import Sequence
from speculative.texts import Texts


def check_runnable(request: Request, info: ModelInfo, texts: Texts, *, sends_memory: bool) -> None:
    """Raise InvalidRequestError (ContextLengthError) for a request that an engine of this model cannot run.

    ``sends_memory`` says whether it has a drafter whose memory can be sent.
    """
    if request.params.grammar is not None:
        texts.check_grammar(request.params.grammar)
    check_request(request, info)
    if request.output_token_ids or request.text_length:
        texts.resume(request, info.max_model_len)
    if request.memory is not None and not (request.remote and request.params.speculative and sends_memory):
        raise InvalidRequestError(
            "memory is for remote requests with drafts, and this engine needs a MoA drafter of N = 0 for it",
            param="memory",
        )


def check_request(request: Request, info: ModelInfo) -> None:
    """Raise InvalidRequestError (ContextLengthError) where prompt or parameters do not fit the model."""
    prompt, limit = request.prompt_token_ids, info.max_model_len
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    biased = tuple(token for token, _ in request.params.logit_bias)
    output = request.output_token_ids
    for name, tokens in (
        ("prompt", prompt),
        ("output_token_ids", output),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logit_bias", biased),
        ("prediction", request.prediction),
    ):
        for outside in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= outside < info.vocab_size:
                raise InvalidRequestError(f"token id {outside} is outside the vocabulary of {info.vocab_size}", param=name)
    if len(prompt) >= limit:
        raise ContextLengthError(
            # OpenAI's words, by which clients tell this error from others.
            f"This model's maximum context length is {limit} tokens. However, your prompt is too long: it has {len(prompt)}.",
            param="prompt",
        )
    if len(prompt) + len(output) >= limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, and prompt and output have {len(prompt) + len(output)}.",
            param="output_token_ids",
        )
    wanted = request.params.max_tokens
    if wanted is not None and output and len(output) >= wanted:
        raise InvalidRequestError(
            f"the output has {len(output)} tokens already, and max_tokens is {wanted}", param="output_token_ids"
        )
    if wanted is not None and len(prompt) + wanted > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, your prompt has {len(prompt)}, and {wanted} more are "
            f"asked for. Shorten the prompt or ask for at most {limit - len(prompt)} tokens.",
            param="max_tokens",
        )


def check_tree(tree: OfferedTree, sequence: Sequence, vocab_size: int, most: int) -> None:
    """Raise InvalidRequestError unless a tree can be verified: of ``most`` nodes, or a chain of as many as there is room for."""
    length, room = len(sequence.tokens), sequence.max_length - len(sequence.tokens) - 1
    if not sequence.request.remote:
        raise InvalidRequestError("this request's drafts are made here: it takes no trees", param="request_id")
    if sequence.first_token_time is None:
        raise InvalidRequestError("its prompt is still being read: trees hang from its first token on", param="length")
    if tree.length != length:
        raise InvalidRequestError(f"the text has {length} tokens, not {tree.length}: draft from its last one", param="length")
    if len(tree.tokens) != len(tree.parents):
        raise InvalidRequestError(f"{len(tree.tokens)} tokens have {len(tree.parents)} parents", param="parents")
    allowed = max(most, room) if tree.is_chain else most
    if len(tree.tokens) > allowed:
        raise InvalidRequestError(f"the tree has {len(tree.tokens)} nodes; send at most {allowed}", param="tokens")
    if not all(0 <= token < vocab_size for token in tree.tokens):
        raise InvalidRequestError(f"a token of the tree is outside the vocabulary of {vocab_size}", param="tokens")
    if not all(0 <= parent <= node for node, parent in enumerate(tree.parents)):
        raise InvalidRequestError("each node's parent must stand before it", param="parents")
