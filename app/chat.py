"""Messages -> prompt token ids; generated text -> chat messages and chunks."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, cast

from app.errors import InvalidParameterError
from app.generation import Choice
from app.messages import Message, TemplateOptions
from app.origins import Origins
from app.responses import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChunkChoice,
    ContentLogprob,
    Delta,
    EdgeNote,
    FinishReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from app.schemas import Prediction
from app.tokens import TokenTexts, beginning, check_length, encoded
from app.tools.parsing import CallDelta
from app.tools.pieces import Pieces
from app.tools.schemas import Tool
from app.tools.splitting import Split, Splitter
from app.usage import ResponseMetrics, Usage
from speculative.errors import ContextLengthError
from speculative.request import RequestOutput, TokenLogprob

logger = logging.getLogger("moaserve.app")


def prompt_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    options: TemplateOptions,
    tools: Sequence[Tool] = (),
    *,
    most: int | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """The conversation as the model's chat template writes it, ready for the assistant's turn unless the caller wants otherwise.

    The template is told ``variables`` too, where the caller says nothing of them.
    Raises InvalidParameterError, and ContextLengthError where it is far longer than ``most`` tokens.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidParameterError("This model has no chat template; use /v1/completions.", param="messages")
    if most is not None and len(messages) > most:  # each is a token at least
        raise ContextLengthError(
            f"This model's maximum context length is {most} tokens. However, your conversation has {len(messages)} messages.",
            param="messages",
        )
    conversation = [_template_message(message) for message in messages]
    variables = {**variables, **options.variables}
    # Its own parameters are none of the template's variables: one of them is the template.
    if reserved := variables.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
        raise InvalidParameterError(f"'{min(reserved)}' is no variable of a chat template.", param="chat_template_kwargs")
    continues = bool(options.continue_final_message)
    rendering = {
        "add_generation_prompt": not continues if options.add_generation_prompt is None else options.add_generation_prompt,
        "continue_final_message": continues,
        **({"tools": [tool.for_template() for tool in tools]} if tools else {}),
        **variables,
    }
    try:
        text = _rendered(tokenizer, conversation, rendering)
    except Exception as error:  # a template is a program of the model's, and raises what it likes about its input
        logger.debug("chat template failed", exc_info=error)
        raise InvalidParameterError(f"The model's chat template cannot render these messages: {error}", param="messages") from error
    if most is not None:  # of all that was rendered: tools, calls and variables may be long too
        check_length(tokenizer, text, "messages", most)
    return encoded(tokenizer, text, "messages", add_special_tokens=False)  # the template has written those


def fault(tokenizer: Any, variables: Mapping[str, Any]) -> str | None:
    """Why not even a greeting can be rendered, and so no chat answered; None where it can."""
    try:
        prompt_tokens(tokenizer, [Message(role="user", content="Hello!")], TemplateOptions(), variables=variables)
    except InvalidParameterError as error:
        return str(error)
    return None


def predicted_tokens(tokenizer: Any, prediction: Prediction | None, most: int) -> list[int]:
    """What the caller expects the answer to be, as tokens; no more of it than a context of ``most`` tokens can hold."""
    if prediction is None:
        return []
    return encoded(tokenizer, beginning(prediction.content, most), "prediction.content", add_special_tokens=False)


def _template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no fields without a value, and tool arguments as objects where they are objects."""
    rendered = message.model_dump(exclude_none=True)
    if message.role == "developer":
        rendered["role"] = "system"
    rendered.setdefault("content", "")
    if not message.reasoning_content:
        rendered.pop("reasoning_content", None)
    if not rendered.get("tool_calls"):
        rendered.pop("tool_calls", None)  # templates take an empty list for calls too: Llama 3.1's raises, as it wants one
    for call in rendered.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return rendered


def _rendered(tokenizer: Any, conversation: list[dict[str, Any]], rendering: dict[str, Any]) -> str:
    """By a template that renders contents as strings, or by one that passes strings over and renders lists of parts."""
    text, failure = "", None
    last = next((content for message in reversed(conversation) if (content := message["content"].strip())), "")
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **rendering)
    except Exception as error:
        failure = error
    if failure is not None or last not in text:
        in_parts = [_in_parts(message) for message in conversation]
        with suppress(Exception):  # what is wrong with strings is what there is to tell
            if last in (other := tokenizer.apply_chat_template(in_parts, tokenize=False, **rendering)):
                return cast("str", other)
    if failure is not None:
        raise failure
    return text


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}]} if text else message


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):  # it may be nested very deeply
        return text
    return arguments if isinstance(arguments, dict) else text


class ChatWriter:
    """Words answers as chat completions and their chunks.

    ``tokens`` are given where log-probabilities are asked for, ``origins`` where those of tokens are; ``pieces`` makes what splits
    a choice.
    """

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        tokens: TokenTexts | None,
        pieces: Callable[[], Pieces] = Pieces,
        origins: Origins | None = None,
    ) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._tokens, self._pieces, self._origins = tokens, pieces, origins
        self._splitters: dict[int, Splitter] = {}
        self._characters: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice], usage: Usage, metrics: ResponseMetrics) -> ChatCompletion:
        """The answer to a request that does not stream."""
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._whole(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
            metrics=metrics,
        )

    def begin(self, index: int, first: RequestOutput) -> ChatCompletionChunk:
        """The chunk that names the role."""
        return self._chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None))

    def text(self, index: int, output: RequestOutput) -> ChatCompletionChunk | str | None:
        """More of the message; its mere text where that is all."""
        split = self._splitter(index).feed(output)
        content, calls, thought = split.text, split.calls, split.thought
        told_before = self._characters.get(index, 0) - split.dropped
        self._characters[index] = told_before + len(content)
        if not (content or calls or thought or output.logprobs or output.written or (self._origins and output.new_token_ids)):
            return None
        if not (calls or thought or self._tokens or output.written or self._origins):
            return content
        delta = Delta(content=content) if content or not (calls or thought) else Delta()
        if thought:
            delta.reasoning_content = thought
        if calls:
            delta.tool_calls = [_call_delta(call) for call in calls]
        choice = ChunkChoice(index=index, delta=delta, logprobs=self._logprobs(output.logprobs or ()), finish_reason=None)
        if self._origins is not None:
            choice.token_origins = self._origins.more(index, output)
        chunk = self._chunk(choice)
        if output.written is not None:
            chunk.edge = EdgeNote.of(output.written, told_before, output.written.first_token)
        return chunk

    def words(self, index: int, text: str) -> ChatCompletionChunk:
        """More of the message's text."""
        return self._chunk(ChunkChoice(index=index, delta=Delta(content=text), logprobs=None, finish_reason=None))

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> ChatCompletionChunk:
        """The message's end."""
        reason = _reason(reason, self._splitter(index).num_calls)
        return self._chunk(ChunkChoice(index=index, delta=Delta(), logprobs=None, finish_reason=reason), metrics=metrics)

    def summary(self, metrics: ResponseMetrics) -> ChatCompletionChunk:
        """No choice: what was said is of the whole response."""
        return self._chunk(metrics=metrics)

    def _whole(self, index: int, choice: Choice) -> ChatChoice:
        pieces = self._pieces()
        split = Split(pieces.feed(choice.text, final=True))
        message = AssistantMessage(role="assistant", content=split.text, refusal=None)
        if split.thought:
            message.reasoning_content = split.thought
        if split.calls:
            message.content = split.text or None
            message.tool_calls = [_call(call) for call in split.calls]
        reason = _reason(choice.finish_reason, pieces.num_calls)
        answer = ChatChoice(index=index, message=message, logprobs=self._logprobs(choice.logprobs), finish_reason=reason)
        if self._origins is not None:
            answer.token_origins = self._origins.whole(index, choice.outputs)
        return answer

    def _splitter(self, index: int) -> Splitter:
        if index not in self._splitters:
            self._splitters[index] = Splitter(self._pieces(), ordered=False)
        return self._splitters[index]

    def _chunk(self, *choices: ChunkChoice, metrics: ResponseMetrics | None = None) -> ChatCompletionChunk:
        extra: dict[str, Any] = {} if metrics is None else {"metrics": metrics}
        return ChatCompletionChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, choices=list(choices), **extra
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self._tokens is None:
            return None
        return ChatLogprobs(content=[content_logprob(self._tokens, each) for each in logprobs], refusal=None)


def _reason(reason: FinishReason, num_calls: int) -> FinishReason:
    return "tool_calls" if num_calls and reason == "stop" else reason


def _call(call: CallDelta) -> ToolCall:
    assert call.id is not None and call.name is not None  # all of an answer at once: the first delta is the whole call
    return ToolCall(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None:
        return ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))
    function = FunctionDelta(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function", function=function)


def content_logprob(tokens: TokenTexts, one: TokenLogprob) -> ContentLogprob:
    """A token's log-probability with its text and bytes."""
    top = [TopLogprob(token=tokens.text(id_), logprob=value, bytes=list(tokens.bytes(id_))) for id_, value in one.top]
    own = tokens.bytes(one.token_id)
    return ContentLogprob(token=tokens.text(one.token_id), logprob=one.logprob, bytes=list(own), top_logprobs=top)
