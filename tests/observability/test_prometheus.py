"""A real Prometheus scrapes a real cluster: every panel has something to show, and what it shows is what
happened.

The alerts are tested with promtool, on made-up series; one of them fires here, on a real pool without
workers.
"""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml

from halfmoon.schemas.events import PrefillFinished
from tests.cluster.harness import Cluster, running
from tests.cluster.prompts import prompt
from tests.cluster.steering import draining, prefill_of
from tests.eventually import eventually
from tests.observability.parts import FILES, panels, rules
from tests.observability.server import Prometheus, prometheus
from tests.observability.test_files import VLLM
from tests.ports import HeldPorts

TESTS = Path(__file__).parent / "alerts_test.yml"
PROCESSES = {"conductor": 2, "store": 4, "prefill": 2, "decode": 2, "frontend": 1}
pytestmark = pytest.mark.timeout(600)


def run_tool(promtool: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *words], capture_output=True, text=True, timeout=240)


def test_promtool_takes_the_files(promtool: str) -> None:
    for words in (
        ("check", "config", str(FILES / "prometheus.yml")),
        ("check", "rules", *(str(FILES / name) for name in ("rules.yml", "alerts.yml"))),
    ):
        done = run_tool(promtool, *words)
        assert done.returncode == 0, done.stderr


def test_each_alert_fires_when_it_should_and_not_when_it_should_not(promtool: str) -> None:
    done = run_tool(promtool, "test", "rules", str(TESTS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("expr", "what"), [("vector(0) > 1", "never"), ("vector(1)", "always")])
def test_an_alert_that_is_wrong_is_found(promtool: str, tmp_path: Path, expr: str, what: str) -> None:
    """Each of them, when all fire never, or always."""
    alerts = yaml.safe_load((FILES / "alerts.yml").read_text())
    for rule in alerts["groups"][0]["rules"]:
        rule["expr"] = expr
        rule.pop("for", None)
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(alerts))
    tests = yaml.safe_load(TESTS.read_text())
    tests["rule_files"] = [str(FILES / "rules.yml"), str(tmp_path / "alerts.yml")]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    done = run_tool(promtool, "test", "rules", str(tmp_path / "tests.yml"))
    assert done.returncode != 0
    noticed = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
    missed = {rule["alert"] for rule in rules("alerts.yml")} - noticed
    assert missed == set(), f"no test notices that {missed} {what} fires"


async def ask(cluster: Cluster, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{cluster.http}/v1/completions",
            json={"temperature": 0, "ignore_eos": True, **fields},
        ) as answer,
    ):
        return answer.status, orjson.loads(await answer.read())


async def until(what: str, true: Callable[[], bool]) -> None:
    await eventually(lambda: asyncio.to_thread(true), what, every_s=0.5)


async def test_prometheus_sees_the_cluster_as_it_is(promtool: str, tmp_path: Path) -> None:
    ports = HeldPorts(count=10)
    flags = ["--prefill", "2", "--decode", "2", "--conductors", "2", "--metrics-port", str(ports.first)]
    flags += ["--ssd", str(tmp_path), "--ssd-bytes", str(256 << 20), "--pool-mib", "192"]
    with running(tmp_path / "state", *flags, "--ttft-slo-ms", "200000", "--tbt-slo-ms", "100000") as cluster:
        targets = cluster.directory / "prometheus.json"
        with prometheus(tmp_path / "prometheus", targets) as server:
            await until("all targets up", lambda: jobs_up(server) == PROCESSES)
            nc = await cluster.connect()
            usages = []
            first = await cluster.generate(
                nc, prompt=prompt(600), max_tokens=8, temperature=0, ignore_eos=True
            )
            usages.append(first["usage"])
            where = (await prefill_of(cluster, first["id"])).worker_id
            async with draining(cluster, where):  # so the other node fetches what this one has
                again = await cluster.generate(
                    nc, prompt=prompt(600), max_tokens=8, temperature=0, ignore_eos=True
                )
                usages.append(again["usage"])
            for length in (400, 257, 400):
                status, answer = await ask(cluster, prompt=prompt(length), max_tokens=6)
                assert status == 200, answer
                usages.append(answer["usage"])
            assert (await ask(cluster, prompt="x", max_tokens=0))[0] == 400
            assert (
                await ask(cluster, prompt=prompt(4000), max_tokens=4, slo={"ttft_ms": 1, "tbt_ms": 1000})
            )[0] == 429
            await nc.close()
            requests = len(usages)
            for all_of_them in ("vllm:request_success_total", 'halfmoon_orders_total{job="prefill"}'):
                of_all = f"sum({all_of_them})"
                await until(of_all, lambda expr=of_all: server.value(expr) == requests)
            await evaluated(server)
            await the_figures_are_right(cluster, server, usages)
            the_types_are_right(server)
            every_panel_has_data(server)
            assert server.query('ALERTS{alertstate="firing"}') == []
            await a_pool_without_workers_is_told(cluster, server)


async def evaluated(server: Prometheus) -> None:
    """Returns when all rules have been evaluated on what was scraped until now, and what they made is there."""

    def evaluations() -> list[str]:
        groups = server.get("rules")["groups"]
        return [group["lastEvaluation"] for group in groups]

    for _ in range(2):  # rules stand on other rules
        before = await asyncio.to_thread(evaluations)
        await until(
            "all rules are evaluated again",
            lambda before=before: not set(before) & set(evaluations()),  # type: ignore[misc]
        )


def jobs_up(server: Prometheus) -> dict[str, int]:
    return {labels["job"]: int(count) for labels, count in server.query("sum by (job) (up)")}


async def the_figures_are_right(cluster: Cluster, server: Prometheus, usages: list[dict[str, Any]]) -> None:
    """Against what the clients were told, and what the log says."""
    requests = len(usages)
    prefills = [at.event for at in await cluster.events() if isinstance(at.event, PrefillFinished)]
    cached = [  # over NATS, over HTTP
        use["cached_tokens"] if "cached_tokens" in use else use["prompt_tokens_details"]["cached_tokens"]
        for use in usages
    ]
    assert sum(cached) > 0
    fetched = sum(one.cached_fetched_tokens for one in prefills)
    assert fetched > 0
    wanted = {
        "sum(vllm:time_to_first_token_seconds_count)": requests,
        "sum(vllm:e2e_request_latency_seconds_count)": requests,
        "sum(vllm:prompt_tokens_total)": sum(use["prompt_tokens"] for use in usages),
        "sum(vllm:generation_tokens_total)": sum(use["completion_tokens"] for use in usages),
        "sum(vllm:inter_token_latency_seconds_count)": sum(use["completion_tokens"] - 1 for use in usages),
        "sum(vllm:prefix_cache_hits_total)": sum(cached),
        "sum(vllm:prompt_tokens_cached_by_source_total)": sum(cached),
        'sum(vllm:prompt_tokens_cached_by_source_total{source=~"p2p|disk"})': fetched,
        'sum(halfmoon_transfer_bytes_total{direction="write"})': sum(one.pushed_bytes for one in prefills),
        'sum(halfmoon_transfer_bytes_total{direction="read"}) + sum(halfmoon_ssd_bytes_total{direction="read"})': sum(
            one.fetched_bytes for one in prefills
        ),
        "sum(halfmoon_transfer_failures_total)": 0,
        "sum(halfmoon_prefill_queue_seconds_count)": requests,
        "sum(halfmoon_decode_kv_wait_seconds_count)": requests,
        "sum(halfmoon_decode_queue_seconds_count)": requests,
        "sum(halfmoon_decode_first_step_seconds_count)": requests,
        'sum(halfmoon_orders_total{job="decode",result="finished"})': requests,
        'max(halfmoon_cluster_requests_total{outcome="finished"})': requests,
        'max(halfmoon_events_total{kind="RequestFinished"})': requests,
        'sum(halfmoon_slo_requests_total{result="met"})': requests,
        "sum(halfmoon_slo_requests_total)": requests,
        'sum(vllm:admission_rejections_total{reason="ttft_slo"})': 1,
        'sum(halfmoon_request_errors_total{status="429"})': 1,
        'sum(halfmoon_request_errors_total{status="400"})': 1,
        "sum(halfmoon_digest_mismatches_total)": 0,
        "sum(vllm:num_requests_running) + sum(vllm:num_requests_waiting)": 0,
        "count(count by (id) (halfmoon_process_info))": sum(PROCESSES.values()),
        'max(halfmoon_members{role="prefill",state="ready"})': 2,
        'max(halfmoon_members{role="store",state="ready"})': 4,
        "max(halfmoon_store_suspected)": 0,
        'max(halfmoon_policy_slo_seconds{slo="ttft"})': 200,
        'sum(halfmoon_cache_blocks_max{tier="dram"})': 4 * ((192 << 20) // (256 * 46_080)),
        "min(halfmoon_bus_connected)": 1,
        "halfmoon:slo_errors:ratio_rate1h": 0,
    }
    found = {expr: server.value(expr) for expr in wanted}
    assert found == wanted
    decode_s = server.value("sum(halfmoon_decode_step_seconds_sum)")
    assert 0 < decode_s < server.value("sum(vllm:e2e_request_latency_seconds_sum)")
    parts = ("vllm:request_queue_time", "vllm:request_prefill_time", "halfmoon_request_handover")
    of_parts = sum(server.value(f"sum({part}_seconds_sum)") for part in parts)
    assert of_parts == pytest.approx(server.value("sum(vllm:time_to_first_token_seconds_sum)"), rel=0.02)
    assert server.value("max(halfmoon_log_lag_events)") < 100
    assert server.value("max(halfmoon_log_position)") > 50
    assert (
        0
        < server.value('max(halfmoon_stream_bytes{stream="EVENTS"})')
        < server.value('max(halfmoon_stream_bytes_max{stream="EVENTS"})')
    )


def the_types_are_right(server: Prometheus) -> None:
    known = server.get("metadata")
    for name, kind in VLLM.items():
        base = name if name in known else name.removesuffix("_total")
        assert [at["type"] for at in known[base]] == [kind], name


def every_panel_has_data(server: Prometheus) -> None:
    empty = []
    for title, target in panels():
        found = server.query(target["expr"].replace("$__rate_interval", "2m"))
        if not [value for _, value in found if not math.isnan(value)]:
            empty.append((title, target["expr"]))
        legend = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert all(label in labels for labels, _ in found for label in legend), (title, found)
    assert empty == []


async def a_pool_without_workers_is_told(cluster: Cluster, server: Prometheus) -> None:
    firing = 'ALERTS{alertname="HalfmoonNoWorker", alertstate="firing"}'
    async with draining(cluster, "decode-0"), draining(cluster, "decode-1"):
        await until("HalfmoonNoWorker fires", lambda: bool(server.query(firing)))
        assert [labels["role"] for labels, _ in server.query(firing)] == ["decode"]
    await until("HalfmoonNoWorker ends", lambda: not server.query(firing))
