"""Alert rules and dashboard: they parse, and everything that they name exists at a real server's /metrics."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from tests.docker.monitoring import (
    ALERTS,
    DASHBOARD,
    expressions,
    missing,
    offered,
    panels,
    rules,
    uses,
    variables,
)
from tests.engine.support.serving import ROOT

PROMETHEUS = ROOT / "docker/prometheus/prometheus.yaml"
PAGE = """\
# TYPE vllm:kv_eviction_freed_pages_total counter
vllm:kv_eviction_freed_pages_total{engine="0"} 3.0
# TYPE vllm:wait_seconds histogram
vllm:wait_seconds_bucket{engine="0",le="+Inf"} 1.0
vllm:wait_seconds_count{engine="0"} 1.0
vllm:wait_seconds_sum{engine="0"} 0.5
"""


@pytest.mark.parametrize(
    "expression, lacks",
    [
        ("rate(vllm:kv_eviction_freed_pages_total[5m]) > 0", []),
        ("histogram_quantile(0.9, sum by (le) (rate(vllm:wait_seconds_bucket[5m])))", []),
        ('up{job="vllm"} == 0', []),
        ("rate(vllm:kv_eviction_freed_pages[5m])", ["vllm:kv_eviction_freed_pages does not exist"]),
        ("sum by (le) (vllm:wait_seconds_sum)", ["vllm:wait_seconds_sum has no label le"]),
        ('up{engine="0"}', ["up has no label engine"]),
    ],
)
def test_what_a_page_lacks(expression, lacks):
    assert missing(uses(expression), offered(PAGE)) == lacks


def test_alerts_say_what_is_wrong_and_how_bad():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        # A summary names labels; what aggregates without them would print nothing there.
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert f"by ({label}" in rule["expr"] or "by (" not in rule["expr"], rule["alert"]


def test_prometheus_reads_the_alerts_and_scrapes_the_server():
    config = yaml.safe_load(PROMETHEUS.read_text())
    assert config["rule_files"] == [ALERTS.name] and ALERTS.parent == PROMETHEUS.parent
    (job,) = config["scrape_configs"]
    server = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["server-cpu"]
    (alias,) = server["networks"]["default"]["aliases"]
    assert job["static_configs"] == [{"targets": [f"{alias}:8000"]}]
    assert f'up{{job="{job["job_name"]}"' in expressions()["alert ServerDown"]


def test_the_dashboard_is_whole():
    text = DASHBOARD.read_text()
    defined = {variable["name"] for variable in json.loads(text)["templating"]["list"]}
    assert variables(text) == defined
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_grafana_finds_prometheus_and_the_dashboard():
    folder = ROOT / "docker/grafana/provisioning"
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards/dashboards.yaml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in services["grafana"]["volumes"]


@pytest.mark.engine
def test_everything_named_exists_after_one_evicted_request(evicted):
    series = offered(evicted.page)
    for place, expression in expressions().items():
        assert missing(uses(expression), series) == [], place


@pytest.mark.engine
def test_a_renamed_metric_would_be_noticed(evicted):
    wanted = {use for expression in expressions().values() for use in uses(expression) if use.metric != "up"}
    assert len({use.metric for use in wanted}) > 20
    series = offered(re.sub(r"\b(vllm:|http_)", r"\1new_", evicted.page))
    for use in wanted:
        assert missing([use], series) == [f"{use.metric} does not exist"]


@pytest.mark.engine
def test_the_eviction_shows_in_what_is_watched(evicted):
    of_prompts = r'^(vllm:kv_eviction_\w+)\{[^}]*phase="prefill"[^}]*\} (\S+)$'
    values = dict(re.findall(of_prompts, evicted.page, re.M))
    for name in ("evicted_tokens_total", "freed_pages_total", "kept_ratio_count", "decision_seconds_sum"):
        assert float(values[f"vllm:kv_eviction_{name}"]) > 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", PROMETHEUS), ("test", "rules", ROOT / "tests/docker/alerts.test.yaml")],
    ids=["config", "alerts"],
)
def test_promtool_agrees(arguments):
    run = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
