"""Whatever the cache does, training finishes with the same losses, and the reason is counted."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.fault_proxy import IMPATIENT, Fault, FaultProxy
from support.tiers import most_extended

# What a job counts under each fault; other reasons may follow from the first one (a circuit that
# opens), but every case has one of its own.
QUICK = [Fault.FLIP]
REASONS = {
    "absent": "connect",
    Fault.RESET: "reset",
    Fault.SILENT: "timeout",
    Fault.DRIP: "timeout",
    Fault.GARBAGE: "protocol",
    Fault.STRANGER: "protocol",
    Fault.FAILING: "server_error",
    Fault.BUSY: "busy",
    Fault.FLIP: "digest_mismatch",
    Fault.TRUNCATE: "truncated",
    Fault.SWAP: "wrong_key",
}


@pytest.fixture(scope="module")
def outcomes(jobs, server, tmp_path_factory, is_extended):
    """A sound cold run, then one job under each fault, two at a time."""
    directory = tmp_path_factory.mktemp("faults")
    sound = jobs.start(directory / "sound", url=server.url, namespace="faults").finish()
    (tier,) = (directory / "sound" / "tier" / "v2").glob("[!o]*/faults")  # not this host's own
    stored = sorted(str(path.relative_to(tier)) for path in tier.glob("*/*/??/*"))
    # <kind>/<device type>/<2 hex>/<fingerprint> on disk, without the 2 hex on the wire
    other = "/".join(part for n, part in enumerate(stored[0].split("/")) if n != 2)

    def under(fault):
        with FaultProxy(server.port) as proxy:
            proxy.fault = Fault.NONE if fault == "absent" else fault
            proxy.swap_to = other
            url = "http://127.0.0.1:9" if fault == "absent" else proxy.url
            settings = {"url": url, "namespace": "faults", **IMPATIENT}
            return jobs.start(directory / fault, **settings).finish()

    with ThreadPoolExecutor(2) as pool:
        faults = list(REASONS) if is_extended else QUICK
        found = dict(zip(faults, pool.map(under, faults), strict=True))
    return found | {"sound": sound}


@pytest.mark.parametrize("fault", most_extended(REASONS, quick=QUICK))
def test_training_finishes_with_the_same_losses_and_the_reason_is_counted(outcomes, fault):
    outcome = outcomes[fault]
    assert outcome.report["losses"] == outcomes["sound"].report["losses"]
    assert outcome.stats["fallbacks"].get(REASONS[fault], 0) >= 1, outcome.stats["fallbacks"]
    assert "the job goes on" in outcome.errors


@pytest.mark.extended
def test_no_damaged_artifact_stays_on_this_host(outcomes, tmp_path_factory):
    for fault in (Fault.FLIP, Fault.TRUNCATE):
        assert outcomes[fault].stats["hits_server"] == 0
        assert outcomes[fault].report["compiles"] == 2


@pytest.mark.extended
def test_swapped_artifacts_are_never_loaded_under_the_wrong_key(outcomes):
    outcome = outcomes[Fault.SWAP]
    assert outcome.hits == 1
    assert outcome.report["compiles"] == 1


def test_fault_is_logged_once_per_reason(outcomes):
    for fault, outcome in outcomes.items():
        for reason in outcome.stats["fallbacks"]:
            assert outcome.errors.count(f"graphstash: {reason}:") == 1, (fault, outcome.errors)
