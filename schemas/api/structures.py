"""The structure that a request demands of its answer: OpenAI's `response_format`, vLLM's `structured_outputs`, and the
names that vLLM had for these before (`guided_json` and so on). One of them, and one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from halfmoon.schemas.api.bodies import GeneratingFields, StructuredOutputs
from halfmoon.schemas.api.errors import ApiError

StructureKind = Literal["json", "regex", "choice", "grammar"]
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """`asked` is a JSON schema (text, or decoded), a regular expression, a list of texts, or a grammar (Lark, GBNF)."""

    kind: StructureKind
    asked: Any
    #: The field that it came in.
    param: str
    #: Of JSON only.
    any_whitespace: bool = True
    whitespace_pattern: str | None = None
    additional_properties: bool = True
    #: Between items, and between key and value, where no other whitespace is allowed.
    separators: tuple[str, str] = (",", ":")


def structure_of(body: GeneratingFields) -> Structure | None:
    """None: any text. Raises ApiError 400."""
    found = list(_structures(body))
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        message = f"{names}: an answer has one structure"
        raise ApiError(400, message, param=found[1].param, code="contradiction")
    return found[0] if found else None


def _structures(body: GeneratingFields) -> Iterator[Structure]:
    written = body.response_format
    if written is not None and written.type == "json_object":
        yield Structure(kind="json", asked=_ANY_OBJECT, param="response_format")
    elif written is not None and written.type == "json_schema":
        param = "response_format.json_schema"
        schema = written.json_schema.schema if written.json_schema is not None else None
        if schema is None:
            raise ApiError(400, f"{param}.schema is missing", param=param, code="missing")
        yield Structure(kind="json", asked=schema, param=param)
    if body.structured_outputs is not None:
        yield from _vllm(body.structured_outputs)
    older: list[tuple[StructureKind, Any]] = [
        ("json", body.guided_json),
        ("regex", body.guided_regex),
        ("choice", body.guided_choice),
        ("grammar", body.guided_grammar),
    ]
    for kind, asked in older:
        if asked is not None:
            yield Structure(kind=kind, asked=asked, param=f"guided_{kind}")


def _vllm(outputs: StructuredOutputs) -> Iterator[Structure]:
    """Raises ApiError for a kind that is not supported, and for no kind at all."""
    if outputs.structural_tag is not None:
        param = "structured_outputs.structural_tag"
        raise ApiError(400, f"{param} is not supported", param=param, code="unsupported")
    kinds: list[tuple[str, StructureKind, Any]] = [
        ("json", "json", outputs.json),
        ("regex", "regex", outputs.regex),
        ("choice", "choice", outputs.choice),
        ("grammar", "grammar", outputs.grammar),
        ("json_object", "json", _ANY_OBJECT if outputs.json_object else None),
    ]
    found = False
    for name, kind, asked in kinds:
        if asked is not None:
            found = True
            yield Structure(
                kind=kind,
                asked=asked,
                param=f"structured_outputs.{name}",
                any_whitespace=not outputs.disable_any_whitespace,
                whitespace_pattern=outputs.whitespace_pattern,
                additional_properties=not outputs.disable_additional_properties,
            )
    if not found:
        message = "structured_outputs: one of json, regex, choice, grammar and json_object"
        raise ApiError(400, message, param="structured_outputs", code="missing")
