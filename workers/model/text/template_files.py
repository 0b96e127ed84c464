"""Where a model's directory keeps its chat templates, which may be several by name, and the tokens that they name.

As transformers reads them: files of their own come before `tokenizer_config.json`. A processor's JSON counts where
there is nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.workers.model.loading.errors import ModelBroken, in_file, shown
from halfmoon.workers.model.loading.fields import read_optional_json, read_text

TEMPLATE_BYTES_MAX = 128 << 10
DEFAULT, TOOL_USE = "default", "tool_use"
_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_PROCESSORS = "chat_template.json", "processor_config.json"
_TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"


class TemplateSource(NamedTuple):
    """A template as it is written, and the file that holds it."""

    text: str
    file: Path


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """Templates by name, of which `default` and `tool_use` are used. `settings`: of tokenizer_config.json.

    Raises `ModelError`.
    """
    found: dict[str, TemplateSource] = {}
    for name, path in ((DEFAULT, folder / _FILE), (TOOL_USE, folder / _FOLDER / f"{TOOL_USE}.jinja")):
        if path.is_symlink() or path.exists():
            found[name] = TemplateSource(read_text(path, TEMPLATE_BYTES_MAX), path)
    if DEFAULT not in found:
        found = _in_json(folder / "tokenizer_config.json", settings) | found
    for name in _PROCESSORS:
        if not found:
            found = _in_json(folder / name, read_optional_json(folder / name))
    return found


def _in_json(path: Path, settings: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """The field `chat_template`: a text, a list of objects with name and template, or an object by name."""
    with in_file(path):
        value = settings.get("chat_template")
        if value is None:
            return {}
        named: dict[Any, Any] = {DEFAULT: value}
        if isinstance(value, list):
            named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        elif isinstance(value, dict) and value:
            named = value
        chosen = {name: named[name] for name in (DEFAULT, TOOL_USE) if named.get(name) is not None}
        for template in chosen.values():
            if not isinstance(template, str):
                raise ModelBroken("chat_template", f"is {shown(template)}; it must be a text")
            check_length("chat_template", template)
    return {name: TemplateSource(template, path) for name, template in chosen.items()}


def check_length(field: str, template: str) -> None:
    """Raises `ModelBroken`."""
    if len(template) > TEMPLATE_BYTES_MAX:
        raise ModelBroken(field, f"has {len(template)} characters; at most {TEMPLATE_BYTES_MAX}")


def with_token_map(settings: Mapping[str, Any], mapped: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the special tokens that older models name in a file of their own: `mapped`."""
    if "added_tokens_decoder" in settings:
        return dict(settings)
    return {**settings, **template_tokens(mapped)}


def template_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates have for them; those that are no texts are left out."""
    found = {}
    for name in _TOKENS:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found
