"""Model files as `halfmoon` reads them before it loads any: fields, shapes and places of tensors, without weights,
tokenizer or forward pass. The same files as `model_gguf` and `model_directory`, many times faster.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from halfmoon.store.pool.segment import SHM
from halfmoon.workers.model.loading.files import ModelError, _checked_config, find_model
from tests.fuzz.frame import Found, Play
from tests.fuzz.targets import model_directory, model_gguf

TEST_INPUTS = 300
INPUTS_MEANT = 900_000
DEADLINE_S = 20.0
KINDS = (b"G", b"G", b"G", b"D")


def make(draw: random.Random) -> bytes:
    """A letter for the kind, and the file or the directory."""
    kind = draw.choice(KINDS)
    return kind + (model_gguf if kind == b"G" else model_directory).make(draw)


def play(path: Path) -> str:
    try:
        config = _checked_config(find_model(str(path)))
    except ModelError as error:
        line = str(error)
        if not line or "\n" in line or len(line) > 700:
            raise Found(f"no line: {line[:2000]!r}") from None
        if str(path) not in line:
            raise Found(f"no file is named: {line}") from None
        return "ModelError"
    # What it says of itself, others compute with.
    if min(config.layers, config.kv_heads, config.head_dim, config.vocab, config.context_tokens_max) < 1:
        raise Found(f"taken: {config}")
    return "taken"


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        file, directory = Path(folder) / "m.gguf", Path(folder) / "m"

        def play_one(content: bytes) -> str:
            if content[:1] == b"G":
                file.write_bytes(content[1:])
                return play(file)
            directory.mkdir()
            try:
                for name, raw in model_directory.unpacked(content[1:]):
                    (directory / name).write_bytes(raw)
                return play(directory)
            finally:
                shutil.rmtree(directory)

        yield play_one
