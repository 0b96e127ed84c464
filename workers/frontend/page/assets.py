"""The page's own files: read once, sent with a policy that lets it load and reach nothing but this frontend."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from aiohttp import web

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Assets:
    """`paths` are those of the page's files; `/` is its document. None of them says anything of the cluster."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for entry in sorted(files("halfmoon.workers.frontend.page").iterdir(), key=lambda entry: entry.name):
            _, dot, ending = entry.name.rpartition(".")
            if dot + ending in _TYPES:
                body = entry.read_bytes()
                path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
                self._files[path] = (
                    body,
                    {
                        "content-type": _TYPES[dot + ending],
                        "content-security-policy": POLICY,
                        "x-content-type-options": "nosniff",
                        "referrer-policy": "no-referrer",
                        "cache-control": "no-cache",
                        "etag": f'"{hashlib.sha256(body).hexdigest()[:20]}"',
                    },
                )

    @property
    def paths(self) -> list[str]:
        return list(self._files)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body, headers = self._files[request.path]
        if request.headers.get("if-none-match") == headers["etag"]:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)
