"""Dashboard, rules and documentation name only what processes really show; each alert is tested and
explained.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live.metrics import ConductorMetrics, Tally
from halfmoon.schemas.roles import WORKER_ROLES
from tests.observability.parts import FILES, NAME, ROOT, families, panels, processes, rules, samples, shown

RECORDED = {rule["record"] for rule in rules("rules.yml")}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
MANUAL = (ROOT / "docs" / "operations.md").read_text()
#: What existing dashboards ask for, with the type and the labels that vLLM gives them.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:prompt_tokens_cached_by_source_total": "counter",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:admission_rejections_total": "counter",
    "vllm:num_preemptions_total": "counter",
}


@pytest.mark.realtime
async def test_every_name_is_shown_by_some_process_and_explained(nats_url: str, tmp_path: Path) -> None:
    async with processes(nats_url, tmp_path) as registries:
        by_role = {role: families(registry) for role, registry in registries.items()}
        values = {role: shown(registry) for role, registry in registries.items()}
    known = {name: kind for found in by_role.values() for name, kind in found.items()}
    assert {name: known.get(name) for name in VLLM} == VLLM
    for name in VLLM:
        roles = [role for role, found in by_role.items() if name in found]
        assert len(roles) == 1 or name == "vllm:kv_cache_usage_perc", (
            f"a sum over {name} would count twice: {roles}"
        )
    for role, found in values.items():
        assert [key for key in found if key.startswith("halfmoon_process_info") and f"role={role}" in key], (
            role
        )
        unlabelled = [key for key in found if key.startswith("vllm:") and "model_name=" not in key]
        assert unlabelled == [], role
    sources = [
        key for key in values["prefill"] if key.startswith("vllm:prompt_tokens_cached_by_source_total")
    ]
    assert [re.findall("source=([a-z0-9]+)", key)[0] for key in sources] == ["device", "host", "p2p", "disk"]

    usable = samples(known) | RECORDED
    queries = [(title, target["expr"]) for title, target in panels()]
    for rule in (*rules("rules.yml"), *rules("alerts.yml")):
        queries.append((rule.get("record") or rule["alert"], rule["expr"]))
    assert {
        (where, name) for where, query in queries for name in NAME.findall(query) if name not in usable
    } == set()

    ours = {name for name in known if not name.startswith("process_") and not name.endswith("_created")}
    explained = set(re.findall(r"^\| `([a-z0-9_:]+)", MANUAL, re.MULTILINE))
    assert ours - explained == set()
    assert {name for name in explained if name.startswith(("halfmoon_", "vllm:"))} - ours == set()


def test_the_check_of_names_finds_one_that_is_wrong() -> None:
    query = (
        'sum by (tier) (rate(halfmoon_cash_blocks[5m])) / vllm:nothing * halfmoon:slo:x{job="halfmoon_no"}'
    )
    assert set(NAME.findall(query)) >= {"halfmoon_cash_blocks", "vllm:nothing", "halfmoon:slo:x"}


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_is_tested_both_ways_and_explained(alert: str) -> None:
    tests = yaml.safe_load((Path(__file__).parent / "alerts_test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"] if check["alertname"] == alert]
    assert [check for check in checks if check["exp_alerts"]], "never seen to fire"
    quiet = [check for check in checks if not check["exp_alerts"]]
    one_of_several = [
        test
        for test in tests
        for check in test["alert_rule_test"]
        if check["alertname"] == alert and 0 < len(check["exp_alerts"]) < len(test["input_series"])
    ]
    assert quiet or one_of_several, "never seen not to fire"
    assert ALERTS[alert]["labels"]["severity"] in ("page", "ticket")
    assert ALERTS[alert]["annotations"]["summary"]
    assert f"### {alert}\n" in MANUAL


def test_prometheus_finds_every_process_of_the_compose_file_and_grafana_finds_prometheus() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    others = sorted(path.name for path in FILES.glob("*.yml") if path.name != "prometheus.yml")
    assert sorted(config["rule_files"]) == others
    named: dict[str, set[tuple[str, int]]] = {}
    for job in config["scrape_configs"]:
        for found in job["dns_sd_configs"]:
            named.setdefault(job["job_name"], set()).update((name, found["port"]) for name in found["names"])
    port = int(services["conductor"]["environment"]["HALFMOON_METRICS_PORT"])
    over = yaml.safe_load((ROOT / "docker" / "compose.vllm.yaml").read_text())["services"]
    adapters = {name for name in over if name.startswith("adapt-")}
    assert {over[name]["environment"]["HALFMOON_METRICS"] for name in adapters} == {f"0.0.0.0:{port}"}
    assert named == {
        "conductor": {("conductor", port)},
        **{role: {(role, port)} for role in WORKER_ROLES},
        "mixed": {(name, port) for name in {"mixed", *adapters}},
        "store": {(role, port + 1) for role in WORKER_ROLES},
        "frontend": {("frontend-0", 8000), ("frontend-1", 8000)},
    }
    for name in WORKER_ROLES:
        assert services[name]["environment"]["HALFMOON_METRICS_PORT"] == str(port)
    for name in ("prometheus", "grafana"):
        service = services[name]
        assert service["profiles"] == ["observability"]
        assert re.fullmatch(
            r"\$\{[A-Z_]+:-(prom/prometheus|grafana/grafana):v?\d+\.\d+\.\d+\}", service["image"]
        )
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / "docker" / source).exists(), source
    source = yaml.safe_load((FILES / "grafana" / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ][0]
    assert source["url"] == "http://prometheus:9090"
    assert {target["datasource"]["uid"] for _, target in panels()} == {source["uid"]}


def test_scaling_examples_name_workers_that_there_are_and_a_metric_that_is_shown() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    scaled, autoscaled = (
        yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    )
    pods = [
        part["metadata"]["name"]
        for file in sorted((ROOT / "docker" / "kubernetes").glob("*.yaml"))
        for part in yaml.safe_load_all(file.read_text())
        if part and part["kind"] == "StatefulSet"
    ]
    assert {each["spec"]["scaleTargetRef"]["name"] for each in (scaled, autoscaled)} <= {*pods}
    # No bus is needed for what a conductor knows without asking.
    metrics = ConductorMetrics(None, Core(), Tally())  # type: ignore[arg-type]
    shown_now = {
        (sample.name, sample.labels.get("role")) for found in metrics.collect() for sample in found.samples
    }
    (trigger,) = scaled["spec"]["triggers"]
    name, role = re.findall(r'max\((\w+)\{role="(\w+)"\}\)', trigger["metadata"]["query"])[0]
    metric = autoscaled["spec"]["metrics"][0]["external"]["metric"]
    wanted = {(name, role), (metric["name"], metric["selector"]["matchLabels"]["role"])}
    assert wanted <= shown_now
