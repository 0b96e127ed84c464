"""What the targets of models share: a model is used, and what came of it is named by its first words."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.fuzz.frame import Found
from tests.workers.made_models import use


@contextlib.contextmanager
def playing_models() -> Iterator[Callable[[Path], str]]:
    """Without a cache folder, or thousands of files would be kept. The value plays a model; raises Found."""
    before, threads = os.environ.get("XDG_CACHE_HOME"), torch.get_num_threads()
    torch.set_num_threads(1)

    def play(path: Path) -> str:
        line = use(path)
        if line == "served":
            return line
        if line.startswith("refused: "):
            return "refused"
        if str(path) not in line:
            raise Found(f"no file is named: {line}")
        return "ModelError"

    with tempfile.NamedTemporaryFile() as no_folder:
        os.environ["XDG_CACHE_HOME"] = no_folder.name
        try:
            yield play
        finally:
            torch.set_num_threads(threads)
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
