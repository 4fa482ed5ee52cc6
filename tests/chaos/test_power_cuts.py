"""Power cuts at random moments: what was acknowledged is there, and nothing else is served.

CHAOS_CUTS=<number>  more cuts than the default, such as 500
CHAOS_SEED=<text>    chooses the same places of a recording again; the load is chance
"""

import os
import random
import re
import secrets
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from chaos.power_cuts import Call, Disk, read_calls, recording_command
from graphstash_server.testing import LiveServer, ServerProcess
from support.api import Api
from support.postgres import Postgres
from support.waiting import until

pytestmark = [pytest.mark.extended, pytest.mark.timeout(3600)]

_CUTS = 5
_WRITERS = 4
_OPERATIONS = 50
"""Of one writer. Their commits fill the write-ahead log more than once."""

_KEYS = 12
_FRESH = 10_000
_SEEN = "seen after the cut before"
_SHARED_BLOBS = [random.Random(number).randbytes(100 + 9000 * number) for number in range(8)]
_ACKNOWLEDGED = re.compile(rb"HTTP/1\.1 2\d\d .*\r\nx-request-id: (op-[-\w]+)\r\n", re.DOTALL)


class Writer:
    """Stores and removes artifacts under its own keys, one after the other.

    `history` has, for every key, the request of each operation and what the key holds after it.
    """

    def __init__(self, number: int, seed: str) -> None:
        self._number = number
        self._pick = random.Random(f"{seed} {number}")
        self.operations = 0
        self.history: dict[int, list[tuple[str, bytes | None]]] = {}

    def run(self, url: str) -> None:
        """Carry out all operations, or fewer if the server ends."""
        with closing(Api(url)) as api, suppress(httpx.TransportError):
            for _ in range(_OPERATIONS):
                self._act(api)

    def _act(self, api: Api) -> None:
        key = self._number * _KEYS + self._pick.randrange(_KEYS)
        past = self.history.setdefault(key, [])
        is_held = past and past[-1][1] is not None
        held = None if is_held else self._pick.choice(_SHARED_BLOBS)
        request = f"op-{self._number}-{self.operations}"
        self.operations += 1
        past.append((request, held))
        if held is not None:
            answer = api.put(held, key, x_request_id=request)
        else:
            answer = api.http.delete(api.path(key), headers={"X-Request-Id": request})
        if answer.status_code == 503 and held is not None:
            past.pop()  # the server that was killed had claimed the blob to delete it
            return
        assert answer.status_code in {201, 204}, answer.text


def wait_for_end(log: Path, said: bytes = b"exited with 0") -> None:
    """Wait until strace has written everything."""
    until(lambda: log.read_bytes().endswith(b"+++ %b +++\n" % said))


def acknowledged_by(call: Call) -> set[str]:
    """The request that a call acknowledges, if any."""
    found = None if call.is_end else _ACKNOWLEDGED.match(b"".join(call.strings))
    return {found[1].decode()} if found else set()


def allowed(past: list[tuple[str, bytes | None]], acknowledged: set[str]) -> set[bytes | None]:
    """What a key may hold: the result of the last acknowledged operation, or of the next one."""
    states = [None, *(held for _, held in past)]
    done = max((n for n, (request, _) in enumerate(past, 1) if request in acknowledged), default=0)
    return set(states[done : done + 2])


def find_losses(
    data_dir: Path, expected: dict[int, set[bytes | None]], **settings: str
) -> tuple[list[str], dict[int, bytes | None]]:
    """Start a server on what a power cut has left. Return what is wrong, and what each key has."""
    wrong, held = [], {}
    with LiveServer(data_dir, log_level="error", **settings) as server:
        api = Api(server.url)
        for key, states in expected.items():
            answer = api.get(key)
            held[key] = answer.content if answer.status_code == 200 else None
            if answer.status_code not in {200, 404} or held[key] not in states:
                wrong.append(f"key {key}: {answer.status_code}, {len(answer.content)} bytes")
        fresh = b"stored after the cut"
        if api.put(fresh, _FRESH).status_code != 201 or api.get(_FRESH).content != fresh:
            wrong.append("a new artifact cannot be stored")
        api.delete(_FRESH)
        api.close()
    return wrong, held


def find_damage(data_dir: Path) -> list[str]:
    """Say what is wrong with a database of SQLite that a power cut has left."""
    with closing(sqlite3.connect(data_dir / "graphstash.sqlite3")) as database:
        found = [row[0] for row in database.execute("PRAGMA integrity_check")]
    return [] if found == ["ok"] else found


def chosen_run() -> tuple[str, int]:
    """The seed and the number of cuts, which the environment may name."""
    seed = os.environ.get("CHAOS_SEED") or secrets.token_hex(4)
    cuts = int(os.environ.get("CHAOS_CUTS") or _CUTS)
    print(f"CHAOS_SEED={seed} CHAOS_CUTS={cuts}")
    return seed, cuts


def test_power_cut_at_any_moment_keeps_what_was_acknowledged(tmp_path):
    seed, cuts = chosen_run()
    log, data_dir = tmp_path / "calls", tmp_path / "data"
    data_dir.mkdir()
    disk, other = Disk(data_dir), Disk(data_dir)
    command = recording_command(log, sys.executable, "-m", "graphstash_server")
    server = ServerProcess(data_dir, command=command)
    writers = [Writer(number, seed) for number in range(_WRITERS)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda writer: writer.run(server.url), writers))
    server.stop()
    wait_for_end(log)

    history = {key: past for writer in writers for key, past in writer.history.items()}
    calls = list(read_calls(log))
    pick = random.Random(seed)
    changes = [place for place, call in enumerate(calls) if other.apply(call)]
    chosen = set(pick.sample(changes, cuts))
    acknowledged: set[str] = set()
    counts: Counter[str] = Counter()
    losses = []
    for place, call in enumerate(calls):
        if place in chosen:
            keeps = pick if pick.random() < 0.5 else None
            left = tmp_path / "left"
            disk.save(left, keeps=keeps)
            expected = {key: allowed(past, acknowledged) for key, past in history.items()}
            counts["partly written" if keeps else "only what was synced"] += 1
            counts["acknowledged"] += len(acknowledged)
            wrong = find_losses(left, expected)[0] + find_damage(left)
            losses += [f"cut {place}: {each}" for each in wrong]
            shutil.rmtree(left)
        counts[call.name] += disk.apply(call)
        acknowledged |= acknowledged_by(call)

    print(
        f"{len(calls)} calls", *(f"{count:8d} {what}" for what, count in counts.items()), sep="\n"
    )
    assert not losses
    assert len(acknowledged) == _WRITERS * _OPERATIONS


def test_power_cut_of_a_server_on_postgresql_keeps_what_was_acknowledged(tmp_path):
    """The server's host loses power. PostgreSQL itself keeps running with all that it committed."""
    seed, cuts = chosen_run()
    pick = random.Random(seed)
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    writers = [Writer(number, seed) for number in range(_WRITERS)]
    counts: Counter[str] = Counter()
    with Postgres(fsync="on") as postgres:
        url = postgres.new_database()
        for cut in range(cuts):
            log, disk = tmp_path / "calls", Disk(data_dir)
            command = recording_command(log, sys.executable, "-m", "graphstash_server")
            server = ServerProcess(
                data_dir, command=command, environment={"GRAPHSTASH_DATABASE_URL": url}
            )
            goal = sum(writer.operations for writer in writers) + pick.randrange(8, 60)
            with ThreadPoolExecutor(_WRITERS) as pool:
                running = [pool.submit(writer.run, server.url) for writer in writers]
                until(lambda: sum(writer.operations for writer in writers) >= goal)  # noqa: B023 - is called here
                server.kill(tree=True)
                for each in running:
                    each.result()
            wait_for_end(log, b"killed by SIGKILL")
            acknowledged = {_SEEN}
            for call in read_calls(log):
                disk.apply(call)
                acknowledged |= acknowledged_by(call)
            shutil.rmtree(data_dir)
            disk.save(data_dir, keeps=pick if pick.random() < 0.5 else None)
            history = {key: past for writer in writers for key, past in writer.history.items()}
            expected = {key: allowed(past, acknowledged) for key, past in history.items()}
            wrong, held = find_losses(data_dir, expected, database_url=url)
            assert not wrong, f"cut {cut}: {wrong}"
            for key, past in history.items():
                past[:] = [(_SEEN, held[key])]
            counts["acknowledged"] += len(acknowledged) - 1
            counts["read back"] += sum(each is not None for each in held.values())
    print(f"{cuts} cuts", *(f"{count:8d} {what}" for what, count in counts.items()), sep="\n")


def test_model_loses_what_a_program_did_not_sync(tmp_path):
    program = """if True:
        import os, sys
        os.chdir(sys.argv[1])
        whole = os.open("whole", os.O_CREAT | os.O_WRONLY)
        os.write(whole, b"synced")
        os.fsync(whole)
        os.write(whole, b" and lost")
        os.rename("before", "after")
        here = os.open(".", os.O_RDONLY)
        os.fsync(here)
        os.unlink("after")
        os.rename("whole", "renamed")
        os.close(os.open("new", os.O_CREAT))
    """
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "before").write_bytes(b"old")
    disk = Disk(directory)
    log = tmp_path / "calls"
    subprocess.run(
        recording_command(log, sys.executable, "-c", program, str(directory)), check=True
    )
    wait_for_end(log)
    for call in read_calls(log):
        disk.apply(call)
    disk.save(tmp_path / "left")
    left = {path.name: path.read_bytes() for path in (tmp_path / "left").iterdir()}
    assert left == {"whole": b"synced", "after": b"old"}
    disk.save(tmp_path / "whole", keeps=Everything())
    left = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert left == {"renamed": b"synced and lost", "new": b""}


class Everything(random.Random):
    """Keeps all that was not synced."""

    def random(self) -> float:
        return 0.0
