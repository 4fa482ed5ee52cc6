"""Whatever the cache does, Triton's kernels come out the same, and the reason is counted."""

import dataclasses
import functools
import itertools
import json
import struct
from contextlib import ExitStack

import pytest

from graphstash import ClientConfig, Stash
from graphstash.hooks.triton.kernel import pack, unpack
from graphstash_schema import ArtifactKey, ArtifactKind, ArtifactMetadata, DeviceType, Fingerprint
from support.compiler_jobs import TRITON_VERSIONS, TritonJobs
from support.tiers import each_of

_numbers = itertools.count()


def with_path(files):
    """An archive with a file that is outside of the kernel's folder."""
    name = b"../scaled_add.ptx"  # the first in the order of names
    head = MAGIC + struct.pack(">I", len(files) + 1) + struct.pack(">HQ", len(name), 0) + name
    return head + pack(files)[len(MAGIC) + 4 :]


def cut(files):
    return pack(files)[:-1]


def of_another_kernel(files):
    description = json.loads(files["scaled_add.json"]) | {"hash": "0" * 64}
    return pack({**files, "scaled_add.json": json.dumps(description).encode()})


MAGIC = b"graphstash-triton\1"
DAMAGES = (with_path, cut, of_another_kernel)
"""Of many in `test_triton_archive`."""


@pytest.fixture(scope="module")
def start(jobs, server, tmp_path_factory):
    """Starts jobs of a version, by default in a namespace that all of its jobs share."""
    directory = tmp_path_factory.mktemp("triton-faults")
    with ExitStack() as stack:

        @functools.cache
        def start(version):
            namespace = f"triton-faults-{version}"
            settings = {"url": server.url, "namespace": namespace, "jobs": jobs}
            return stack.enter_context(TritonJobs(directory / version, version, **settings))

        yield start


@pytest.fixture(scope="module")
def cold(start):
    """By version: a job that has compiled a kernel for every damage."""
    kernels = {"count": len(DAMAGES)}
    return functools.cache(lambda version: start(version).run("cold", "kernels", kernels))


def stored_by(jobs, host):
    """The keys of all artifacts on a host's disk."""
    for path in sorted((jobs.directory / host / "tier").glob("v2/*/*/triton/*/??/*")):
        yield ArtifactKey(
            kind=ArtifactKind.TRITON,
            device_type=DeviceType(path.parts[-3]),
            fingerprint=Fingerprint(path.name),
        )


@pytest.mark.extended
@pytest.mark.parametrize("version", each_of(TRITON_VERSIONS))
def test_a_damaged_kernel_in_a_sound_envelope_is_compiled_instead(
    start, cold, server, tmp_path, version
):
    jobs, sound_job = start(version), cold(version)
    namespace = f"triton-damaged-{version}"
    source = ClientConfig(
        url=server.url, namespace=f"triton-faults-{version}", cache_dir=tmp_path / "source"
    )
    target = dataclasses.replace(source, namespace=namespace, cache_dir=tmp_path / "target")
    keys = list(stored_by(jobs, "cold"))
    assert len(keys) == len(DAMAGES)
    with Stash(source) as sound, Stash(target) as damaged:
        for key, damage in zip(keys, DAMAGES, strict=True):
            payload = sound.get(key)
            metadata = ArtifactMetadata(
                compile_seconds=1, raw_size_bytes=1, toolchain="", producer="", parts={}
            )
            assert damaged.put(key, damage(unpack(payload)), metadata)
    outcome = jobs.run("damaged", "kernels", {"count": len(DAMAGES)}, namespace=namespace)
    assert outcome.report["ptxas"] == len(DAMAGES)
    assert outcome.report["kernels"] == sound_job.report["kernels"]
    assert outcome.stats["fallbacks"] == {"rejected": len(DAMAGES)}
    assert outcome.stats["published"] == outcome.stats["conflicts"] == 0
    assert "holds no kernel for this host" in outcome.errors
    assert list(stored_by(jobs, "damaged")) == []
    strays = {path.name for path in (jobs.directory / "damaged").glob("**/*scaled_add.so")}
    assert strays == set()


@pytest.fixture
def triton(start):
    """Jobs of one version, for what does not depend on it."""
    return start("3.3.0")


@pytest.fixture
def fresh():
    """A namespace in which nothing is."""
    return f"triton-faults-fresh-{next(_numbers)}"


@pytest.mark.extended
def test_binary_only_kernels_and_complete_kernels_are_different_artifacts(triton, cold):
    alone = [
        triton.run(host, "kernels", variables={"TRITON_STORE_BINARY_ONLY": "1"})
        for host in ("binary-a", "binary-b")
    ]
    assert [outcome.report["ptxas"] for outcome in alone] == [1, 0]
    for outcome in alone:
        assert set(outcome.report["kernels"][0]["stages"]) <= {"cubin", "source"}
        assert outcome.report["kernels"][0]["cubin"] == cold("3.3.0").report["kernels"][0]["cubin"]
    assert alone[0].stats["published_bytes"] < cold("3.3.0").stats["published_bytes"] / len(DAMAGES)


@pytest.mark.extended
def test_nothing_is_shared_with_user_supplied_kernels(triton, server, fresh):
    own = {"TRITON_KERNEL_OVERRIDE": "1"}
    outcome = triton.run("override", "kernels", namespace=fresh, variables=own)
    assert outcome.report["ptxas"] == 1
    assert outcome.stats["fallbacks"] == {"unshareable": 1}
    assert outcome.errors.count("TRITON_KERNEL_OVERRIDE is set") == 1
    counted = server.stats(fresh)
    assert counted["misses"] == counted["puts"] == 0


def test_cache_faults_do_not_reach_triton(triton, cold):
    outcome = triton.run("raising", "with_a_fault_of_the_cache", {"count": len(DAMAGES)})
    assert outcome.report["ptxas"] == len(DAMAGES)
    assert outcome.report["kernels"] == cold("3.3.0").report["kernels"]
    assert outcome.stats["fallbacks"] == {"internal": len(DAMAGES)}
    assert outcome.errors.count("a fault of the cache") == 1
