"""The frame of all fuzz targets.

A target is a module in `tests/fuzz/targets` with

    make(draw)      the input that this `random.Random` draws, as bytes: the same for the same seed, always
    playing()       a context manager whose value plays one input and returns the name of what came of it

and, where the defaults do not fit, `DEADLINE_S` (of one input), `TEST_INPUTS` (of the default suite) and `INPUTS_MEANT`
(its part of ten million).

`play` raises for whatever must not happen; refusals that are documented it catches, and returns by name. Leaving the
context checks what must be so afterwards (nothing left behind, health still answers). Beside that every target is held
to the same: no traceback in the log, none in another thread, an end within the deadline.

What an input has found is kept in `tests/fuzz/corpus/<target>/`, one file each, and is played by the default suite for
ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.eventually import Late

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
#: An input that waits, and computes nothing, has so many of its deadlines.
TIMES_WAITED = 10
#: What targets wait for must come within so many seconds, on a machine that is busy with other things too.
HANG_S = 60.0

Play = Callable[[bytes], str]


class Target(NamedTuple):
    """See the module."""

    name: str
    make: Callable[[random.Random], bytes]
    playing: Callable[[], AbstractContextManager[Play]]
    deadline_s: float
    test_inputs: int
    inputs_meant: int

    def input_of(self, seed: int) -> bytes:
        return self.make(random.Random(f"{self.name} {seed}"))

    def corpus(self) -> list[Path]:
        """Inputs that have found something once."""
        folder = CORPUS / self.name
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def keep(self, content: bytes) -> Path:
        """Put an input into the corpus."""
        file = CORPUS / self.name / hashlib.sha256(content).hexdigest()[:16]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file


class Found(Exception):
    """An input did what none may; the text is for a person. `content`: that input, where it is not the one being
    played.
    """

    def __init__(self, text: str, content: bytes | None = None) -> None:
        super().__init__(text)
        self.content = content


@contextlib.contextmanager
def found_where_late() -> Iterator[None]:
    """Raises Found where what is waited for within, by tests/eventually.py, does not come."""
    try:
        yield
    except Late as late:
        raise Found(str(late)) from None


class Hung(BaseException):
    """An input took longer than its deadline. Not an Exception: what is played must not swallow it."""


def target_names() -> list[str]:
    return sorted(file.stem for file in (HERE / "targets").glob("*.py") if not file.stem.startswith("_"))


def load(name: str) -> Target:
    """Raises ModuleNotFoundError, AttributeError."""
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    return Target(
        name=name,
        make=module.make,
        playing=module.playing,
        deadline_s=getattr(module, "DEADLINE_S", 5.0),
        test_inputs=getattr(module, "TEST_INPUTS", 300),
        inputs_meant=getattr(module, "INPUTS_MEANT", 300_000),
    )


class Watch(logging.Handler):
    """Tracebacks that an input leaves in the log, in other threads, in destructors."""

    def __init__(self) -> None:
        super().__init__()
        self._tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self._note(record.getMessage(), *record.exc_info)

    def _note(self, where: str, *problem: Any) -> None:
        self._tracebacks.append(where + "\n" + "".join(traceback.format_exception(*problem)))

    def check(self) -> None:
        """Raises Found when there was one since the last check."""
        if self._tracebacks:
            text = "\n".join(self._tracebacks)
            self._tracebacks.clear()
            raise Found(f"a traceback that nobody caught:\n{text}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        thread_hook, destructor_hook = threading.excepthook, sys.unraisablehook
        threading.excepthook = lambda args: self._note(
            f"in {args.thread}", args.exc_type, args.exc_value, args.exc_traceback
        )
        sys.unraisablehook = lambda args: self._note(
            f"in {args.object!r}", args.exc_type, args.exc_value, args.exc_traceback
        )
        logging.getLogger().addHandler(self)
        try:
            yield self
        finally:
            logging.getLogger().removeHandler(self)
            threading.excepthook, sys.unraisablehook = thread_hook, destructor_hook


class Deadline:
    """Of one input. On a machine that is busy with other things a process may wait for long: the deadline counts once
    it has had so much of a processor, or TIMES_WAITED times as long has passed.
    """

    def __init__(self) -> None:
        self._seconds = self._until_s = self._until_cpu_s = 0.0

    def begin(self, seconds: float) -> None:
        self._seconds = seconds
        self._until_s = time.monotonic() + TIMES_WAITED * seconds
        self._until_cpu_s = time.process_time() + seconds
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def ring(self, number: int, frame: FrameType | None) -> None:
        """Raises Hung."""
        if time.monotonic() > self._until_s or time.process_time() > self._until_cpu_s:
            raise Hung
        signal.setitimer(signal.ITIMER_REAL, self._seconds / 4)


@contextlib.contextmanager
def alarm() -> Iterator[Deadline]:
    """Within it a deadline ends in Hung. Another's alarm is set again afterwards."""
    deadline = Deadline()
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.signal(signal.SIGALRM, deadline.ring)
    try:
        yield deadline
    finally:
        deadline.end()
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:
            signal.setitimer(signal.ITIMER_REAL, remaining_s)


@contextlib.contextmanager
def played(target: Target) -> Iterator[Play]:
    """Plays inputs of `target` as the frame does. Raises Found."""
    with Watch().watching() as watch, alarm() as deadline, target.playing() as play:

        def play_one(content: bytes) -> str:
            deadline.begin(target.deadline_s)
            try:
                outcome = play(content)
            except Hung:
                raise Found(f"no end within {target.deadline_s} s") from None
            except Found:
                raise
            except Exception:  # whatever leaves a target is what fuzzing looks for
                raise Found(traceback.format_exc()) from None
            finally:
                deadline.end()
            watch.check()
            return outcome

        yield play_one
        watch.check()
