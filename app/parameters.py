"""Parameters of OpenAI's and vLLM's that this server knows but does not honour: accepted at their neutral value, else refused.

Silence would be a lie: a client that asks for a penalty and gets none has no way to notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import PydanticCustomError

ANYTHING: Final = "whatever it is"
"""In the place of values: none of them changes the answer."""

# Values that change nothing about the answer; null is always one of them.
SAMPLING: Final[dict[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "default"),
    "moderation": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    # vLLM's
    "bad_words": ([],),
    "cache_prompt": (True,),  # llama.cpp's
    "guided_decoding_backend": (ANYTHING,),  # which library holds answers to their form
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
CHAT: Final[Mapping[str, tuple[Any, ...]]] = SAMPLING | {
    "store": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "prompt_logprobs": (),
}
COMPLETION: Final[Mapping[str, tuple[Any, ...]]] = SAMPLING | {
    "store": (False,),
    "prompt_logprobs": (),
    "prediction": (),
    "suffix": ("",),
}
RESPONSE: Final[Mapping[str, tuple[Any, ...]]] = SAMPLING | {
    "truncation": ("disabled",),
    "stream_options": ({}, {"include_obfuscation": False}),
    "prompt": (),
    "conversation": (),
    "context_management": ([],),
    "client_metadata": (ANYTHING,),  # Codex's, of itself
}
RESPONSE_TOOL: Final[Mapping[str, tuple[Any, ...]]] = {
    "async": (False,),
    "allowed_callers": (["direct"],),
    "defer_loading": (False, True),  # there is no search for tools: the model is told of all
    "output_schema": (),
}
RESPONSE_TEXT: Final[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}
RESPONSE_REASONING: Final[Mapping[str, tuple[Any, ...]]] = {
    "summary": ("auto", "concise", "detailed"),  # of what was reasoned: there is nothing to sum up
    "generate_summary": ("auto", "concise", "detailed"),
    "context": ("auto",),
    "mode": ("standard",),
}
RESPONSE_ITEM: Final[Mapping[str, tuple[Any, ...]]] = {
    "phase": ("commentary", "final_answer"),  # of what is a message either way
    "namespace": (),
    "caller": ({"type": "direct"},),
    "async": (False,),
    "async_": (),  # openai's package, where it dumps a call
    "created_by": (),
}
RESPONSE_CALL: Final = {name: values for name, values in RESPONSE_ITEM.items() if name != "namespace"}
# An assistant's message comes back as the SDKs dump it, with the fields of features that it did not use.
MESSAGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "refusal": ("",),
    "audio": (),
    "function_call": (),
    "annotations": (ANYTHING,),  # of the content, which says what it says
    "parsed": (ANYTHING,),  # by the SDKs, of what is in the content
    # other servers'
    "reasoning_details": (ANYTHING,),  # what was thought, once more
    "thinking_blocks": (ANYTHING,),
    "images": ([],),
    "provider_specific_fields": (ANYTHING,),
    "extra_content": (ANYTHING,),
}
TOOL_CALL: Final[Mapping[str, tuple[Any, ...]]] = {"provider_specific_fields": (ANYTHING,), "extra_content": (ANYTHING,)}
FUNCTION_CALL: Final[Mapping[str, tuple[Any, ...]]] = {
    "parsed_arguments": (ANYTHING,),  # by the SDKs, of the arguments
    "provider_specific_fields": (ANYTHING,),
}
STREAM: Final[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


def drop_neutral(body: Any, known: Mapping[str, tuple[Any, ...]]) -> Any:
    """The body without its neutral parameters; one that would have to be honoured is refused by name."""
    if not isinstance(body, dict):
        return body
    for name in known.keys() & body.keys():
        value = body[name]
        if value is not None and not any(neutral is ANYTHING or _same(value, neutral) for neutral in known[name]):
            raise PydanticCustomError("unsupported_parameter", "this server does not support it yet", {"at": f".{name}"})
    return {name: value for name, value in body.items() if name not in known}


def _same(value: Any, neutral: Any) -> bool:
    """Equality as JSON has it: false is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
