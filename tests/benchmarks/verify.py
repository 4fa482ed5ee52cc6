"""Measure the cost of a signature check: fetch 64 MiB from loopback, with the policy on and off.

Both policies compute the digest while the bytes arrive, so only the signature over it is left to
check. The fetches take turns, and the first of each round alternates. On a busy machine, chance
differences exceed the check, so the check is also timed inside the fetch and compared with the
download. A local hit reads the file once more, for a digest.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.verify --rounds 15
"""

import secrets
import shutil

from benchmarks.costs import Watch
from benchmarks.figures import part
from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.signing import Team

MIB = 1024**2
SIZES = {"1 MiB": MIB, "64 MiB": 64 * MIB}
POLICIES = ("off", "require")
SECONDS, CPU, CHECK = "seconds to a payload", "client's CPU seconds", "the check within a fetch"


def main():
    with part("verify", __doc__, rounds=15) as bench:
        note = bench.figures.note
        note("`download` is without unpacking and with the policy off: bytes and their digest.")
        note("The payload is random: it does not shrink, so that 64 MiB travel.")
        team = Team(bench.directory)
        team.trust("ci")
        keys = {
            label: ArtifactKey.parse("jax", "cpu-x86_64", f"{size:064x}")
            for label, size in SIZES.items()
        }
        payloads = {key: secrets.token_bytes(SIZES[label]) for label, key in keys.items()}
        publish(bench.server, bench.directory, payloads, signing_key=team.key("ci"))
        for number in bench.rounds(first=-1):  # the first round warms up
            for label, key in keys.items():
                took = measure(bench.server, bench.directory, team, key, first=number % 2)
                if number >= 0:
                    report(bench.figures, label, took)


def publish(server, directory, payloads, **settings):
    """Store payloads, by key, as a job does."""
    config = ClientConfig.load({}, url=server.url, cache_dir=directory / "publisher", **settings)
    with Stash(config) as stash:
        for key, payload in payloads.items():
            metadata = ArtifactMetadata(compile_seconds=60.0, raw_size_bytes=len(payload))
            stash.put(key, payload, metadata)


def measure(server, directory, team, key, *, first):
    """Return seconds and CPU seconds of every kind of fetch. Each begins with an empty disk."""
    took = {}
    order = POLICIES if first else POLICIES[::-1]
    for policy in order:
        place = directory / "reader"
        config = ClientConfig.load(
            {}, url=server.url, cache_dir=place, trusted_keys=team.file, signatures=policy
        )
        with Stash(config) as stash:
            stash.server.lookup([key])  # connects, and loads cryptography
            checks = timed(stash)
            for source in ("remote", "local"):
                with Watch() as watch:
                    fetched = stash.fetch(key, directory / "payload")
                took[source, policy] = watch
                assert fetched.source == source
                assert not fetched.is_unsigned
            if policy == "off":
                with Watch() as watch, (directory / "blob").open("w+b") as file:
                    stash.server.download(key, file)
                took["download"] = watch
            else:
                took["check"] = checks[0]
        shutil.rmtree(place)
    return took


def timed(stash):
    """Return a list that gets the seconds of every check of the stash."""
    seconds = []
    real = stash.signatures.check

    def check(subject, proof):
        with Watch() as watch:
            allowed = real(subject, proof)
        seconds.append(watch.seconds)
        return allowed

    stash.signatures.check = check
    return seconds


def report(figures, label, took):
    for source in ("remote", "local"):
        for policy in POLICIES:
            figures.add(SECONDS, f"{label}, {source}", policy, took[source, policy].seconds)
            figures.add(CPU, f"{label}, {source}", policy, took[source, policy].cpu_seconds)
    figures.add(SECONDS, f"{label}, download alone", "off", took["download"].seconds)
    figures.add(CHECK, label, "ms", 1e3 * took["check"])
    share = 100 * took["check"] / took["download"].seconds
    figures.add(CHECK, label, "% of the download", share)


if __name__ == "__main__":
    main()
