"""Whatever the cache does, JAX computes the same numbers, and the reason is counted."""

import shutil

import numpy as np
import pytest

from graphstash._artifacts.stash import Stash
from graphstash.config import ClientConfig
from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.compiler_jobs import JaxJobs
from support.fault_proxy import Fault, FaultProxy

OTHER = {"scale": 2}  # another program of equal shapes


@pytest.fixture(scope="module")
def jobs(jobs, server, tmp_path_factory):
    directory = tmp_path_factory.mktemp("jax-faults")
    with JaxJobs(directory, jobs=jobs, url=server.url, namespace="jax-faults") as made:
        yield made


@pytest.fixture(scope="module")
def sound(jobs):
    """A cold run; the keys that it published, as device type and fingerprint: of the step and of
    the pack with the two norms."""
    running = jobs.start("sound", "training")
    outcome = running.finish()
    tier = running.report.parent / "tier" / "v2"
    keys = [(path.parts[-3], path.name) for path in sorted(tier.glob("*/jax-faults/jax/*/??/*"))]
    assert len(keys) == 2
    assert outcome.stats["published"] == 3
    return outcome, keys


@pytest.mark.extended
def test_entry_of_another_program_is_loaded_by_bare_jax_and_refused_by_hook(server, jobs, tmp_path):
    bare = {
        "under": "python",
        "variables": {
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
    }
    jobs.run("bare", "training", **bare)
    (one,) = tmp_path.glob("jit_step-*-cache")
    right = jobs.run("bare", "training", OTHER, **bare).report["losses"]
    (two,) = set(tmp_path.glob("jit_step-*-cache")) - {one}
    shutil.copy(one, two)
    assert jobs.run("bare", "training", OTHER, **bare).report["losses"] != right  # without a word

    running = jobs.start("one", "training", namespace="jax-foreign")
    running.finish()
    tier = running.report.parent / "tier"
    found = (tier / "v2").glob("*/jax-foreign/jax/*/??/*")
    config = ClientConfig(url=server.url, namespace="jax-foreign", cache_dir=tier)
    with Stash(config) as stash:
        keys = [ArtifactKey.parse("jax", path.parts[-3], path.name) for path in found]
        (step,) = (key for key in keys if b"jit_norm" not in stash.get(key))  # and not the pack
    with FaultProxy(server.port) as proxy:
        proxy.fault = Fault.SWAP
        proxy.swap_to = str(step)
        two = jobs.run("two", "training", OTHER, namespace="jax-foreign", url=proxy.url)
    assert two.report["losses"] == right
    assert two.stats["fallbacks"]["wrong_key"] >= 3


@pytest.mark.extended
def test_noise_in_valid_envelope_is_detected_by_jax_and_counted(server, jobs, sound, tmp_path):
    outcome, keys = sound
    noise = b"\0\0\0\1" + np.random.default_rng(0).bytes(5000)
    config = ClientConfig(url=server.url, namespace="jax-noise", cache_dir=tmp_path)
    with Stash(config) as stash:
        for key in keys:
            metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=len(noise))
            stash.put(ArtifactKey.parse("jax", *key), noise, metadata)
    noisy = jobs.run("noisy", "training", namespace="jax-noise")
    assert noisy.report["losses"] == outcome.report["losses"]
    assert len(noisy.report["compiled"]) == 3
    told = "Error reading persistent compilation cache entry for 'jit_step'"
    assert noisy.errors.count(told) == 1
    assert noisy.stats["fallbacks"] == {"corrupt": 1, "rejected": 1}
    assert noisy.stats["conflicts"] == 1  # what was published first stays


@pytest.mark.extended
def test_a_fault_of_the_hook_itself_is_counted_and_jax_compiles(jobs, sound):
    outcome, _ = sound
    sabotaged = jobs.run("sabotaged", "training", {"sabotage": True})
    assert sabotaged.report["losses"] == outcome.report["losses"]
    assert len(sabotaged.report["compiled"]) == 3
    assert sabotaged.stats["fallbacks"] == {"internal": 6}
    assert "persistent compilation cache" not in sabotaged.errors
