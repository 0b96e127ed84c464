"""The cluster's page in a real browser, on real clusters: `make test-page`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.cluster.harness import Cluster, running
from tests.eventually import eventually
from tests.page.browser import BROWSER, Browser, browsing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian: apt-get install chromium)"),
]
MODEL = "smollm2-135m-instruct"
LIVE = "document.body.dataset.state === 'live'"
STATE = "document.body.dataset.state"
VIEWS = "+document.body.dataset.views"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without a model, so that a request takes milliseconds; two conductors."""
    state = tmp_path_factory.mktemp("null")
    with running(state, "--port", "0", "--engine", "null", "--conductors", "2") as made:
        yield made


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def complete(
    http: aiohttp.ClientSession, url: str, prompt: str, tokens: int = 4, **fields: object
) -> str:
    """The id of a request that got an answer, or was refused."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    async with http.post(f"{url}/v1/completions", json=body) as response:
        told = await response.json()
        assert response.status in (200, 429), told
        return response.headers.get("x-request-id", "")


@contextlib.asynccontextmanager
async def load(http: aiohttp.ClientSession, url: str, at_once: int, **fields: object) -> AsyncIterator[None]:
    """So many requests at once, until the end of the block."""

    async def again(number: int) -> None:
        while True:
            await complete(http, url, f"{number} " + "the moon rises over the sea " * 40, **fields)

    tasks = [asyncio.create_task(again(number)) for number in range(at_once)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fits(browser: Browser) -> bool:
    """No horizontal scroll, and nothing that sticks out."""
    wide = "document.documentElement.scrollWidth <= window.innerWidth"
    out = (
        "[...document.querySelectorAll('header *, main *')].filter(e => !e.closest('.wide, .bar, svg') && "
        "e.getBoundingClientRect().right > window.innerWidth + 1).map(e => e.tagName + '#' + e.id + '.' + e.className)"
    )
    found = await browser.value(out)
    assert found == []
    return bool(await browser.value(wide))


async def test_it_loads_without_errors_tells_of_the_cluster_and_explains(
    cluster: Cluster, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with browsing(tmp_path, cluster.http) as browser:
        await browser.wait(LIVE)
        nodes = await browser.value("[...document.querySelectorAll('.node')].map(n => n.dataset.node)")
        assert sorted(nodes) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        assert await browser.value("document.querySelector('#verdict strong').textContent") == "Ready"
        await browser.wait(
            "document.querySelector('#link').textContent", lambda text: text == "live · 2 conductors"
        )
        secret = "xylophonic marmalade"
        request_id = await complete(http, cluster.http, secret)
        link = f"document.querySelector('#requests a[href=\"#request={request_id}\"]')"
        await browser.wait(f"{link} !== null")
        await browser.wait(
            "document.querySelector('#verdict strong').textContent", lambda text: text == "Healthy"
        )
        await browser.value(f"{link}.click()")
        story = "document.querySelector('#story-body').textContent"
        text = await browser.wait(story, lambda text: "placed on" in text)
        assert "Prefill candidates" in text
        assert "prefill-0" in text
        assert "prefill-1" in text
        assert "finished" in text
        assert await browser.value("document.activeElement.closest('dialog') !== null")
        await browser.value("document.querySelector('#story-close').click()")
        await browser.wait("!document.querySelector('#story').open && location.hash === ''")
        await browser.value("location.hash = '#request=01a1fd24449f555d5bf1f4718d'")
        await browser.wait(story, lambda text: "no such request" in text or "too far back" in text)
        whole = await browser.value("document.documentElement.innerHTML")
        assert request_id in whole
        assert not any(word in whole for word in secret.split()), "no text of a prompt"
        for width in (1366, 390, 320):
            await browser.look(width=width, height=844, dark=width == 390)
            await browser.settled()
            assert await fits(browser), width
        # The browser notes that the story of no request is a 404.
        assert [error for error in browser.errors if "404" not in error] == []


async def test_the_event_log_is_filtered_and_reached_by_keyboard(
    cluster: Cluster, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with browsing(tmp_path, cluster.http) as browser:
        await browser.wait(LIVE)
        await complete(http, cluster.http, "x")
        lines = "[...document.querySelectorAll('#events li')].map(line => line.textContent)"
        await browser.wait(lines, lambda found: any("RequestFinished" in line for line in found))
        assert not any("Heartbeat" in line for line in await browser.value(lines))
        await browser.value("document.querySelector('#beats').click()")
        await browser.wait(lines, lambda found: any("WorkerHeartbeat" in line for line in found))
        await browser.value("document.querySelector('#words').focus()")
        await browser.call("Input.insertText", text="requestfinished decode-")
        found = await browser.value(lines)
        assert found
        assert all("RequestFinished" in line and "decode-" in line for line in found)
        order = []
        await browser.value("document.activeElement.blur(); window.scrollTo(0, 0)")
        for _ in range(12):
            await browser.call(
                "Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
            await browser.call(
                "Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
            order.append(await browser.value("document.activeElement.id || document.activeElement.className"))
        assert order[:3] == ["skip", "wanted", "request"] or "wanted" in order, order
        unnamed = await browser.value(
            "[...document.querySelectorAll('button, input, svg[role], section')].filter(e => !e.hidden && "
            "!e.closest('[hidden]') && !(e.textContent.trim() || e.getAttribute('aria-label') || "
            "e.getAttribute('aria-labelledby') || e.labels?.length)).map(e => e.outerHTML)"
        )
        assert unnamed == []
        assert browser.errors == []


async def test_under_as_much_load_as_the_machine_makes_it_samples(
    cluster: Cluster, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The size of the page is bounded by its own limits, not by the load."""
    async with browsing(tmp_path, cluster.http) as browser:
        await browser.wait(LIVE)
        async with load(http, cluster.http, 24):
            await browser.wait(
                "document.querySelector('#log-facts').textContent", lambda text: "sample" in text
            )
            before = await browser.value(VIEWS)
            await browser.wait(VIEWS, lambda views: views >= before + 2)
            assert await browser.value("document.querySelectorAll('#requests > li').length") <= 14
            assert await browser.value("document.querySelectorAll('#events > li').length") <= 80
            assert await browser.value("document.querySelectorAll('*').length") < 2_500
        assert browser.errors == []


async def test_it_survives_a_nats_server_and_a_frontend_that_are_started_again(
    cluster: Cluster, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with browsing(tmp_path, cluster.http) as browser:
        await browser.wait(LIVE)
        for process in ("nats-server", "frontend"):
            if process == "frontend":
                cluster.kill("frontend-0")
            else:  # killed alone, it is back before anything is missed
                cluster.kill_server(signal.SIGSTOP)
            await browser.wait(STATE, lambda state: state == "lost")
            text = await browser.value("document.querySelector('#link').textContent")
            assert "reconnecting" in text or "NATS" in text or "conductor" in text
            assert await browser.value("document.querySelector('#main').classList.contains('stale')")
            assert await browser.value("document.querySelectorAll('.node').length") == 4, (
                "what was known stays"
            )
            if process == "nats-server":
                cluster.kill_server()
            await browser.wait(LIVE)
            before = await browser.value(VIEWS)
            await browser.wait(VIEWS, lambda views, before=before: views > before + 1)
            request_id = await _until_served(http, cluster.http)
            await browser.wait(f"document.querySelector('a[href=\"#request={request_id}\"]') !== null")
        # The browser notes connections that are refused; there must be no other error.
        assert [error for error in browser.errors if "net::ERR" not in error] == []


async def _until_served(http: aiohttp.ClientSession, url: str) -> str:
    async def served() -> str:
        with contextlib.suppress(aiohttp.ClientError, AssertionError):
            return await complete(http, url, "x")
        return ""

    return await eventually(served, "a request is served")


async def test_a_conductor_dies_and_another_feeds_the_page(
    cluster: Cluster, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with browsing(tmp_path, cluster.http) as browser:
        await browser.wait(LIVE)
        async with http.get(cluster.http + "/status") as response:
            assert len((await response.json())["conductors"]) == 2
        cluster.kill("conductor-1", signal.SIGSTOP)
        try:
            await browser.wait(
                "document.querySelector('#link').textContent", lambda text: text == "live · 1 conductor"
            )
            before = await browser.value(VIEWS)
            await browser.wait(VIEWS, lambda views: views > before + 2)
        finally:
            cluster.kill("conductor-1", signal.SIGCONT)
        await browser.wait(
            "document.querySelector('#link').textContent", lambda text: text == "live · 2 conductors"
        )


async def test_a_request_moves_through_its_stages_on_a_real_model(
    http: aiohttp.ClientSession, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("k-of-an-operator\n")
    state = tmp_path_factory.mktemp("model")
    with running(state, "--port", "0", "--api-keys-file", str(keys)) as cluster:
        http.headers["authorization"] = "Bearer k-of-an-operator"
        async with browsing(tmp_path, cluster.http) as browser:
            # Who has no key sees nothing; a wrong one is refused; the right one opens the page.
            await browser.wait("!document.querySelector('#key').hidden")
            assert await browser.value("document.querySelector('#main').hidden")
            for key in ("wrong", "k-of-an-operator"):
                await browser.value(
                    f"document.querySelector('#key-value').value = '{key}'; "
                    "document.querySelector('#key').requestSubmit()"
                )
                if key == "wrong":
                    await browser.wait(
                        "document.querySelector('#key-why').textContent", lambda t: "not do" in t
                    )
            await browser.wait(LIVE)
            asked = asyncio.create_task(complete(http, cluster.http, "the moon and the sea " * 150, 40))
            seen: list[str] = []

            async def ended() -> bool:
                stage = await browser.value("document.querySelector('#requests li')?.dataset.stage || ''")
                if stage and stage not in seen:
                    seen.append(stage)
                return asked.done() and seen[-1:] == ["finished"]

            await eventually(ended, "the page shows its end", every_s=0.05)
            order = ["queued", "transfer", "prefill", "handover", "decode", "finished"]
            assert seen == [stage for stage in order if stage in seen]
            assert {"prefill", "decode", "finished"} <= set(seen), seen
            moved = "document.querySelector('#moving').textContent"
            await browser.wait(moved, lambda text: "prefill-" in text and "→ decode-" in text)
            assert await browser.value("document.querySelectorAll('#wires path').length") >= 1
            dram = "[...document.querySelectorAll('.meter.dram em')].map(e => e.textContent)"
            await browser.wait(dram, lambda fills: len(fills) == 4 and any(fill != "0 %" for fill in fills))
            bars = "[...document.querySelectorAll('#requests .bar i')].map(e => e.title.split(' ')[0])"
            assert {"prefill", "decode"} <= set(await browser.value(bars))
            refused_id = await complete(http, cluster.http, "the moon", slo={"ttft_ms": 0.001})
            await browser.wait(
                "document.querySelector('#reasons').textContent", lambda text: "ttft_slo" in text
            )
            assert "rejected" in await browser.value("document.querySelector('#verdict').textContent")
            await browser.value(
                f"document.querySelector('#wanted').value = 'cmpl-{refused_id}'; "
                "document.querySelector('#find').requestSubmit()"
            )
            story = "document.querySelector('#story-body').textContent"
            assert "over the limit" in await browser.wait(story, lambda text: "refused" in text)
            assert [error for error in browser.errors if "401" not in error] == []


async def test_without_attention_workers_the_verdict_is_that_nothing_is_served(tmp_path: Path) -> None:
    verdict = (
        "document.querySelector('#verdict').className + ': ' + document.querySelector('#verdict').textContent"
    )
    flags = ("--port", "0", "--attention", "2", "--prefill", "1", "--decode", "1")
    with running(tmp_path / "state", *flags) as cluster:
        async with browsing(tmp_path, cluster.http) as browser:
            await browser.wait(LIVE)
            ready = "1 prefill, 1 decode and 2 attention workers ready"
            await browser.wait(verdict, lambda text: text.startswith("good: ") and ready in text)
            cluster.kill("attention-0", signal.SIGSTOP)
            await browser.wait(verdict, lambda text: text.startswith("warn: ") and "attention-0" in text)
            cluster.kill("attention-1", signal.SIGSTOP)
            told = "bad: Not serving: decode workers keep no KV, and no attention worker is ready"
            await browser.wait(verdict, lambda text: text.startswith(told))
            card = "document.querySelector('.node[data-node=decode-0]')"
            assert await browser.value(f"{card}.dataset.state") == "no attention"
            for name in ("attention-0", "attention-1"):
                cluster.kill(name, signal.SIGCONT)
            await browser.wait(verdict, lambda text: not text.startswith("bad: "))
            assert await browser.value(f"{card}.dataset.state") == "ready"
        assert [error for error in browser.errors if "net::ERR" not in error] == []
