"""What a request says its answer must look like: OpenAI's `response_format`, vLLM's `structured_outputs`, and the names
that vLLM had for these before (`guided_json` and so on). One of them, and one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from halfmoon.schemas.api.bodies import GeneratingFields, StructuralTag, StructuredOutputs
from halfmoon.schemas.api.errors import ApiError

StructureKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """`asked` is a JSON schema (text, or decoded), a regular expression, a list of texts, a grammar (Lark, GBNF), or a
    structural tag in plain values.
    """

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
    elif written is not None and written.type == "structural_tag":
        if written.structures is None or written.triggers is None:
            message = "response_format: a structural_tag has structures and triggers"
            raise ApiError(400, message, param="response_format", code="missing")
        yield _tagged(StructuralTag(written.structures, written.triggers), "response_format")
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
    """Raises ApiError for what is not there, and for none at all."""
    kinds: list[tuple[str, StructureKind, Any]] = [
        ("json", "json", outputs.json),
        ("regex", "regex", outputs.regex),
        ("choice", "choice", outputs.choice),
        ("grammar", "grammar", outputs.grammar),
        ("json_object", "json", _ANY_OBJECT if outputs.json_object else None),
    ]
    found = outputs.structural_tag is not None
    if outputs.structural_tag is not None:
        yield _tagged(outputs.structural_tag, "structured_outputs.structural_tag")
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
        message = "structured_outputs: one of json, regex, choice, grammar, json_object and structural_tag"
        raise ApiError(400, message, param="structured_outputs", code="missing")


def _tagged(tag: str | StructuralTag, param: str) -> Structure:
    """Raises ApiError for a text that is no tag, and for a structure that no trigger begins."""
    try:
        read = msgspec.json.decode(tag, type=StructuralTag) if isinstance(tag, str) else tag
    except (msgspec.DecodeError, RecursionError) as problem:
        raise ApiError(400, f"{param}: {problem}", param=param, code="invalid") from None
    for each in read.structures:
        if not each.begin.startswith(tuple(read.triggers)):
            message = f"{param}: no trigger begins the structure {each.begin!r}"
            raise ApiError(400, message, param=param, code="contradiction")
    return Structure(kind="structural_tag", asked=msgspec.to_builtins(read), param=param)
