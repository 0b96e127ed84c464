"""The page behind `/`: its files, its stream, and who may see it. The browser's side is in `tests/page`."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from halfmoon.bus.errors import PeerError
from halfmoon.schemas import subjects
from halfmoon.schemas.view import ClusterView, Explained, ExplainRequest, RequestView, Told, ViewRequest
from halfmoon.workers.frontend.page import feed
from tests.eventually import BOUND_S, eventually

ID = "01a1fd24449f555d5bf1f4718d"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.1)
    monkeypatch.setattr(feed, "SILENT_S", BOUND_S)


class Conductors:
    """Stands for two of them; `asked` is every question, `inboxes` where answers were wanted."""

    def __init__(self) -> None:
        self.asked: list[ViewRequest] = []
        self.inboxes: list[str] = []
        self.silent: set[str] = set()
        self.seq = 10

    async def start(self, double: Any) -> None:
        for name in ("c1", "c2"):
            inbox = subjects.view(subjects.CONDUCTORS)
            await double.bus.nc.subscribe(inbox, cb=self._answering(double.bus, name))
            await double.bus.serve(subjects.explain(name), ExplainRequest, self._explain)
        await double.bus.last_seq()  # answered: the server has the subscriptions

    def _answering(self, bus: Any, name: str) -> Any:
        async def answer(msg: Any) -> None:
            asked = feed.msgspec.json.decode(msg.data, type=ViewRequest)
            if name == "c1":
                self.asked.append(asked)
                self.inboxes.append(msg.reply.rpartition(".")[0])
            if name not in self.silent:
                full = asked.conductor_id == name
                self.seq += full
                event = Told(seq=self.seq, at_ns=1, kind="StoreJoined", words=f"node_id={name}")
                view = ClusterView(conductor_id=name, seq=self.seq, full=full, events=[event] if full else [])
                await bus.publish(msg.reply, view)

        return answer

    def _explain(self, asked: ExplainRequest) -> Explained:
        if asked.request_id != ID:
            raise PeerError("not_found", "the log has no such request")
        request = RequestView(request_id=ID, stage="ended", arrived_ns=1, prompt_tokens=3, max_tokens=4)
        return Explained(
            request=request,
            seq=1,
            until_seq=2,
            text="all of it",
            prefill_heads=[],
            decode_heads=[],
            grounds=[],
        )


async def views(response: aiohttp.ClientResponse) -> Any:
    """The events of a stream: (id, view)."""
    text = ""
    async for piece in response.content.iter_any():
        text += piece.decode()
        *whole, text = text.split("\n\n")
        for event in whole:
            fields = dict(line.split(": ", 1) for line in event.split("\n"))
            if "data" in fields:
                assert set(fields) == {"id", "event", "data"}
                assert fields["event"] == "view"
                yield int(fields["id"]), json.loads(fields["data"])


@pytest.mark.pure
def test_every_file_of_the_page_comes_from_here_and_reaches_nothing_else(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        status, headers, page = await cluster.http_get("/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        waiting, seen = set(re.findall(r'(?:src|href)="(/page/[^"]+)"', page.decode())), set()
        assert len(waiting) == 3
        while waiting:
            path = waiting.pop()
            seen.add(path)
            status, headers, body = await cluster.http_get(path)
            assert status == 200, path
            assert headers["x-content-type-options"] == "nosniff"
            assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", body), path
            waiting |= set(re.findall(r'from "(/page/[^"]+)"', body.decode())) - seen
            again, _, nothing = await cluster.http_get(path, headers={"if-none-match": headers["etag"]})
            assert (again, nothing) == (304, b"")
        assert seen >= {"/page/app.js", "/page/request_panel.js", "/page/dom.js", "/page/page.css"}
        assert (await cluster.http_get("/page/../feed.py"))[0] == 404
        assert (await cluster.http_get("/page/feed.py"))[0] == 404

    run(scenario)


def test_conductors_are_asked_only_while_somebody_looks(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.0)  # who asked without being looked at would ask without end

    async def scenario(cluster: Any) -> None:
        conductors = Conductors()
        await conductors.start(cluster.double)
        page_feed = cluster.frontend._http._feed
        for bus in (cluster.frontend.registry.bus, cluster.double.bus) * 3:
            await bus.last_seq()  # answered: what was asked before has come
        assert conductors.asked == []
        monkeypatch.setattr(feed, "EVERY_S", 0.1)
        async with cluster.http.get(cluster.url + "/page/stream") as one:
            assert one.headers["content-type"].startswith("text/event-stream")
            numbers, names, events = [], set(), []
            async for number, view in views(one):
                assert view["state"] == "live"
                numbers.append(number)
                names.add(view["conductor_id"])
                events += [event["seq"] for event in view["events"]]
                assert [each["id"] for each in view["conductors"]] == ["c1", "c2"]
                if len(numbers) == 4:
                    break
            assert len(names) == 1
            assert numbers == sorted(set(numbers))
            assert events == sorted(set(events))
            assert len(events) == 4
            async with cluster.http.get(cluster.url + "/page/stream") as two:
                _, view = await anext(views(two))
                assert len(view["events"]) >= 4, "who comes later is told what is kept"
                asked = len(conductors.asked)
                await eventually(lambda: len(conductors.asked) >= asked + 6, "they are asked on")
                assert len(set(conductors.inboxes)) == 1, "asked once for all"
        await eventually(lambda: not page_feed.watched, "nobody looks")
        for bus in (cluster.frontend.registry.bus, cluster.double.bus):
            await bus.last_seq()  # answered: the last question has come
        asked, before = len(conductors.asked), set(conductors.inboxes)
        assert page_feed._watchers == set()
        # Whoever looks next is answered at another inbox. Had the first asking gone on, it would be among these.
        async with cluster.http.get(cluster.url + "/page/stream"):
            await eventually(lambda: len(conductors.asked) >= asked + 6, "they are asked again")
        assert not before & set(conductors.inboxes[asked:])

    run(scenario)


def test_when_a_conductor_falls_silent_another_answers_and_when_all_do_the_page_says_so(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "SILENT_S", 0.5)

    async def scenario(cluster: Any) -> None:
        conductors = Conductors()
        await conductors.start(cluster.double)
        async with asyncio.timeout(BOUND_S), cluster.http.get(cluster.url + "/page/stream") as response:
            stream = views(response)
            async for _, view in stream:
                if view["state"] == "live":
                    break
            first = view["conductor_id"]
            conductors.silent = {first}
            async for _, view in stream:
                if view.get("conductor_id") not in (None, first):
                    break
            conductors.silent = {"c1", "c2"}
            async for _, view in stream:
                if view["state"] == "no conductor":
                    break
            conductors.silent = set()
            async for _, view in stream:
                if view["state"] == "live":
                    break

    run(scenario)


@pytest.mark.pure
def test_a_key_is_asked_for_as_everywhere_and_a_tenants_is_not_enough(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        await Conductors().start(cluster.double)
        for path in ("/page/stream", f"/page/explain?request={ID}"):
            for key, status in (("", 401), ("wrong", 401), ("of-a-tenant", 403), ("of-all", 200)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                async with cluster.http.get(cluster.url + path, headers=headers) as response:
                    assert response.status == status, (path, key)
                    if status != 200:
                        assert (
                            b"request" not in await response.content.readline()
                            or "error" in await response.text()
                        )
        assert (await cluster.http_get("/"))[0] == 200, "the empty page says nothing of the cluster"

    run(scenario, api_keys={"of-all": "*", "of-a-tenant": "a"})


@pytest.mark.pure
def test_an_explanation_or_why_there_is_none(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        status, _, body = await cluster.http_get(f"/page/explain?request={ID}")
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_conductor")
        await Conductors().start(cluster.double)
        status, headers, body = await cluster.http_get(f"/page/explain?request={ID}")
        assert (status, headers["cache-control"], json.loads(body)["text"]) == (200, "no-store", "all of it")
        for wrong in ("", "x" * 26, "../../etc", "%0a", "a" * 999):
            status, _, body = await cluster.http_get(f"/page/explain?request={wrong}")
            assert (status, json.loads(body)["error"]["code"]) == (404, "not_found"), wrong

    run(scenario)


@pytest.mark.pure
def test_there_is_a_limit_of_who_looks_and_who_does_not_read_holds_one_view(
    run: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(feed, "WATCHERS_MAX", 1)

    async def scenario(cluster: Any) -> None:
        await Conductors().start(cluster.double)
        page_feed = cluster.frontend._http._feed
        async with cluster.http.get(cluster.url + "/page/stream") as response:
            assert response.status == 200
            status, headers, body = await cluster.http_get("/page/stream")
            assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_watchers")
            assert headers["retry-after"] == "5"
            slow = page_feed.watch()
            monkeypatch.setattr(feed, "WATCHERS_MAX", 9)
            first = await anext(slow)
            for _ in range(3 * feed.EVENTS_KEPT):
                page_feed._events.append({"seq": 1, "number": page_feed._number + 1})
                page_feed._tell({"state": "live"})
            second = await anext(slow)
            assert len(page_feed._encoded) <= 2
            assert len(second) < len(first) + feed.EVENTS_KEPT * 64
            await slow.aclose()

    run(scenario)
