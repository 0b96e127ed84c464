"""A real browser without a window, driven over its own protocol (Chrome DevTools): no driver to install
beside it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.eventually import Late, eventually, within

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. `errors`: what it wrote to its console as errors, what it threw, and what it could not load."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await within(answer, f"the browser answers {method}")

    async def open(self, url: str, *, width: int = 1366, height: int = 768, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.look(width=width, height=height, dark=dark)
        await self.call("Page.navigate", url=url)
        await self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def look(self, *, width: int, height: int, dark: bool) -> None:
        """Size of the window, and the colours that its user prefers."""
        mobile = width < 500
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """The value of JavaScript in the page. Raises AssertionError with what it threw."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait(self, expression: str, fits: Callable[[Any], bool] = bool) -> Any:
        """The value of `expression` once it fits. Raises Late with the last one."""
        last: list[Any] = []

        async def fitting() -> bool:
            last[:] = [await self.value(expression)]
            return fits(last[0])

        try:
            await eventually(fitting, f"{expression} fits", every_s=0.05)
        except Late as late:
            late.add_note(f"it is {last!r}")
            raise
        return last[0]

    async def settled(self) -> None:
        """Returns when the page is laid out and drawn as it now is: every transition of a colour is at its end."""
        await self.value(
            "new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
            ".then(() => document.getAnimations().forEach(one => one.effect.getComputedTiming().iterations === Infinity"
            " || one.finish()))"
        )

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._waiting.pop(told["id"])
                if answer.done():
                    continue
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]))
                else:
                    answer.set_result(told["result"])
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:800])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"])[:800])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(params["entry"])[:800])


@contextlib.asynccontextmanager
async def browsing(directory: Path, url: str, **look: Any) -> AsyncIterator[Browser]:
    """A browser of its own, with a fresh profile in `directory`, that has opened `url`; ended at the end."""
    assert BROWSER is not None
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    quiet = [
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-extensions",
    ]
    profile = directory / "profile"
    # Killed, it leaves a folder with a socket in it, whose name would be too long below `directory`.
    temporary = tempfile.mkdtemp(prefix="halfmoon-page-")
    process = await asyncio.create_subprocess_exec(
        BROWSER, *flags, *quiet, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": temporary}, start_new_session=True,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as http:
            socket = await eventually(
                lambda: _connect(http, profile / "DevToolsActivePort"), "the browser is there"
            )
            browser = Browser(socket)
            await browser.open(url, **look)
            try:
                yield browser
            finally:
                await browser.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(temporary)


async def _connect(http: aiohttp.ClientSession, port_file: Path) -> aiohttp.ClientWebSocketResponse | None:
    """None while it is not there."""
    try:
        port = int((await asyncio.to_thread(port_file.read_text)).split()[0])
        async with http.get(f"http://127.0.0.1:{port}/json") as response:
            targets = await response.json()
        target = next(each for each in targets if each["type"] == "page")
        return await http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20)
    except (OSError, ValueError, IndexError, aiohttp.ClientError, StopIteration):
        return None
