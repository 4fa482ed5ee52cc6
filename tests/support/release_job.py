"""Clients and commands of either release, each in a fork of this process.

The previous release also runs this script. It may therefore use only public names of that
release, except for modules that take long to import. Each input line is a request as JSON: the
`environment`, and either the `arguments` of `graphstash` or the `steps` of a client. A step is a
list of a method below and its arguments. The answer is a JSON line with the exit status and the
output of the fork.
"""

import importlib
import json
import os
import sys
import tempfile
import traceback

from graphstash import CacheError, ClientConfig, LeaseLostError, Stash
from graphstash_schema import (
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    LeaseOutcome,
    ManifestName,
    ReportReason,
)


def key_of(number):
    return ArtifactKey.parse("jax", "cpu-x86_64-0123456789abcdef", f"{number:064x}")


class Client:
    """One stash, with the settings of the environment."""

    def __init__(self):
        self.stash = Stash(ClientConfig.load())
        # The previous release has these calls on the stash itself.
        self.server = getattr(self.stash, "server", self.stash)
        self.tokens = {}

    def put(self, number, payload):
        metadata = ArtifactMetadata(
            compile_seconds=30.0,
            raw_size_bytes=len(payload),
            toolchain="jax 0.6",
            parts={"number": str(number)},
        )
        return self.stash.put(key_of(number), payload.encode(), metadata) > 0

    def get(self, number):
        payload = self.stash.get(key_of(number))
        return None if payload is None else payload.decode()

    def source(self, number):
        fetched = self.stash.ensure_local(key_of(number))
        return None if fetched is None else fetched.source

    def lookup(self, *numbers):
        reply = self.server.lookup(map(key_of, numbers))
        return [[int(info.key.fingerprint, 16), info.digest] for info in reply.found]

    def verify(self, number):
        reply = self.server.verify(key_of(number))
        return [reply.found, reply.healed]

    def report(self, number, digest):
        reply = self.server.report(
            key_of(number), digest=Digest.parse(digest, size_bytes=0), reason=ReportReason.CORRUPT
        )
        return [reply.found, reply.withheld]

    def acquire(self, number):
        reply = self.server.acquire(key_of(number))
        self.tokens[number] = reply.token
        return [reply.state, reply.token]

    def renew(self, number, token=None):
        try:
            self.server.renew(key_of(number), token or self.tokens[number])
        except LeaseLostError:
            return "lost"
        return "renewed"

    def release(self, number, token=None):
        self.server.release(key_of(number), token or self.tokens[number], LeaseOutcome.FAILED)

    def remember(self, name, *numbers):
        self.server.update_manifest(ManifestName(name), map(key_of, numbers))

    def manifest(self, name):
        manifest = self.server.manifest(ManifestName(name))
        return manifest and {
            int(entry.key.fingerprint, 16): [entry.runs, entry.used_at.isoformat()]
            for entry in manifest.entries
        }

    def report_run(self, name):
        """Report a run; return its number of processes and its time to the first step."""
        run = importlib.import_module("graphstash_schema.run")
        report = run.RunReport(started_at="2026-01-01T00:00:00Z", seconds=60.0)
        # Younger than the release before.
        times = [run.RunTimes(first_step_seconds=9.0)] if hasattr(run, "RunTimes") else []
        self.server.report_run(run.RunName(name), run.RunName("0"), report, *times)
        stored = self.server.run(run.RunName(name))
        return [stored.processes, getattr(stored, "first_step_seconds", None)]

    def stats(self):
        (usage,) = (
            each
            for each in self.server.server_stats().namespaces
            if each.namespace == self.stash.config.namespace
        )
        return [usage.artifacts, usage.withheld]


def run(steps):
    """Print the results of a client as JSON."""
    client = Client()
    answers = []
    for method, *arguments in steps:
        try:
            answers.append(getattr(client, method)(*arguments))
        except CacheError as error:
            status = getattr(error, "status", None)
            answers.append(f"error: {error.reason}{f' {status}' if status else ''}")
    client.stash.close()
    print(json.dumps(answers))


def end(request):
    """Execute a request in this process, which is a fork, and exit."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        if "steps" in request:
            run(request["steps"])
        else:
            sys.argv = ["graphstash", *request["arguments"]]
            importlib.import_module("graphstash.__main__").main()
        status = 0
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def answer(request):
    """Return the exit status and the output of a fork."""
    with tempfile.TemporaryFile("w+") as output:
        if not (child := os.fork()):
            os.dup2(output.fileno(), sys.stdout.fileno())
            end(request)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return [status, output.read()]


def main():
    for slow in ("graphstash._cli.main", "graphstash_server.context", "aiosqlite", "asyncpg"):
        importlib.import_module(slow)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
