"""Dashboards and alerts against the code: nothing is shown that nobody tells, and what README.md says is so."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GRAFANA, PROMETHEUS = ROOT / "grafana", ROOT / "deploy" / "prometheus"


def load_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_table", GRAFANA / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = load_table()
DASHBOARDS: list[dict[str, Any]] = table.dashboards()
PANELS = [
    pytest.param(panel, id=f"{board['uid']}: {panel['title']}")
    for board in DASHBOARDS
    for panel in board["panels"]
    if panel["type"] != "row"
]


def test_the_table_of_the_readme_is_that_of_the_code() -> None:
    readme = (GRAFANA / "README.md").read_text(encoding="utf-8")
    assert readme.partition(table.BEGIN)[2].partition(table.END)[0] == table.table(), "run: PYTHONPATH=. python grafana/table.py"


def test_every_metric_is_on_a_panel() -> None:
    assert set(table.panels()) == set(table.metrics())


def test_there_are_the_dashboards_that_the_readme_names() -> None:
    named = set(re.findall(r"`(dashboards/\S+\.json)`", (GRAFANA / "README.md").read_text(encoding="utf-8")))
    assert named == {f"dashboards/{path.name}" for path in (GRAFANA / "dashboards").iterdir()}
    assert len({board["uid"] for board in DASHBOARDS}) == len(DASHBOARDS)


@pytest.mark.parametrize("board", [pytest.param(board, id=board["uid"]) for board in DASHBOARDS])
def test_a_dashboard_can_be_pointed_at_any_source_model_and_server(board: dict[str, Any]) -> None:
    assert board["id"] is None
    assert board["schemaVersion"] >= 41
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert list(variables) == ["datasource", "model_name", "instance"]
    for name in ("model_name", "instance"):
        assert table.metrics_of(variables[name]["query"]["query"], table.metrics())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells
        taken |= cells


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 10
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert "$instance" in target["expr"]
        for selector in re.findall(r"moaserve_\w+\{([^}]*)\}", target["expr"]):
            assert 'model_name=~"$model_name"' in selector
        assert not re.search(r"moaserve_\w+(?![\w{])", target["expr"])


def test_alerts_read_metrics_that_there_are_and_say_what_to_do() -> None:
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len(rules) == len({rule["alert"] for rule in rules}) > 5
    for rule in rules:
        of_all = re.search(r"\b(up|process_start_time_seconds)\{", rule["expr"])  # that any program's metrics have
        assert of_all or table.metrics_of(rule["expr"], table.metrics())
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_grafana_finds_what_is_provisioned() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/moaserve.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
