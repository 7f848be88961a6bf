"""Answers of a form that callers ask for, as OpenAI and vLLM word it -> the grammar that the engine follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from app.messages import Schema, StrictModel
from speculative.request import Grammar


def _parsed(schema: Any) -> Any:
    """A schema that came as text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("invalid_value", "it is not JSON: {error}", {"error": str(error)}) from None


SchemaOrText = Annotated[Schema | None, BeforeValidator(_parsed, dict[str, Any] | str | None)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class JsonSchema(StrictModel):
    """A schema and its name; the schema is kept to the letter, unless ``strict`` is false: then as far as it can be."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Any text, any JSON object, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "Field required", {"at": ".json_schema"})
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError("invalid_value", "it needs the type 'json_schema'", {"at": ".json_schema"})
        return self


class StructuredOutputs(StrictModel):
    """vLLM's extension: one of these."""

    json_: SchemaOrText = Field(None, alias="json", description="A JSON schema, as an object or as text.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = None
    choice: Choices | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="In Lark as llguidance reads it, or in llama.cpp's GBNF with a rule `root`.")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the parameter by which the caller asked for it; one ``of_text`` has no say in answers that are only calls."""

    grammar: Grammar
    param: str
    of_text: bool = False


class StructuredRequest(StrictModel):
    """The parameters that ask for a form; a request has one of them at most."""

    structured_outputs: StructuredOutputs | None = Field(None, description="Extension. The form that the answer must have.")
    guided_json: SchemaOrText = Field(None, description="Extension. As json in structured_outputs.")
    guided_regex: str | None = Field(None, description="Extension. As regex in structured_outputs.")
    guided_choice: Choices | None = Field(None, description="Extension. As choice in structured_outputs.")
    guided_grammar: str | None = Field(None, description="Extension. As grammar in structured_outputs.")

    @model_validator(mode="after")
    def _one_form(self) -> StructuredRequest:
        forms = self._constraints()
        if len(forms) > 1:
            raise PydanticCustomError(
                "invalid_value", "it is a second form beside {first}", {"at": f".{forms[1].param}", "first": forms[0].param}
            )
        return self

    @cached_property  # asked for by every choice of a request
    def constraint(self) -> Constraint | None:
        """What the answer must look like; None: anything."""
        return next(iter(self._constraints()), None)

    @property
    def openai_form(self) -> Constraint | None:
        """The form asked for by the parameter that OpenAI has for it, which is another in each API."""
        return None

    def _constraints(self) -> list[Constraint]:
        asked = self.structured_outputs or StructuredOutputs()
        forms = {
            "structured_outputs.json": _json_schema(asked.json_),
            "structured_outputs.json_object": _json_schema({"type": "object"}) if asked.json_object else None,
            "structured_outputs.regex": _given("regex", asked.regex),
            "structured_outputs.choice": _choice(asked.choice),
            "structured_outputs.grammar": _given("lark", asked.grammar),
            "guided_json": _json_schema(self.guided_json),
            "guided_regex": _given("regex", self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
            "guided_grammar": _given("lark", self.guided_grammar),
        }
        first = [] if self.openai_form is None else [self.openai_form]
        return first + [Constraint(grammar, param) for param, grammar in forms.items() if grammar is not None]


def form_of(wanted: ResponseFormat | None, param: str) -> Constraint | None:
    """The form that ``param`` asks for; None: any text."""
    if wanted is None or wanted.type == "text":
        return None
    described = wanted.json_schema
    schema: dict[str, Any] = {"type": "object"} if described is None else described.schema_ or {}
    if described is not None and described.strict is False:
        # Of several grammars' schemas what cannot be kept is passed over.
        return Constraint(Grammar("llguidance", json.dumps({"grammars": [{"json_schema": schema}]})), param, of_text=True)
    return Constraint(Grammar("json_schema", json.dumps(schema)), param, of_text=True)


def _json_schema(schema: dict[str, Any] | None) -> Grammar | None:
    return None if schema is None else Grammar("json_schema", json.dumps(schema))


def _given(kind: Literal["regex", "lark"], source: str | None) -> Grammar | None:
    return None if source is None else Grammar(kind, source)


def _choice(texts: Sequence[str] | None) -> Grammar | None:
    if texts is None:
        return None
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))
