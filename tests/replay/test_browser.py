"""The page in a real browser, where there is one: it draws, and it tells the story of a request."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.logfile import LogFile
from halfmoon.conductor.replay.page import page
from halfmoon.conductor.replay.timeline import timeline
from halfmoon.conductor.replay.verify import Replay

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
GOLDEN = Path(__file__).parent / "golden" / "smollm2.jsonl.zst"


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_the_page_draws_and_tells_why(tmp_path: Path) -> None:
    assert BROWSER is not None
    run = timeline(Replay(LogFile(GOLDEN), explain_requests=explain_all))
    history = max(run.histories, key=lambda history: len(history.attempts))
    file = tmp_path / "run.html"
    file.write_text(page(run, title="run"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    address = f"{file.as_uri()}#{history.arrived.request_id}"
    done = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=10000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    text = html.unescape(done.stdout)
    assert f'data-drawn="{len(run.prefill) + len(run.decode)}"' in text
    told = re.search(r'<div id="story">(.*)</div></aside>', text, re.DOTALL)
    assert told, text[-2000:]
    story = told[1]
    assert f"<h2>{history.arrived.request_id}</h2>" in story
    assert story.count("<h3>") == len(history.why) >= 2
    for why in history.why:
        for candidate in [*why.prefill, *why.decode]:
            assert f"<td>{candidate.worker_id}</td>" in story
    assert story.count('<tr class="won">') == 2 * len(history.attempts)
    assert story.count("<td>happened</td>") >= 2
