"""What dashboard and alert rules ask Prometheus for, and what a server offers."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser
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
