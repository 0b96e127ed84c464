"""Pages of other sites cannot use a cluster through the browser that shows them. Our page, curl and libraries can."""

from __future__ import annotations

from typing import Any

import pytest

PROMPT = {"prompt": "Once", "max_tokens": 1}
POST = "/v1/completions"


async def status_of(cluster: Any, path: str, headers: dict[str, str], body: Any = None) -> tuple[int, str]:
    """(status, the error's code)."""
    if body is None:
        status, _, answer = await cluster.http_get(path, headers=headers)
        return status, "foreign" if b'"foreign_' in answer else ""
    status, _, answer = await cluster.post(path, body, headers=headers)
    return status, answer.get("error", {}).get("code", "")


OURS = [
    "127.0.0.1:8000",
    "localhost",
    "localhost:9000",
    "LOCALHOST:1",
    "[::1]:8000",
    "a.localhost",
    "127.1.2.3",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.5",
    "",
    "[",
    "::1:",
]


@pytest.mark.pure
def test_a_frontend_on_loopback_is_asked_by_loopbacks_names_only(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        for host in OURS:
            assert await status_of(cluster, "/health", {"host": host}) == (200, ""), host
            assert await status_of(cluster, POST, {"host": host}, PROMPT) == (200, ""), host
        for host in FOREIGN[:5]:
            for path in (
                "/",
                "/health",
                "/status",
                "/metrics",
                "/page/stream",
                "/page/app.js",
                "/v1/models",
                "/nothing",
            ):
                assert await status_of(cluster, path, {"host": host}) == (403, "foreign"), (host, path)
            assert await status_of(cluster, POST, {"host": host}, PROMPT) == (403, "foreign_host"), host
        for host in FOREIGN[5:]:
            assert (await status_of(cluster, "/health", {"host": host}))[0] in (400, 403), host

    run(scenario)


@pytest.mark.pure
def test_names_can_be_allowed_and_other_machines_ask_by_names_that_nobody_knows(run: Any) -> None:
    async def listed(cluster: Any) -> None:
        for host, status in (("llm.example", 200), ("llm.example:8443", 200), ("exact.example:80", 200),
                             ("exact.example", 403), ("localhost", 200), ("evil.example", 403)):  # fmt: skip
            assert (await status_of(cluster, "/health", {"host": host}))[0] == status, host
        ours = {"host": "llm.example", "origin": "https://llm.example"}
        proxied = {"host": "127.0.0.1:8000", "origin": "https://llm.example"}
        for headers in (ours, proxied):
            assert await status_of(cluster, POST, headers, PROMPT) == (200, "")

    async def any_name(cluster: Any) -> None:
        for headers in ({"host": "x.example"}, {"host": "x.example", "origin": "https://y.example"}):
            assert await status_of(cluster, POST, headers, PROMPT) == (200, "")

    async def wide(cluster: Any) -> None:
        cluster.url = cluster.url.replace("0.0.0.0", "127.0.0.1")
        for host in ("frontend-0:8000", "10.0.0.5:8000", "x.example"):
            assert await status_of(cluster, POST, {"host": host}, PROMPT) == (200, "")
            foreign = {"host": host, "origin": "http://evil.example"}
            assert await status_of(cluster, POST, foreign, PROMPT) == (403, "foreign_origin")

    async def wide_and_listed(cluster: Any) -> None:
        cluster.url = cluster.url.replace("0.0.0.0", "127.0.0.1")
        for host, status in (("llm.example", 200), ("10.0.0.5:8000", 200), ("x.example", 403)):
            assert (await status_of(cluster, "/health", {"host": host}))[0] == status, host

    run(listed, http_allowed_hosts="llm.example, Exact.example:80")
    run(any_name, http_allowed_hosts="*")
    run(wide, http_host="0.0.0.0")
    run(wide_and_listed, http_host="0.0.0.0", http_allowed_hosts="llm.example")


ORIGINS = [
    "http://evil.example",
    "null",
    "http://localhost:3000",
    "http://{}.evil.example",
    "https://{}",
    "file://",
]


@pytest.mark.pure
@pytest.mark.parametrize("origin", [*ORIGINS, "http://[", "\xff", ""])
def test_a_foreign_origin_is_refused_and_our_own_is_not(run: Any, origin: str) -> None:
    async def scenario(cluster: Any) -> None:
        own = cluster.url.removeprefix("http://")
        for path, body in (
            ("/v1/models", None),
            (POST, PROMPT),
            ("/tokenize", {"prompt": "x"}),
            ("/page/stream", None),
        ):
            headers = {"origin": origin.format(own)}
            expected = (
                (200, "")
                if origin == "https://{}"
                else (403, "foreign" if body is None else "foreign_origin")
            )
            if path != "/page/stream" or origin != "https://{}":
                assert await status_of(cluster, path, headers, body) == expected
        assert await status_of(cluster, POST, {"origin": cluster.url}, PROMPT) == (200, "")

    run(scenario)


@pytest.mark.pure
def test_a_page_of_another_site_may_link_to_ours_and_no_more(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        for path in ("/page/stream", "/page/explain?request=x", "/metrics"):
            assert await status_of(cluster, path, foreign) == (403, "foreign"), path
        assert await status_of(cluster, "/", {**foreign, "sec-fetch-mode": "navigate"}) == (200, "")
        same = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
        assert await status_of(cluster, "/status", same) == (200, "")

    run(scenario)


@pytest.mark.pure
def test_a_body_says_that_it_is_json(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        for path in (POST, "/v1/chat/completions", "/tokenize"):
            for kind in (
                "text/plain",
                "application/x-www-form-urlencoded",
                "multipart/form-data",
                "",
                "application/jsonp",
            ):
                status, code = await status_of(cluster, path, {"content-type": kind}, PROMPT)
                assert (status, code) == (415, "unsupported_media_type"), (path, kind)
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            assert await status_of(cluster, POST, {"content-type": kind}, PROMPT) == (200, "")

    run(scenario)
