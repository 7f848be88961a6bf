"""POST /v1/responses, and what can be done with a response afterwards."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from app import chat
from app.answering import check_forms, check_model, limited, prepared, tokenize, told
from app.bodies import BodyRoute
from app.deps import OwnerDep, Serving, ServingDep
from app.errors import InvalidParameterError, NotFoundError, own_names
from app.generation import places_for, requests_for, run
from app.responses import GUARDED, STREAMED, refusals
from app.responses_api.answering import Answering
from app.responses_api.bodies import RUNNING, InputTokens, ItemList, ResponseBody, ResponseDeleted
from app.responses_api.conversation import conversation
from app.responses_api.items import Item, messages
from app.responses_api.schemas import NEVER_THERE, ResponseRequest
from app.responses_api.tools import AllowedChoice, NamedTool
from app.responses_api.writer import ResponseWriter
from app.sessions.store import StoredResponse
from app.structured import Constraint
from app.thinking import Thinking, thinking
from app.tokens import TokenTexts
from app.tools.calling import Calling, calling
from app.tools.pieces import Pieces
from speculative.request import Grammar
from speculative.request import Request as EngineRequest

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=BodyRoute)

LOOKED_UP = refusals(400, 401, 403, 404, 429)
NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}


@router.post("", response_model=ResponseBody, responses=GUARDED | STREAMED)
async def create_response(body: ResponseRequest, http: Request, serving: ServingDep, owner: OwnerDep) -> Response:
    """Answer a conversation, and keep the answer."""
    model = check_model(serving, body.model)
    tokenizer = serving.tokenizer
    response_id = _new_id()
    items = await conversation(serving.store, owner, body, response_id)
    tools = calling(body.tool_options, body.constraint, serving.settings.tool_call_format, tokenizer)

    continues = bool(body.continue_final_message)

    async def prepare() -> tuple[list[int], Thinking | None, Grammar | None]:
        prompt, thoughts = await _prompt(serving, body, items)
        return prompt, thoughts, await check_forms(serving, body.constraint, _constraints(tools), thoughts)

    with own_names(NAMES):
        prompt, thoughts, grammar = await prepared(http, serving, prepare())
        requests = requests_for(body, [prompt], serving, response_id, grammar=grammar, continues=continues)
    tokens = TokenTexts(tokenizer) if body.logprob_count is not None else None
    pieces = Pieces.of(tools, thoughts)
    writer = ResponseWriter(_queued(body, response_id, model, requests[0]), tokens, pieces, body.namespaces)
    places = places_for(serving, requests, owner)
    outputs = told(limited(serving, run(serving, requests, places)), thoughts, final=body.constraint is not None)
    answering = Answering(serving, owner, items, places, outputs, writer, continues=continues)
    if body.background:
        return await answering.later()
    return answering.streamed() if body.stream else await answering.whole(http)


@router.post("/input_tokens", responses=GUARDED)
async def count_input_tokens(body: ResponseRequest, serving: ServingDep, owner: OwnerDep) -> InputTokens:
    """How many tokens a conversation is, tools and all, as the model would read it; nothing is answered or kept."""
    check_model(serving, body.model)
    items = await conversation(serving.store, owner, body, _new_id())
    with own_names(NAMES):
        prompt, _ = await _prompt(serving, body, items)
    return InputTokens(object="response.input_tokens", input_tokens=len(prompt))


@router.get("/{response_id}", response_model=ResponseBody, responses=LOOKED_UP)
async def retrieve_response(
    response_id: str, http: Request, serving: ServingDep, owner: OwnerDep, stream: bool = False
) -> Response:
    """A response as it stands now."""
    _refuse(http, "starting_after")
    stored = await _stored(serving, owner, response_id)
    if stream:
        raise InvalidParameterError("A stored response is told whole.", param="stream", code="unsupported_parameter")
    return _document(stored)


@router.delete("/{response_id}", responses=LOOKED_UP)
async def delete_response(response_id: str, serving: ServingDep, owner: OwnerDep) -> ResponseDeleted:
    """Forget a response, and end it if it is in the making."""
    await serving.jobs.cancel(owner, response_id)
    if not await serving.store.delete(owner, response_id):
        raise _unknown(response_id)
    return ResponseDeleted(id=response_id, object="response", deleted=True)


@router.post("/{response_id}/cancel", response_model=ResponseBody, responses=LOOKED_UP)
async def cancel_response(response_id: str, serving: ServingDep, owner: OwnerDep) -> Response:
    """End a background response; one that has ended stays as it is."""
    stored = await _stored(serving, owner, response_id)
    if not stored.document["background"]:
        raise InvalidParameterError("Only responses with background: true can be cancelled.", param="response_id")
    if stored.document["status"] in RUNNING:
        await serving.jobs.cancel(owner, response_id)
        stored = await _stored(serving, owner, response_id)
    return _document(stored)


@router.get("/{response_id}/input_items", responses=LOOKED_UP)
async def list_input_items(
    response_id: str,
    http: Request,
    serving: ServingDep,
    owner: OwnerDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> ItemList:
    """What a response answered, those of earlier turns included."""
    _refuse(http)
    items = (await _stored(serving, owner, response_id)).items
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidParameterError(f"Item with id '{after}' not found.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(object="list", data=page, first_id=first, last_id=last, has_more=len(items) > limit)


def _new_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


async def _prompt(serving: Serving, body: ResponseRequest, items: list[Item]) -> tuple[list[int], Thinking | None]:
    """The tokens of a conversation that a response is to answer, and how its model may think about it first."""
    tokenizer, most, tools = serving.tokenizer, serving.model_info().max_model_len, body.tool_options.offered_tools

    def work() -> tuple[list[int], Thinking | None]:
        said = messages(body.instructions, items)
        prompt = chat.prompt_tokens(tokenizer, said, body, tools, most=most, variables=serving.template_variables)
        begun = said[-1].content or "" if body.continue_final_message else None
        return prompt, thinking(serving.settings.reasoning_format, tokenizer, prompt, begun)

    return await tokenize(serving, work)


def _queued(body: ResponseRequest, response_id: str, model: str, request: EngineRequest) -> ResponseBody:
    """The response before anything has come of it: what was asked for, as it is honoured."""
    wanted = body.text.format if body.text else None
    choice = body.tool_choice if isinstance(body.tool_choice, NamedTool | AllowedChoice) else None
    return ResponseBody(
        id=response_id,
        object="response",
        created_at=int(time.time()),
        completed_at=None,
        status="queued",
        background=bool(body.background),
        error=None,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": body.effort, "summary": None},
        safety_identifier=body.safety_identifier,
        service_tier="default",
        store=body.store is not False,
        temperature=request.params.temperature,
        text={"format": wanted.told() if wanted else {"type": "text"}, "verbosity": "medium"},
        tool_choice=(body.tool_choice or "auto") if choice is None else choice.model_dump(),
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=request.params.top_p,
        truncation="disabled",
        usage=None,
        user=body.user,
    )


def _constraints(tools: Calling | None) -> list[Constraint]:
    """Those of tools, each under the name that its parameter has here."""
    named = tools.constraints() if tools else []
    return [replace(constraint, param=constraint.param.replace(".function.", ".")) for constraint in named]


def _refuse(http: Request, *names: str) -> None:
    """Query parameters of these ``names`` would have to be ignored, and so would what can be included and is not kept."""
    for name in ("include", "include[]", *names):
        wanted = [value for value in http.query_params.getlist(name) if name in names or value not in NEVER_THERE]
        if wanted:
            raise InvalidParameterError(
                f"This server does not support '{name}={wanted[0]}' yet.", param=name, code="unsupported_parameter"
            )


async def _stored(serving: Serving, owner: str, response_id: str) -> StoredResponse:
    stored = await serving.store.get(owner, response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored


def _unknown(response_id: str) -> NotFoundError:
    return NotFoundError(f"Response with id '{response_id}' not found.", code="response_not_found", param="response_id")


def _document(stored: StoredResponse) -> Response:
    return Response(json.dumps(stored.document), media_type="application/json")
