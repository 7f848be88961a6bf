"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from functools import partial

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
    tokenizer, vocab_size = serving.tokenizer, serving.model_info().vocab_size
    most = serving.model_info().max_model_len
    serving.admission.check(len(body.prompt) * body.candidates)  # tokenizing all of them may take a minute

    def work(given: str | list[int]) -> tuple[list[int], list[completions.Echo]]:
        prompts = completions.prompt_tokens(tokenizer, vocab_size, [given], most)
        return prompts[0], completions.echoes(tokenizer, [given], prompts, body.n or 1) if body.echo else []

    async def prepare() -> tuple[list[list[int]], list[completions.Echo] | None]:
        prompts: list[list[int]] = []
        echoed: list[completions.Echo] = []
        for given in body.prompt:  # other requests have their turn between two of them
            ids, echoes = await tokenize(serving, partial(work, given))
            prompts.append(ids)
            echoed += echoes
        await check_grammar(serving, body.constraint)
        return prompts, echoed if body.echo else None

    prompts, echoed = await prepared(http, serving, prepare())
    response_id = f"cmpl-{uuid.uuid4().hex}"
    requests = await off_loop(
        len(prompts) > 1, lambda: requests_for(body, prompts, serving, response_id, completions.DEFAULT_MAX_TOKENS, continues=True)
    )
    before = [prompt for prompt in prompts for _ in range(body.n or 1)]
    tokens = TokenTexts(tokenizer) if body.logprobs is not None else None
    origins = Origins(tokenizer, before) if body.return_token_origins else None
    writer = completions.CompletionWriter(response_id, int(time.time()), model, before, tokens, echoed, origins)
    return await answer(http, serving, body, requests, writer)
