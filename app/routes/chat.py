"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from app import chat
from app.answering import answer, check_forms, check_model, prepared, tokenize
from app.bodies import BodyRoute
from app.deps import ServingDep
from app.errors import own_names
from app.generation import requests_for
from app.origins import Origins
from app.responses import GUARDED, STREAMED, ChatCompletion
from app.schemas import ChatCompletionRequest
from app.thinking import Thinking, thinking
from app.tokens import TokenTexts
from app.tools.calling import calling
from app.tools.pieces import Pieces
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
    most, variables = serving.model_info().max_model_len, serving.template_variables

    continues = bool(body.continue_final_message)

    def work() -> tuple[list[int], list[int], Thinking | None]:
        prompt = chat.prompt_tokens(tokenizer, body.messages, body, body.offered_tools, most=most, variables=variables)
        begun = body.messages[-1].content or "" if continues else None
        thoughts = thinking(serving.settings.reasoning_format, tokenizer, prompt, begun)
        return prompt, chat.predicted_tokens(tokenizer, body.prediction, most), thoughts

    async def prepare() -> tuple[list[int], list[int], Thinking | None, Grammar | None]:
        prompt, prediction, thoughts = await tokenize(serving, work)
        grammar = await check_forms(serving, body.constraint, tools.constraints() if tools else [], thoughts)
        return prompt, prediction, thoughts, grammar

    prompt, prediction, thoughts, grammar = await prepared(http, serving, prepare())
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    with own_names({"prompt": "messages", "max_tokens": body.token_limit_name}):
        requests = requests_for(body, [prompt], serving, response_id, prediction=prediction, grammar=grammar, continues=continues)
    tokens = TokenTexts(tokenizer) if body.logprobs else None
    origins = Origins(tokenizer, [prompt] * (body.n or 1) if continues else ()) if body.return_token_origins else None
    writer = chat.ChatWriter(response_id, int(time.time()), model, tokens, lambda: Pieces.of(tools, thoughts), origins)
    return await answer(http, serving, body, requests, writer, thoughts)
