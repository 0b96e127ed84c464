"""A tenant's default for KV of similar prompts, in every dialect and over NATS; what a request says goes before it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from frontend_double import LAYOUT, MODEL

from halfmoon.schemas.events import RequestArrived

FAST = msgspec.structs.replace(LAYOUT, numerics="fast")
CHAT = [{"role": "user", "content": "Say which of the two moons is the brighter one, and why."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": list(range(100, 140)), "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": CHAT, "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": CHAT, "max_tokens": 1},
}


def told(answer: Any) -> dict[str, Any]:
    """Where a dialect tells of cached and similar tokens."""
    usage: dict[str, Any] = answer["usage"]
    return usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage


@pytest.mark.pure
def test_a_tenants_requests_are_compared_unless_they_say_otherwise(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        served = 0
        for path, body in BODIES.items():
            for tenant, said, wanted in (
                ("a", None, True),
                ("a", False, False),
                ("b", None, False),
                ("b", True, True),
                ("", None, False),
            ):
                kv = {} if said is None else {"kv": {"similar": said}}
                status, _, answer = await cluster.post(path, {**body, **kv, "tenant": tenant})
                assert status == 200, (path, answer)
                served += 1
                arrived = (await cluster.double.wait_for(RequestArrived, served))[-1]
                where = (path, tenant, said)
                assert bool(arrived.sketch) == wanted, where
                assert ("similar_tokens" in told(answer)) == wanted, where
        for tenant in ("a", "b"):
            prompt = {"prompt": "Half of the moon", "max_tokens": 1, "tenant": tenant}
            await cluster.ask("generate", prompt)
            served += 1
            arrived = (await cluster.double.wait_for(RequestArrived, served))[-1]
            assert bool(arrived.sketch) == (tenant == "a"), tenant

    run(scenario, layout=FAST, similar_tenants="a")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("fields", "numerics"),
    [({"prompt_logprobs": 1}, "fast"), ({}, "exact"), ({"tenant": "x"}, "fast")],
)
def test_a_default_breaks_no_promise(run: Any, fields: dict[str, Any], numerics: str) -> None:
    """A request that says nothing is served as ever where what it asks for, or the cluster, does not allow it."""

    async def scenario(cluster: Any) -> None:
        status, _, answer = await cluster.post("/v1/completions", {**BODIES["/v1/completions"], **fields})
        assert status == 200, answer
        (arrived,) = await cluster.double.wait_for(RequestArrived, 1)
        assert bool(arrived.sketch) == (fields == {"tenant": "x"})

    run(
        scenario,
        layout=msgspec.structs.replace(LAYOUT, numerics=numerics),
        similar_tenants="*",
    )


DOCUMENT = " ".join(
    f"The {number}th moon of the planet is seen every {number} nights, half of it dark."
    for number in range(9)
)


@pytest.mark.pure
def test_documents_are_named_where_they_are_in_the_prompt(run: Any, tokenizer: Any) -> None:
    """As texts and as tokens, in text and chat; one that is not there is passed over, as are their ends where a
    tokenizer joins them with what is beside.
    """
    ids = tokenizer.encode(DOCUMENT)
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": f"Read:{DOCUMENT}s And now?", "max_tokens": 1},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": f"Read this.\n{DOCUMENT}\nWhich one is dark?"}],
            "max_tokens": 1,
        },
    }

    async def scenario(cluster: Any) -> None:
        served = 0
        for path, body in prompts.items():
            for given in (DOCUMENT, ids):
                kv = {"documents": ["Nothing of this is in the prompt. " * 9, given, "short"]}
                status, _, answer = await cluster.post(path, {**body, "kv": kv})
                assert status == 200, (path, answer)
                assert told(answer)["similar_tokens"] == 0
                served += 1
                arrived = (await cluster.double.wait_for(RequestArrived, served))[-1]
                assert arrived.sketch == b"", "it was compared with others"
                (document,) = arrived.documents
                assert len(ids) - 8 <= document.tokens <= len(ids)
                assert 0 < document.first_token < 40
                assert document.first_token + document.tokens < arrived.prompt_tokens

    run(scenario, layout=FAST)


@pytest.mark.pure
def test_exact_numerics_refuse_it_by_name(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        for name, given in (("similar", True), ("documents", [DOCUMENT])):
            body = {"prompt": DOCUMENT, "max_tokens": 1, "kv": {name: given}}
            status, _, answer = await cluster.post("/v1/completions", body)
            assert status == 400
            assert answer["error"]["param"] == "kv"
            assert answer["error"]["message"].startswith(f"kv.{name}: this cluster has exact numerics")

    run(scenario)
