"""The dashboard and the alerts ask for nothing that a server that has seen work does not tell."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ref_server.service.service import Service
from shared import wire
from shared.batch import RolloutBatch

DOCKER = Path(__file__).parents[4] / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "tandem.json"
ALERTS = DOCKER / "prometheus" / "alerts.yml"

# Added, or told, by Prometheus itself.
OF_PROMETHEUS = {"job", "instance", "le"}
SELECTOR = re.compile(r"\b((?:tandem|process)_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring) ?\(([^)]*)\)")

# By name of the metric, and by label, the values that were seen.
Told = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def told(make_service: Callable[..., Service], serve: Callable[..., Any], rollout: Callable[..., RolloutBatch]) -> Told:
    def upload(*bodies: bytes) -> None:
        for body in bodies:
            http.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE})

    def lease() -> dict[str, Any]:
        held = http.post("/v1/batches/lease", json={"consumer": "c", "wait_seconds": 10}).headers
        return {"leases": [{"id": held["Batch-Id"], "token": held["Lease-Token"]}]}

    serving: AbstractContextManager[httpx.Client] = serve(make_service(queue={"max_batches": 2, "max_deliveries": 1}))
    bodies = [wire.encode(rollout()) for _ in range(4)]
    with serving as http:
        upload(bodies[0], bodies[0], bodies[1])
        http.post("/v1/leases/ack", json=lease())
        upload(bodies[2])
        http.post("/v1/leases/release", json=lease() | {"error": "it breaks"})
        upload(bodies[3])
        lease()
        seen: Told = defaultdict(lambda: defaultdict(set))
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


def wrong(expression: str, told: Told) -> list[str]:
    """What an expression asks for that nobody tells."""
    found = []
    labels = OF_PROMETHEUS.copy()
    for name, matchers in SELECTOR.findall(expression):
        if name != "up" and name not in told:
            found.append(name)
            continue
        labels |= set(told[name])
        for label, operator, value in MATCHER.findall(matchers):
            if label not in told[name].keys() | OF_PROMETHEUS:
                found.append(f"{name}: {label}")
            elif operator == "=" and label not in OF_PROMETHEUS and value not in told[name][label]:
                found.append(f"{name}: {label}={value}")
    for grouping in GROUPING.findall(expression):
        found += [label for label in re.findall(r"\w+", grouping) if label not in labels]
    return found


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_ask_for_what_is_told(told: Told, where: str, expression: str) -> None:
    assert wrong(expression, told) == []
    assert SELECTOR.search(expression)
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["uid"]
    assert "id" not in board, "an import gives it one"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for asked in [target for panel in panels for target in panel.get("targets", [])]:
        assert asked["datasource"]["uid"] == "${datasource}"
    names = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)", DASHBOARD.read_text())) <= names


def test_the_configuration_of_prometheus_names_the_job_of_the_alerts() -> None:
    configuration = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    assert [job["job_name"] for job in configuration["scrape_configs"]] == ["tandem"]
    assert configuration["rule_files"] == [ALERTS.name]
    for path in (DOCKER / "grafana" / "provisioning").rglob("*.yml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1
