"""The helper that all tests wait with."""

from __future__ import annotations

import asyncio

import pytest

from tests import eventually as waiting
from tests.eventually import Late, eventually, eventually_here, noted_where_late, within


async def test_it_waits_for_the_first_value_that_is_true() -> None:
    values = iter([0, "", 3, 4, 5])
    assert await eventually(lambda: next(values), "three", every_s=0) == 3

    async def answer() -> list[int]:
        await asyncio.sleep(0)
        return [next(values)]

    assert await eventually(answer, "an answer") == [4]
    assert eventually_here(lambda: "there", "a word") == "there"
    assert await within(answer(), "an answer") == [5]


async def test_what_never_comes_is_late_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "BOUND_S", 0.01)
    with pytest.raises(Late, match=r"the moon; it was \[\]"):
        await eventually(list, "the moon")
    with pytest.raises(Late, match="the moon; it was 0"):
        eventually_here(int, "the moon")
    with pytest.raises(Late, match="an answer; it was None"):
        await eventually(asyncio.Event().wait, "an answer")
    with pytest.raises(Late, match=r"a word$"):
        await within(asyncio.Event().wait(), "a word")
    with pytest.raises(Late) as late, noted_where_late(lambda: ["nobody", "speaks"]):
        await within(asyncio.Event().wait(), "a word")
    assert late.value.__notes__ == ["['nobody', 'speaks']"]


@pytest.mark.pure
async def test_a_conditions_own_error_is_its_own() -> None:
    def refuses() -> bool:
        raise TimeoutError("no server")

    async def ends() -> None:
        refuses()

    with pytest.raises(TimeoutError, match="no server") as error:
        await within(ends(), "a server")
    assert not isinstance(error.value, Late)
    with pytest.raises(TimeoutError, match="no server") as error:
        await eventually(refuses, "a server")
    assert not isinstance(error.value, Late)
