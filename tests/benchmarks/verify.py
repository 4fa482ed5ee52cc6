"""What it costs to check a signature: fetching 64 MiB from loopback, with the policy on and off.

The digest is computed while the bytes come in, whatever the policy; a signature over it is left to
be checked. The fetches take turns, and so does who begins. On a busy machine they differ by chance
more than by the check, so the check is also timed by itself, within the fetch, and compared with
the download. A local hit reads the file once more, for a digest.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.verify --rounds 15
"""

import secrets
import shutil
import time

from benchmarks.figures import Figures, options, progress, workspace
from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.server import Server
from support.signing import Team

MIB = 1024**2
SIZES = {"1 MiB": MIB, "64 MiB": 64 * MIB}
POLICIES = ("off", "require")
SECONDS, CPU, CHECK = "seconds to a payload", "client's CPU seconds", "the check within a fetch"


def main():
    settings = options("verify", __doc__.splitlines()[0], rounds=15)
    figures = Figures("verify", {"rounds": settings.rounds})
    figures.note("`download` is without unpacking and with the policy off: bytes and their digest.")
    figures.note("The payload is random: it does not shrink, so that 64 MiB travel.")
    with workspace() as directory:
        team = Team(directory)
        team.trust("ci")
        with Server(directory / "server") as server, progress() as bar:
            keys = publish(server, directory, team)
            task = bar.add_task("verify", total=settings.rounds * len(keys))
            for number in range(settings.rounds + 1):
                for label, key in keys.items():
                    took = measure(server, directory, team, key, first=number % 2)
                    if number:  # the first round warms up
                        report(figures, label, took)
                        bar.update(task, advance=1)
    figures.write(settings.output)


def publish(server, directory, team):
    keys = {}
    config = ClientConfig.load(
        {}, url=server.url, cache_dir=directory / "ci", signing_key=team.key("ci")
    )
    with Stash(config) as stash:
        for number, (label, size) in enumerate(SIZES.items()):
            keys[label] = ArtifactKey.parse("jax", "cpu-x86_64", f"{number:064x}")
            metadata = ArtifactMetadata(compile_seconds=60.0, raw_size_bytes=size)
            stash.put(keys[label], secrets.token_bytes(size), metadata)
    return keys


def measure(server, directory, team, key, *, first):
    """Seconds and CPU seconds of every kind of fetch; each begins with an empty disk."""
    took = {}
    order = POLICIES if first else POLICIES[::-1]
    for policy in order:
        place = directory / "reader"
        config = ClientConfig.load(
            {}, url=server.url, cache_dir=place, trusted_keys=team.file, signatures=policy
        )
        with Stash(config) as stash:
            stash.server.lookup([key])  # the connection is there, and cryptography is loaded
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


class Watch:
    """Times a block."""

    def __enter__(self):
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self._began[0]
        self.cpu_seconds = time.process_time() - self._began[1]


def timed(stash):
    """A list that gets the seconds of every check that the stash makes."""
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
