"""Stops a worker of a cluster in the middle of what it does (`halfmoon.workers.hold_points`): a test that kills it
there has not come too late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.workers import hold_points
from tests.cluster.harness import Cluster, running
from tests.eventually import eventually


class Holds:
    """The hold points of one cluster, which `running_with_holds` has started."""

    def __init__(self, cluster: Cluster) -> None:
        self._place = Path(cluster.environment[hold_points.VARIABLE])

    def arm(self, point: str, number: int = 0) -> None:
        """The first thread of all workers that reaches `number` at `point` will hold, once."""
        new = self._place / f"{point}.new"
        new.write_text(f"{number}")
        new.rename(self._place / point)  # nobody reads half a number

    async def held(self, point: str) -> str:
        """What is held at `point`, once something is: an order's id or a worker's."""
        (of,) = await eventually(lambda: self.now(point), f"a worker holds at {point}")
        return of

    def now(self, point: str) -> list[str]:
        """What is held at `point`, or was when its worker was killed."""
        return [file.name.removeprefix(f"{point} ") for file in self._place.glob(f"{point} *")]

    def go_on(self) -> None:
        """All that hold go on. A test that killed who held calls it too: the next one begins with nothing held."""
        for file in self._place.iterdir():
            file.unlink()


@contextlib.contextmanager
def running_with_holds(state: Path, *flags: str) -> Iterator[Cluster]:
    """As `running`, with workers that know hold points."""
    place = state / "holds"
    place.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # of this cluster alone
            patch.setenv(hold_points.VARIABLE, str(place))
            cluster = stack.enter_context(running(state, *flags))
        try:
            yield cluster
        finally:
            Holds(cluster).go_on()  # a worker that holds does not end by itself
