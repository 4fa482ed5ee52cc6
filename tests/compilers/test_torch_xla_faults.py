"""Whatever the cache does, training finishes with the same losses, and the reason is counted."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.fault_proxy import IMPATIENT, Fault, FaultProxy

pytestmark = pytest.mark.extended

# What a job counts under each fault; other reasons may follow from the first one (a circuit that
# opens), but every case has one of its own.
REASONS = {
    Fault.RESET: "reset",
    Fault.DRIP: "timeout",
    Fault.GARBAGE: "protocol",
    Fault.STRANGER: "protocol",
    Fault.BUSY: "busy",
    Fault.SWAP: "wrong_key",
}


@pytest.fixture(scope="module")
def outcomes(jobs, server, tmp_path_factory):
    """A sound cold run, then one job under each fault, two at a time."""
    directory = tmp_path_factory.mktemp("faults")
    sound = jobs.start(directory / "sound", url=server.url, namespace="faults").finish()
    (tier,) = (directory / "sound" / "tier" / "v2").glob("[!o]*/faults")  # not this host's own
    stored = sorted(str(path.relative_to(tier)) for path in tier.glob("*/*/??/*"))
    # <kind>/<device type>/<2 hex>/<fingerprint> on disk, without the 2 hex on the wire
    other = "/".join(part for n, part in enumerate(stored[0].split("/")) if n != 2)

    def under(fault):
        with FaultProxy(server.port) as proxy:
            proxy.fault = fault
            proxy.swap_to = other
            settings = {"url": proxy.url, "namespace": "faults", **IMPATIENT}
            return jobs.start(directory / fault, **settings).finish()

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(REASONS, pool.map(under, REASONS), strict=True))
    return found | {"sound": sound}


@pytest.mark.parametrize("fault", REASONS)
def test_training_finishes_with_the_same_losses_and_the_reason_is_counted(outcomes, fault):
    outcome = outcomes[fault]
    assert outcome.report["losses"] == outcomes["sound"].report["losses"]
    assert outcome.stats["fallbacks"].get(REASONS[fault], 0) >= 1, outcome.stats["fallbacks"]
    assert "the job goes on" in outcome.errors


def test_swapped_artifacts_are_never_loaded_under_the_wrong_key(outcomes):
    outcome = outcomes[Fault.SWAP]
    assert outcome.hits == 1
    assert outcome.report["compiles"] == 1


def test_fault_is_logged_once_per_reason(outcomes):
    for fault, outcome in outcomes.items():
        for reason in outcome.stats["fallbacks"]:
            assert outcome.errors.count(f"graphstash: {reason}:") == 1, (fault, outcome.errors)
