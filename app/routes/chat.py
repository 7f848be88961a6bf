"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from app import chat
from app.answering import answer, check_grammar, check_model, check_tools, prepared, tokenize
from app.bodies import BodyRoute
from app.deps import ServingDep
from app.errors import own_names
from app.generation import requests_for
from app.origins import Origins
from app.responses import GUARDED, STREAMED, ChatCompletion
from app.schemas import ChatCompletionRequest
from app.tokens import TokenTexts
from app.tools.calling import calling
from speculative.request import Grammar

router = APIRouter(prefix="/v1", tags=["chat"], route_class=BodyRoute)


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses=GUARDED | STREAMED,
)
async def create_chat_completion(body: ChatCompletionRequest, http: Request, serving: ServingDep) -> Response:
    """Answer a conversation."""
    model = check_model(serving, body.model)
    tokenizer = serving.tokenizer
    tools = calling(body, body.constraint, serving.settings.tool_call_format, tokenizer)
    most = serving.model_info().max_model_len

    def work() -> tuple[list[int], list[int]]:
        prompt = chat.prompt_tokens(tokenizer, body.messages, body, body.offered_tools, most=most)
        return prompt, chat.predicted_tokens(tokenizer, body.prediction, most)

    async def prepare() -> tuple[list[int], list[int], Grammar | None]:
        prompt, prediction = await tokenize(serving, work)
        await check_grammar(serving, body.constraint)
        return prompt, prediction, await check_tools(serving, tools.constraints() if tools else [])

    prompt, prediction, grammar = await prepared(http, serving, prepare())
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    continues = bool(body.continue_final_message)
    with own_names({"prompt": "messages"}):
        requests = requests_for(body, [prompt], serving, response_id, prediction=prediction, grammar=grammar, continues=continues)
    tokens = TokenTexts(tokenizer) if body.logprobs else None
    origins = Origins(tokenizer, [prompt] * (body.n or 1) if continues else ()) if body.return_token_origins else None
    writer = chat.ChatWriter(response_id, int(time.time()), model, tokens, tools.parser if tools else None, origins)
    return await answer(http, serving, body, requests, writer)
