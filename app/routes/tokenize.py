"""POST /tokenize and /detokenize and GET /tokenizer_info, as vLLM has them, and GET /version."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter

from app import chat
from app.answering import check_model, tokenize
from app.bodies import BodyRoute
from app.completions import known_tokens
from app.deps import ServingDep
from app.responses import GUARDED, Text, TokenizerInfo, Tokens, Version
from app.schemas import DetokenizeRequest, TokenizeRequest
from app.tokens import FAR_TOO_LONG, TokenTexts, check_length, encoded
from speculative.errors import ContextLengthError

router = APIRouter(tags=["tokenize"], route_class=BodyRoute)


@router.post("/tokenize", responses=GUARDED)
async def tokenize_text(body: TokenizeRequest, serving: ServingDep) -> Tokens:
    """A prompt's tokens, or a conversation's as the chat template writes it."""
    check_model(serving, body.model)
    tokenizer, most = serving.tokenizer, serving.model_info().max_model_len

    def work() -> tuple[list[int], list[str] | None]:
        if body.messages is not None:
            ids = chat.prompt_tokens(
                tokenizer, body.messages, body, body.tools or (), most=most, variables=serving.template_variables
            )
        else:
            check_length(tokenizer, body.prompt or "", "prompt", most)
            ids = encoded(tokenizer, body.prompt or "", "prompt", add_special_tokens=body.add_special_tokens is not False)
        texts = TokenTexts(tokenizer) if body.return_token_strs else None
        return ids, None if texts is None else [texts.text(token) for token in ids]

    ids, strings = await tokenize(serving, work)
    return Tokens(count=len(ids), max_model_len=most, tokens=ids, token_strs=strings)


@router.post("/detokenize", responses=GUARDED)
async def detokenize(body: DetokenizeRequest, serving: ServingDep) -> Text:
    """The text of tokens."""
    check_model(serving, body.model)
    tokenizer, vocab_size = serving.tokenizer, serving.model_info().vocab_size
    most = serving.model_info().max_model_len
    if len(body.tokens) > FAR_TOO_LONG * most:
        raise ContextLengthError(
            f"This model's maximum context length is {most} tokens. However, your text is too long: it has {len(body.tokens)}.",
            param="tokens",
        )

    def work() -> str:
        known_tokens(body.tokens, vocab_size, "tokens")
        return str(tokenizer.decode(body.tokens))

    return Text(prompt=await tokenize(serving, work))


@router.get("/tokenizer_info", responses=GUARDED)
async def tokenizer_info(serving: ServingDep) -> TokenizerInfo:
    """The chat template and the special tokens, for clients that write prompts by themselves."""
    check_model(serving, None)
    tokenizer = serving.tokenizer
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
    return TokenizerInfo(tokenizer_class=type(tokenizer).__name__, **{name: getattr(tokenizer, name, None) for name in names})


@router.get("/version")
async def moaserve_version() -> Version:
    """The server's version."""
    return Version(version=version("moaserve"))
