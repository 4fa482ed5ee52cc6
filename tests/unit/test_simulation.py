"""The model of a fleet (`make bench-fleet`) keeps its own rules, and agrees with recorded runs."""

import dataclasses

import pytest

from benchmarks.simulation import run
from benchmarks.simulation.compared import COMPARED, UNPACED, predicted, recorded
from benchmarks.simulation.model import simulate
from benchmarks.simulation.settings import Bytes, Deployment, Fleet
from support.tiers import most_extended

FLEET = Fleet(hosts=20, processes=4, graphs=10, new=2, start_seconds=5.0, compile_seconds=20.0)
DEPLOYMENTS = {
    "roomy": Deployment(servers=2, workers=2),
    "full": Deployment(servers=2, workers=1, max_connections=15),
    "nginx": Deployment(bytes_by=Bytes.NGINX),
    "bucket": Deployment(bytes_by=Bytes.BUCKET),
}


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_new_graph_is_compiled_once_and_each_host_downloads_every_other_graph(deployment):
    outcome = simulate(FLEET, deployment)
    counts = outcome.counts
    assert counts["finished"] == FLEET.hosts * FLEET.processes
    assert counts["compiles"] == counts["put stored"] == FLEET.new
    assert counts["fallbacks"] == 0
    # The host that compiled a graph has it on its disk.
    assert counts["downloads"] == FLEET.hosts * FLEET.graphs - FLEET.new
    served = 0.0 if deployment.bytes_by is Bytes.BUCKET else counts["downloads"] * FLEET.size_bytes
    assert outcome.served_bytes == pytest.approx(served)
    assert outcome.most_places <= deployment.max_connections


@pytest.mark.parametrize("places", [16_384, 2])
def test_every_call_has_one_answer_and_one_outcome_for_its_client(places):
    outcome = simulate(FLEET, Deployment(servers=1, workers=1, max_connections=places))
    counts = outcome.counts
    assert outcome.answered == counts["calls"]
    kinds = ("get", "lease", "put", "renew")
    assert sum(n for name, n in counts.items() if name.split()[0] in kinds) == counts["calls"]
    assert (counts["lease full"] > 0) == (places == 2)


def test_same_seed_gives_the_same_outcome():
    assert simulate(FLEET, DEPLOYMENTS["full"]) == simulate(FLEET, DEPLOYMENTS["full"])


def test_processes_compile_stored_graphs_behind_a_link_that_is_too_slow():
    fleet = Fleet(hosts=20, processes=1, graphs=2, new=0, size_bytes=1e9, start_seconds=0.0)
    slow = simulate(fleet, Deployment(servers=1, link_bits_per_second=1e9))
    assert slow.counts["cut downloads"] > 0
    assert slow.counts["compiles"] == slow.counts["fallbacks"] > 0


def test_lease_outlasts_a_long_compilation_although_waiters_fill_the_places():
    slow = dataclasses.replace(FLEET, compile_seconds=60.0)
    counts = simulate(slow, DEPLOYMENTS["full"]).counts
    assert counts["compiles"] == FLEET.new
    assert counts["renew renewed"] > FLEET.new


@pytest.mark.parametrize("name", most_extended(list(recorded()), quick=["roomy"]))
def test_model_agrees_with_counts_of_recorded_run(name):
    measured, model = recorded()[name]["counts"], predicted(recorded()[name])
    compared = COMPARED + (UNPACED if name == "roomy" else ())
    within = {each: pytest.approx(measured[each], rel=0.25) for each in compared}
    assert {each: model[each] for each in compared} == within


def test_command_prints_a_fleet_with_changed_inputs(tmp_path, capsys):
    words = "--no-compare --hosts 5 --starts usual --set graphs=20 servers=1 compile_seconds=3"
    run.main([*words.split(), "--directory", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "5 usual" in shown
    assert (tmp_path / "bench-fleet.json").stat().st_size > 1000
    with pytest.raises(SystemExit, match="no input is called color"):
        run.main(["--no-compare", "--set", "color=1", "--directory", str(tmp_path)])
