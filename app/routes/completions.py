"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from app import completions
from app.answering import answer, check_grammar, check_model, off_loop, prepared, tokenize
from app.bodies import BodyRoute
from app.deps import ServingDep
from app.generation import requests_for
from app.origins import Origins
from app.responses import GUARDED, STREAMED, Completion
from app.schemas import CompletionRequest
from app.tokens import TokenTexts

router = APIRouter(prefix="/v1", tags=["completions"], route_class=BodyRoute)


@router.post(
    "/completions",
    response_model=Completion,
    responses=GUARDED | STREAMED,
)
async def create_completion(body: CompletionRequest, http: Request, serving: ServingDep) -> Response:
    """Continue one prompt or several; choice ``k`` of prompt ``p`` has index ``p * n + k``."""
    model = check_model(serving, body.model)
    tokenizer, vocab_size = serving.engine.tokenizer, serving.model_info().vocab_size
    most = serving.model_info().max_model_len

    def work() -> tuple[list[list[int]], list[completions.Echo] | None]:
        prompts = completions.prompt_tokens(tokenizer, vocab_size, body.prompt, most)
        return prompts, completions.echoes(tokenizer, body.prompt, prompts, body.n or 1) if body.echo else None

    async def prepare() -> tuple[list[list[int]], list[completions.Echo] | None]:
        tokens = await tokenize(serving, work)
        await check_grammar(serving, body.constraint)
        return tokens

    prompts, echoed = await prepared(http, serving, prepare())
    response_id = f"cmpl-{uuid.uuid4().hex}"
    requests = await off_loop(
        len(prompts) > 1, lambda: requests_for(body, prompts, serving, response_id, completions.DEFAULT_MAX_TOKENS)
    )
    tokens = TokenTexts(tokenizer) if body.logprobs is not None else None
    origins = Origins(tokenizer) if body.return_token_origins else None
    writer = completions.CompletionWriter(response_id, int(time.time()), model, tokens, echoed, origins)
    return await answer(http, serving, body, requests, writer)
