"""Alert rules and dashboard: they parse, and everything that they name exists at a real server's /metrics."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.support.serving import ROOT

DASHBOARD = ROOT / "docker/grafana/dashboards/vllm-kvevict.json"
ALERTS = ROOT / "docker/prometheus/alerts.yaml"

OF_PROMETHEUS = {"up"}
"""Series that Prometheus itself writes for each server."""
OF_SCRAPING = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""


@dataclass(frozen=True)
class Use:
    """A series that an expression selects, and the labels that it needs of it."""

    metric: str
    labels: frozenset[str]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every expression by its place, Grafana's variables filled in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            found[f"panel {panel['title']} {target['refId']}"] = text
    return found


def uses(expression: str) -> set[Use]:
    """Raises ``ValueError`` for what is not PromQL."""
    return set(_uses(promql_parser.parse(expression), frozenset()))


def _uses(node: Any, grouped: frozenset[str]) -> Iterator[Use]:
    """``grouped``: labels that the aggregations around the node need."""
    if isinstance(node, promql_parser.VectorSelector):
        if node.name is None:
            raise ValueError(f"a selector without a metric's name: {node}")
        yield Use(node.name, grouped | {matcher.name for matcher in node.matchers.matchers})
        return
    if isinstance(node, promql_parser.AggregateExpr):
        grouped = frozenset(node.modifier.labels if node.modifier else ())
    for part in ("expr", "vector_selector", "lhs", "rhs"):
        if (child := getattr(node, part, None)) is not None:
            yield from _uses(child, grouped)
    for child in getattr(node, "args", None) or ():
        yield from _uses(child, grouped)


def offered(page: str) -> dict[str, set[str]]:
    """Names of all series at ``/metrics``, those of histograms with their suffixes, each with its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def missing(wanted: Iterable[Use], series: Mapping[str, set[str]]) -> list[str]:
    """What the expressions need and the server does not offer, as sentences."""
    sentences = []
    for use in wanted:
        if use.metric in OF_PROMETHEUS:
            labels = OF_SCRAPING
        elif use.metric not in series:
            sentences.append(f"{use.metric} does not exist")
            continue
        else:
            labels = series[use.metric] | OF_SCRAPING
        sentences += [f"{use.metric} has no label {label}" for label in sorted(use.labels - labels)]
    return sorted(sentences)


def variables(text: str) -> set[str]:
    """Grafana's variables that a text uses."""
    return set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}


PROMETHEUS = ROOT / "docker/prometheus/prometheus.yaml"


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
    assert len({use.metric for expression in expressions().values() for use in uses(expression)}) > 21


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", PROMETHEUS), ("test", "rules", ROOT / "tests/docker/alerts.test.yaml")],
    ids=["config", "alerts"],
)
def test_promtool_agrees(arguments):
    run = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
