"""The Grafana dashboard and the alerts use only metrics that a server exports; the throughput."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ref_server.service.service import Service
from tests.ref_server.calls import MakeService, Rollout, Serve, admit, error, lease, lease_key, settle, upload

DOCKER = Path(__file__).parents[4] / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "tandem.json"
ALERTS = DOCKER / "prometheus" / "alerts.yml"

# Labels that Prometheus adds.
OF_PROMETHEUS = {"job", "instance", "le"}
SELECTOR = re.compile(r"\b((?:tandem|process)_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring) ?\(([^)]*)\)")

# The values seen, by name of the metric and by label.
Exported = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def exported(make_service: MakeService, serve: Serve, rollout: Rollout) -> Exported:
    with serve(make_service(queue={"max_batches": 2, "max_deliveries": 1})) as http:
        first, *others = [rollout() for _ in range(4)]
        for batch in (first, first, others[0]):
            upload(http, batch)
        settle(http, "ack", [lease_key(lease(http))])
        upload(http, others[1])
        settle(http, "release", [lease_key(lease(http))], error="it breaks")
        upload(http, others[2])
        lease(http)
        seen: Exported = defaultdict(lambda: defaultdict(set))
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for sample in family.samples:
                for label, value in {"": "", **sample.labels}.items():
                    seen[sample.name][label].add(value)
    return seen


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", variable["query"]["query"].replace("label_values(", "(")
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def unknown(expression: str, exported: Exported) -> list[str]:
    """Metrics, labels and values of an expression that no server exports."""
    missing = []
    labels = OF_PROMETHEUS.copy()
    for name, matchers in SELECTOR.findall(expression):
        if name != "up" and name not in exported:
            missing.append(name)
            continue
        labels |= set(exported[name])
        for label, operator, value in MATCHER.findall(matchers):
            if label not in exported[name].keys() | OF_PROMETHEUS:
                missing.append(f"{name}: {label}")
            elif operator == "=" and label not in OF_PROMETHEUS and value not in exported[name][label]:
                missing.append(f"{name}: {label}={value}")
    for grouping in GROUPING.findall(expression):
        missing += [label for label in re.findall(r"\w+", grouping) if label not in labels]
    return missing


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_use_exported_metrics(exported: Exported, where: str, expression: str) -> None:
    assert unknown(expression, exported) == []
    assert SELECTOR.search(expression)
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["uid"]
    assert "id" not in board, "an import gives it one"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for query in [target for panel in panels for target in panel.get("targets", [])]:
        assert query["datasource"]["uid"] == "${datasource}"
    names = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)", DASHBOARD.read_text())) <= names


def test_the_configuration_of_prometheus_names_the_job_of_the_alerts() -> None:
    configuration = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    assert [job["job_name"] for job in configuration["scrape_configs"]] == ["tandem"]
    assert configuration["rule_files"] == [ALERTS.name]
    for path in (DOCKER / "grafana" / "provisioning").rglob("*.yml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def test_the_throughput_is_kept(http: httpx.Client, service: Service, rollout: Rollout) -> None:
    batch = rollout(run="fast")
    admit(http, batch)
    lease(http, "fast")
    service.throughput.note()
    for seconds in (60, 86400):
        rates = http.get("/v1/throughput", params={"seconds": seconds}).json()
        assert {*rates} == {"times", "tokens", "uploaded", "taken", "working", "waiting"}
        assert all(len(column) == len(rates["times"]) for column in rates.values())
        assert all(rates[name][-1] > 0 for name in ("tokens", "uploaded", "taken", "waiting"))
    for seconds in (0, 86401):
        assert error(http.get("/v1/throughput", params={"seconds": seconds}), 422)["field"] == "seconds"
