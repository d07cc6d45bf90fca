"""The Grafana dashboard of the examples: its metrics and labels exist, and it leaves out only what its README lists."""

import json
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from sglang_ext.managers import feature, metrics
from sglang_ext.managers.kv_transfer import transfer_metrics

FOLDER = Path(__file__).parents[3] / "examples/monitoring"
PANELS = [panel for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """The labels of each metric ``sglang_ext:*``, by the name that Prometheus has, without that prefix."""
    sources = [pkgutil.resolve_name(name) for name in feature.FEATURES]
    gauges, counters = metrics.GAUGES | transfer_metrics.LINK_GAUGES, dict(metrics.COUNTERS)
    for of_role in transfer_metrics.LINK_COUNTERS.values():
        counters.update(of_role)
    for source in sources:
        gauges.update(source.gauges)
        counters.update(source.counters)
    found = {name: set(label) for name, (_, *label) in gauges.items()}
    # The known values of a counter's label follow it.
    found |= {f"{name}_total": set(rest[:1]) for name, (_, *rest) in counters.items()}
    return found | {"accept_length_bucket": {"le"}, "accept_length_sum": set(), "accept_length_count": set()}


def test_each_metric_of_the_dashboard_is_exported() -> None:
    assert not {name for query in QUERIES for name in re.findall(r"sglang_ext:(\w+)", query)} - set(exported())


def test_each_exported_metric_is_on_the_dashboard_or_in_the_list_of_its_readme() -> None:
    shown = {name for query in QUERIES for name in re.findall(r"sglang_ext:(\w+)", query)}
    left_out = set(re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert set(exported()) - shown == left_out


def test_queries_group_by_labels_that_their_metric_has() -> None:
    labels = exported()
    grouped = [found for query in QUERIES for found in re.findall(r"by \(([\w, ]+)\) \((?:rate\()?sglang_ext:(\w+)", query)]
    assert len(grouped) > 40
    assert not [(by, name) for by, name in grouped if not set(by.split(", ")) <= labels[name] | {"instance", "model_name"}]


def test_legends_name_labels_that_their_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = set(", ".join(re.findall(r"by \(([\w, ]+)\)", target["expr"])).split(", "))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_panels_have_a_description_and_an_id_of_their_own() -> None:
    assert all(panel["description"] for panel in PANELS)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_each_exported_metric_is_in_the_manual() -> None:
    page = (FOLDER.parents[1] / "docs/metrics.md").read_text()
    names = {re.sub(r"^accept_length_\w+", "accept_length", name) for name in exported()}
    assert not [name for name in names if f"`{name}" not in page]


@pytest.mark.parametrize("name", ["sglang_ext:drafts_total", "sglang_ext:kv_links", "sglang:num_running_reqs", "process_cpu_seconds_total"])
def test_prometheus_renames_metrics_whose_colon_became_an_underscore(name: str) -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    for scraped in (name, name.replace(":", "_")):
        for rule in job["metric_relabel_configs"]:
            found = re.fullmatch(rule["regex"], scraped)
            scraped = rule["replacement"].replace("$1", found[1]) if found else scraped
        assert scraped == name
