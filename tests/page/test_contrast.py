"""Text of the cluster's page against what is behind it: WCAG 2's contrast, measured by axe-core in a real
browser.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.harness import running
from tests.page.browser import BROWSER, Browser, browsing
from tests.page.test_browser import LIVE, complete

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian: apt-get install chromium)"),
]
LOOKS = [(width, dark) for width in (1366, 390) for dark in (False, True)]
TEXT, LARGE_TEXT = 4.5, 3.0
#: axe-core's own options, but that a single digit is text too. The links that are drawn behind the nodes have
#: none.
BEGIN = """
axe.configure({checks: [{id: 'color-contrast', options: {ignoreUnicode: true, ignoreLength: true, ignorePseudo: false,
  boldValue: 700, boldTextPt: 14, largeTextPt: 18, pseudoSizeThreshold: 0.25, shadowOutlineEmMax: 0.2,
  contrastRatio: {normal: {expected: %s}, large: {expected: %s}}}}]});
document.querySelector('#wires').style.display = 'none';
"""
MEASURE = """
const found = await axe.run(%r, {runOnly: ['color-contrast'], preload: false});
const told = (kind) => found[kind].flatMap((rule) => rule.nodes)
  .map((node) => node.target[0] + ': ' + node.html.slice(0, 80) + ' ' + node.any[0].message);
return {failed: told('violations'), unsure: told('incomplete'), passed: told('passes').length};
"""
#: axe-core measures no placeholders.
PLACEHOLDERS = """
return [...document.querySelectorAll('input[placeholder]')].map((field) =>
  [getComputedStyle(field, '::placeholder').color, getComputedStyle(field).backgroundColor]);
"""
#: The page stays as it is: no view comes, no timer fires. It has noticed that the stream is gone, and lost
#: its colours.
FREEZE = """
window.fetch = () => new Promise(() => {});
window.stop();
await new Promise((done) => setTimeout(done, 500));
for (let timer = setTimeout(() => {}, 1e6); timer > 0; timer--) clearTimeout(timer);
return document.querySelector('#main').classList.contains('stale');
"""
#: All at once that has colours of its own: three verdicts, nodes that are ill, full meters, what was
#: rejected, the key.
STATES = """
const all = (selector) => [...document.querySelectorAll(selector)];
all('main').forEach((main) => main.classList.remove('stale'));
const [verdict] = all('#verdict');
for (const level of ['good', 'warn', 'bad']) {
  const copy = verdict.cloneNode(true);
  copy.className = level;
  verdict.after(copy);
}
all('.tile')[0].classList.add('warn');
all('.tile')[1].classList.add('bad');
all('.node').forEach((node, n) => node.dataset.state = n % 2 ? 'ready' : 'draining');
all('.meter').forEach((meter, n) => meter.classList.toggle('hot', n % 2 === 0));
all('#stages li, #reasons li').forEach((line, n) => line.classList.toggle('some', n % 2 === 0));
all('#key').forEach((key) => key.hidden = false);
"""


async def script(browser: Browser, text: str) -> Any:
    return await browser.value(f"(async () => {{ {text} }})()")


async def measured(browser: Browser, within: str, *, least: int) -> list[str]:
    """Elements with too little contrast, light and dark, on a laptop and a phone, of at least so many elements."""
    failed = []
    for width, dark in LOOKS:
        await browser.look(width=width, height=844, dark=dark)
        await browser.settled()
        found = await script(browser, MEASURE % within)
        # A label that holds its field is overlapped by it.
        failed += [f"{width} {dark}: {each}" for each in found["failed"]]
        failed += [f"{width} {dark}: {each}" for each in found["unsure"] if "#key > label" not in each]
        assert found["passed"] + len(found["failed"]) >= least, found
        for text, behind in await script(browser, PLACEHOLDERS):
            if contrast(text, behind) < TEXT:
                failed.append(f"{width} {dark}: placeholder {text} on {behind}: {contrast(text, behind):.2f}")
    return failed


def contrast(text: str, behind: str) -> float:
    """By WCAG 2.2's formula, of opaque colours as a browser tells them."""
    lights = []
    for colour in (text, behind):
        found = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
        assert found is not None, colour
        parts = [int(part) / 255 for part in found.groups()]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(lights) / min(lights)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def test_every_text_has_the_contrast_that_wcag_asks_for(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    axe = files("axe_core_python").joinpath("axe.min.js").read_text()
    with running(tmp_path / "state", "--port", "0") as cluster:
        async with browsing(tmp_path, cluster.http) as browser:
            await browser.wait(LIVE)
            await browser.value(axe + BEGIN % (TEXT, LARGE_TEXT))
            for number in range(4):
                request_id = await complete(
                    http, cluster.http, f"{number} " + "the moon rises over the sea " * 10
                )
            await complete(http, cluster.http, "the moon", slo={"ttft_ms": 0.001})
            await browser.wait(
                "document.querySelector('#reasons').textContent", lambda text: "ttft_slo" in text
            )
            failed = await measured(browser, "body", least=150)
            await browser.value(f"location.hash = '#request={request_id}'")
            await browser.wait(
                "document.querySelector('#story-body').textContent", lambda text: "placed on" in text
            )
            # axe-core does not know that an open dialog is above all else.
            await browser.value("document.querySelector('#main').style.visibility = 'hidden'")
            failed += await measured(browser, "#story", least=30)
            await browser.value("document.querySelector('#main').style.visibility = ''")
            await browser.value("document.querySelector('#story-close').click()")
            assert await script(browser, FREEZE)
            failed += await measured(browser, "body", least=150)
            await script(browser, STATES)
            failed += await measured(browser, "body", least=150)
            assert not failed, "\n".join(failed)
