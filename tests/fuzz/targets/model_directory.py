"""Hugging Face directories: a tiny whole one, of which one or two files are changed; then used as a cluster does.

An input is all files of the directory: name, length and content, one after the other.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.frame import Play
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_json
from tests.fuzz.targets._models import playing_models
from tests.workers.made_models import directory, safetensors, safetensors_header, sharded

TEST_INPUTS = 60
INPUTS_MEANT = 60_000
DEADLINE_S = 30.0
_WEIGHTS = "model.safetensors"
#: The tokenizer's expression that is let pass untried: trying any other takes most of an input's time.
_QUICK = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REGEXES = [
    r"(a+)+$",
    r"(",
    r"\p{L}+|\p{N}",
    "",
    r"(?=a)*",
    r"[^\S]|(a|ab)+?",
    r"\K",
    r"(?<!a+)b",
    "a{99999}",
]


def make(draw: random.Random) -> bytes:
    made = (sharded() if draw.random() < 0.2 else directory()).files
    made["tokenizer.json"]["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = (
        draw.choice(_REGEXES) if draw.random() < 0.05 else _QUICK
    )
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        name = draw.choice(sorted(made))
        content = made[name]
        if draw.random() < 0.05:
            del made[name]
        elif name == _WEIGHTS and draw.random() < 0.7:
            header, numbers = safetensors_header()
            made[name] = safetensors(json_bytes(draw, mutated_json(draw, header)), numbers)
        elif isinstance(content, bytes):
            made[name] = mutated_bytes(draw, content[:1500]) + content[1500:]
        else:
            made[name] = json_bytes(draw, mutated_json(draw, content))
    return packed(made)


def packed(files: dict[str, Any]) -> bytes:
    parts = []
    for name in sorted(files):
        content = files[name]
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        parts.append(struct.pack("<II", len(name), len(raw)) + name.encode() + raw)
    return b"".join(parts)


def unpacked(content: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at < len(content):
        name, size = struct.unpack_from("<II", content, at)
        at += 8 + name
        yield content[at - name : at].decode(), content[at : at + size]
        at += size


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with playing_models() as use, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m"

        def play(content: bytes) -> str:
            path.mkdir()
            try:
                for name, raw in unpacked(content):
                    (path / name).write_bytes(raw)
                return use(path)
            finally:
                shutil.rmtree(path)

        yield play
