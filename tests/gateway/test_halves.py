"""A real Envoy before engines that do one half of each request: it sends a request to the one that answers, and the
prefill engine's adapter asks that one. The engines compute nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.schemas.events import PrefillFinished, RequestFinished
from tests.adapters.fake_fleet import FakeFleet, answer, prompt
from tests.adapters.harness import HALVES, halves
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, running
from tests.eventually import eventually
from tests.gateway.envoy import envoy, no_envoy
from tests.gateway.test_envoy import post, tokens_of
from tests.ports import HeldPorts

pytestmark = [no_envoy, pytest.mark.slow]


@pytest.mark.parametrize("wire", HALVES)
async def test_the_engine_that_answers_is_told_where_the_prompts_kv_is(tmp_path: Path, wire: str) -> None:
    with (
        HeldPorts() as picker,
        halves(wire, 1) as (engines, flags),
        running(tmp_path, *flags, "--dtype", "float32", "--ext-proc-port", f"{picker}", *PATIENT) as cluster,
        envoy(tmp_path, picker) as gateway,
    ):
        nc = await cluster.connect()
        fleet = FakeFleet(cluster, engines, nc)
        computes, answers = fleet.names
        for number, streamed in ((1, True), (2, False)):
            after, ids = await fleet.last_seq(), prompt(number)
            status, said = await post(gateway, prompt=ids, max_tokens=5, stream=streamed, temperature=0)
            assert (status, tokens_of(said)) == (200, answer(ids, 5))
            (computed,), (answered,) = (fleet.engines[name].asked()[number - 1 :] for name in fleet.names)
            assert (computed["drawn"], answered["drawn"]) == (1, 5)
            # It computed the prompt's last token alone, as it was told where the rest is.
            assert answered["cached"] == len(ids) - 1
            assert answered["salt"] == computed["salt"]

            async def ended() -> bool:
                return bool(await fleet.told(after, RequestFinished, answers))  # noqa: B023

            await eventually(ended, "the log has its end", every_s=0.05)
            assert len(await fleet.told(after, PrefillFinished, computes)) == 1
        # What the engine that answers refuses is its client's, and nobody waits for the other half.
        with fleet.refusing(503, answers):
            status, _ = await post(gateway, prompt=prompt(3), max_tokens=5, temperature=0)
        assert status == 503
        status, said = await post(gateway, prompt=prompt(4), max_tokens=5, temperature=0)
        assert (status, tokens_of(said)) == (200, answer(prompt(4), 5))
        assert [one["end"] for one in fleet.engines[computes].asked()][-1] == "length"
        replayed(cluster, tmp_path)
        await nc.close()
