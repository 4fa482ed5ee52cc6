"""The alert rules and the dashboard are valid, and query only series that a server exports."""

import json
import re

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from graphstash_schema import Digest
from graphstash_server.testing import LiveServer
from support.compose import DOCKER
from support.processes import captured
from support.waiting import until

OBSERVE = DOCKER / "observe"
RULES = yaml.safe_load((OBSERVE / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((OBSERVE / "grafana" / "graphstash.json").read_text())
KEY = f"/v1/team/{{}}/jax/cpu/{'a' * 64}"
GIVEN_BY_PROMETHEUS = {"job", "instance"}


def queries():
    """Return every expression, as Prometheus receives it."""
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [
        *(rule["expr"] for rule in RULES),
        *(each.replace("$__rate_interval", "1m") for each in shown),
    ]


def promtool(*arguments, directory=OBSERVE):
    done = captured(["promtool", *arguments], cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def scraped(postgres, tmp_path_factory):
    """The labels of each series of a server that has had hits, misses and uploads."""
    with (
        LiveServer(
            tmp_path_factory.mktemp("observed"),
            database_url=postgres.new_database(),
            store_limit_bytes=10**9,
            flush_seconds=0.05,
            log_level="error",
        ) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        digest = {"Repr-Digest": Digest.of(b"blob").repr_digest}
        path = KEY.format("artifacts")
        assert http.put(path, content=b"blob", headers=digest).status_code == 201
        assert http.get(path).status_code == 200
        assert http.get(path.replace("a" * 64, "b" * 64)).status_code == 404

        def series():
            return {
                sample.name: set(sample.labels)
                for family in text_string_to_metric_families(http.get("/metrics").text)
                for sample in family.samples
            }

        until(lambda: "graphstash_namespace_hits_total" in series())
        yield series()


def test_prometheus_accepts_its_configuration_and_the_rules():
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert f"{len(RULES)} rules found" in promtool("check", "rules", "alerts.yml")


def test_every_dashboard_query_is_valid(tmp_path):
    rules = [{"record": f"r{n}", "expr": each} for n, each in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))

    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


def test_every_queried_series_is_in_a_real_scrape(scraped):
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = {name for each in queries() for name in re.findall(r"graphstash[\w:]*", each)}
    asked -= {"graphstash"}  # the name of the job

    assert asked - recorded <= set(scraped), sorted(asked - recorded - set(scraped))
    assert len(asked - recorded) > 15


def test_every_queried_label_is_in_a_real_scrape(scraped):
    for query in queries():
        names = re.findall(r"graphstash_\w+", query)
        chosen = re.findall(r"(graphstash_\w+){(\w+)", query)
        grouped = set(re.findall(r"by \((\w+)\)", query))
        for name, label in [*chosen, *((name, label) for name in names for label in grouped)]:
            assert label in scraped[name] | GIVEN_BY_PROMETHEUS, query


def test_every_series_is_explained_to_operators(scraped):
    guide = (DOCKER.parent / "docs" / "operators.md").read_text()
    guide = guide[guide.index("### Prometheus") : guide.index("### History and runs")]
    for name in scraped:
        short = re.sub(r"_(bucket|count|sum)$", "", name).removeprefix("graphstash")
        if name.startswith(("graphstash_namespace_", "graphstash_build_")):
            continue
        assert short in guide, name


def series(name, values, **labels):
    shown = ",".join(f'{key}="{value}"' for key, value in {"job": "graphstash", **labels}.items())
    return {"series": f"{name}{{{shown}}}", "values": values}


ONE, TWO = {"instance": "server-1:8077"}, {"instance": "server-2:8077"}
STEPS = 6 * 12  # steps of five minutes
CALM = [
    *(series("up", f"1x{STEPS + 24}", **each) for each in (ONE, TWO)),
    *(series("graphstash_database_up", f"1x{STEPS + 24}", **each) for each in (ONE, TWO)),
    *(series("graphstash_listener_connected", f"1x{STEPS + 24}", **each) for each in (ONE, TWO)),
    *(series("graphstash_hits_total", f"0+90x{STEPS + 24}", **each) for each in (ONE, TWO)),
    *(series("graphstash_misses_total", f"0+10x{STEPS + 24}", **each) for each in (ONE, TWO)),
    *(series("graphstash_store_bytes", f"90x{STEPS + 24}", **each) for each in (ONE, TWO)),
    *(series("graphstash_store_limit_bytes", f"100x{STEPS + 24}", **each) for each in (ONE, TWO)),
    series("graphstash_requests_total", f"0+100x{STEPS + 24}", **ONE, status="200"),
    series("graphstash_requests_total", f"0+1x{STEPS + 24}", **ONE, status="503"),
    series("graphstash_deletion_suspended", f"0x{STEPS + 24}", **ONE),
    series("graphstash_leases_expired_total", f"0x{STEPS + 24}", **ONE),
    series("graphstash_healed_total", f"0x{STEPS + 24}", **ONE),
    series("graphstash_refused_total", f"0x{STEPS + 24}", **ONE, code="insufficient_storage"),
]
TROUBLE = {
    "GraphstashDown": [series("up", f"1x{STEPS} 0x24", **ONE)],
    "GraphstashDatabaseDown": [series("graphstash_database_up", f"1x{STEPS} 0x24", **ONE)],
    "GraphstashDeletionSuspended": [
        series("graphstash_deletion_suspended", f"0x{STEPS} 1x24", **ONE)
    ],
    "GraphstashListenerLost": [series("graphstash_listener_connected", f"1x{STEPS} 0x24", **ONE)],
    "GraphstashErrors": [
        series("graphstash_requests_total", f"0+1x{STEPS} {STEPS}+20x24", **ONE, status="503")
    ],
    "GraphstashHitRateDropped": [
        series(name, values, **each)
        for each in (ONE, TWO)
        for name, values in (
            ("graphstash_hits_total", f"0+90x{STEPS} {STEPS * 90}+10x24"),
            ("graphstash_misses_total", f"0+10x{STEPS} {STEPS * 10}+90x24"),
        )
    ],
    "GraphstashStoreNearlyFull": [
        series("graphstash_store_bytes", f"90x{STEPS} 96x24", **each) for each in (ONE, TWO)
    ],
    "GraphstashStoreFull": [
        series("graphstash_refused_total", f"0x{STEPS} 0+1x24", **ONE, code="insufficient_storage")
    ],
    "GraphstashLeasesExpire": [
        series("graphstash_leases_expired_total", f"0x{STEPS} 0+2x24", **ONE)
    ],
    "GraphstashBlobsLost": [series("graphstash_healed_total", f"0x{STEPS} 0+1x24", **ONE)],
}


def test_only_the_alert_of_a_trouble_fires(tmp_path):
    """Six hours of calm precede two of trouble. promtool evaluates the rules every five minutes."""
    assert {rule["alert"] for rule in RULES if "alert" in rule} == set(TROUBLE)
    # promtool would compare labels and annotations, so this counts the firing alerts by name.
    firing = "count by (alertname) (ALERTS{alertstate='firing'})"

    def case(trouble, changed):
        names = {each["series"] for each in changed}
        expected = [{"labels": f'{{alertname="{trouble}"}}', "value": 1}] if changed else []
        return {
            "name": trouble,
            "interval": "5m",
            "input_series": [*changed, *(each for each in CALM if each["series"] not in names)],
            "promql_expr_test": [
                {"expr": firing, "eval_time": f"{(STEPS + 22) * 5}m", "exp_samples": expected}
            ],
        }

    test = {
        "rule_files": [str(OBSERVE / "alerts.yml")],
        "evaluation_interval": "5m",
        "tests": [case("nothing", []), *(case(*each) for each in TROUBLE.items())],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(test))

    promtool("test", "rules", str(file), directory=tmp_path)
