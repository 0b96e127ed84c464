"""The page at `/`: the cluster's state as a table, without scripts or anything from elsewhere."""

from __future__ import annotations

import html
from typing import Any

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>halfmoon</title><style>
body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222;background:#fafafa}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd}}
td.n{{text-align:right;font-variant-numeric:tabular-nums}}
</style></head><body><h1>halfmoon</h1>
<p>{model}: <strong>{ready}</strong> at {http} and {nats}</p>
<table><tr><th>node<th>role<th>state<th>queued<th>running<th>KV used<th>of</tr>{nodes}</table>
<p>Conductors: {conductors}</p><p>See also <a href="/status">/status</a>, <a href="/metrics">/metrics</a>.</p>
</body></html>
"""


def status_page(status: dict[str, Any]) -> str:
    """`status`: as `ClusterStatus.read` gives it."""

    def text(value: object) -> str:
        return html.escape(str(value))

    rows = "".join(
        "<tr>"
        + "".join(f"<td>{text(node[key])}" for key in ("id", "role", "state"))
        + "".join(f'<td class="n">{text(node[key])}' for key in ("queued", "running", "kv_used", "kv_total"))
        + "</tr>"
        for node in status["nodes"]
    )
    conductors = ", ".join(f"{text(each['id'])} at {text(each['seq'])}" for each in status["conductors"])
    return _PAGE.format(
        model=text(status["model"]),
        ready="ready" if status["ready"] else "not ready",
        http=text(status["http"]),
        nats=text(status["nats"]),
        nodes=rows,
        conductors=conductors or "none answers",
    )
