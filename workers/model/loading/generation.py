"""The makers' defaults for drawing a model's tokens: generation_config.json, for requests that name none.

Named and bounded as the fields of a request; other fields of the file (`do_sample`, `max_new_tokens`) are ignored.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from halfmoon.workers.model.loading.errors import ModelBroken, ModelNotFound, in_file, shown
from halfmoon.workers.model.loading.fields import read_json, read_optional_json
from halfmoon.workers.model.loading.files import find_model

FILE = "generation_config.json"


def sampling_defaults(model: str, source: str) -> dict[str, float]:
    """By name of the field. `source`: "auto" (the model's own file, if it has one), "vllm" (none), or another folder.

    Raises `ModelBroken`, `ModelNotFound`.
    """
    if source == "vllm":
        return {}
    if source != "auto":
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise ModelNotFound(f"no folder {shown(source)}; it is auto, vllm, or a folder with a {FILE}")
        return _checked(folder / FILE, read_json(folder / FILE))
    found = find_model(model)
    if found.kind == "gguf":
        return {}
    return _checked(found.path / FILE, read_optional_json(found.path / FILE))


def _checked(path: Path, values: dict[str, Any]) -> dict[str, float]:
    with in_file(path):
        found = {
            "temperature": _bounded(values, "temperature", "from 0 to 2", 0.0, 2.0),
            "top_p": _bounded(values, "top_p", "above 0, at most 1", math.ulp(0.0), 1.0),
            "min_p": _bounded(values, "min_p", "from 0 to 1", 0.0, 1.0),
            "repetition_penalty": _bounded(values, "repetition_penalty", "above 0, at most 10", math.ulp(0.0), 10.0),
            "top_k": _bounded(values, "top_k", "a whole number, -1 or more", -1, 2**31 - 1, whole=True),
        }  # fmt: skip
    if (top_k := found["top_k"]) is not None:
        found["top_k"] = max(top_k, 0)
    return {name: value for name, value in found.items() if value is not None}


def _bounded(
    values: dict[str, Any], name: str, wanted: str, least: float, most: float, *, whole: bool = False
) -> float | None:
    """None where the file is silent. Raises `ModelBroken`."""
    value = values.get(name)
    if value is None:
        return None
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        raise ModelBroken(name, f"is {shown(value)}; it must be {wanted}")
    return value
