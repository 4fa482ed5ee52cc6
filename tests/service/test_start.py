"""Starting the server: options, environment, and one clear line for each refusal."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from alembic import command

from graphstash_schema.own_files import own_socket_path
from graphstash_server import context as context_module
from graphstash_server import file_locks
from graphstash_server.__main__ import _check_reach
from graphstash_server.clock import system_clock
from graphstash_server.context import open_context, prepare_database
from graphstash_server.db import migrate as migration
from graphstash_server.db.migrate import alembic_config, migrate
from graphstash_server.errors import StartError
from graphstash_server.file_locks import ServerLock
from graphstash_server.services.accounting import Accounting
from graphstash_server.settings import load_settings
from graphstash_server.testing import LiveServer
from support.database_sessions import connected, eventually
from support.ports import reserved_port
from support.postgres import EMPTY
from support.processes import captured, python
from support.tiers import most_extended
from support.waiting import until


@pytest.fixture
def refusal(process_environment, tmp_path):
    """Run a server that does not start. Return the line with the reason."""

    def refuse(*options, status, data_dir=tmp_path / "d"):
        said = captured(
            [sys.executable, "-m", "graphstash_server", "--data-dir", data_dir, *options],
            env={**os.environ, "COLUMNS": "200", **process_environment},
            timeout=240,
        )
        assert said.returncode == status
        assert len(said.stderr.splitlines()) == 1
        return said.stderr

    return refuse


def test_started_server_prints_data_directory_and_client_settings(start, tmp_path):
    port_file = tmp_path / "port"

    server = start("--port-file", str(port_file), environment={"GRAPHSTASH_AUTO_MIGRATE": "true"})

    assert f"data directory: {server.data_dir}" in server.log
    assert f"in the shell of the jobs: export GRAPHSTASH_URL={server.url}\n" in server.log
    assert "no authentication, which is for tests: " in server.log
    assert "Ctrl-C stops the server" in server.log
    until(port_file.exists)  # the server writes it last
    assert server.url == f"http://127.0.0.1:{int(port_file.read_text())}"
    assert (server.data_dir / "graphstash.sqlite3").exists()
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_server_listens_on_loopback_by_default(tmp_path, refusal):
    said = refusal("--host", "0.0.0.0", "--auth", "none", status=2)

    assert "anyone who can reach the port can run code in every job" in said
    assert "--insecure" in said
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("host", ["::", "192.0.2.1", "a" * 64])
def test_listening_beyond_loopback_needs_tokens_or_insecure(host):
    with pytest.raises(StartError, match="run code in every job"):
        _check_reach(load_settings(host=host, auth="none"))
    _check_reach(load_settings(host=host, auth="tokens"))
    _check_reach(load_settings(host=host, auth="none", insecure=True))


def test_server_with_tokens_may_listen_beyond_loopback(start, connect):
    server = start("--host", "0.0.0.0", "--auth", "tokens")

    assert connect(server.url).get().status_code == 401
    assert connect(server.url).http.get("/readyz").status_code == 200
    port = server.url.rpartition(":")[2]
    assert f"jobs need GRAPHSTASH_URL=http://{socket.gethostname()}:{port} " in server.log
    assert status_with_printed_command(server) == 200


@pytest.mark.extended
def test_printed_command_names_the_database_without_its_password(start, postgres):
    environment = {"GRAPHSTASH_DATABASE_URL": postgres.new_database()}
    server = start("--auth", "tokens", environment=environment)
    assert ":secret@" not in server.log
    assert status_with_printed_command(server, password="secret") == 200


def status_with_printed_command(server, *, password=""):
    """Create a token with the command that the server printed, and use it."""
    command = re.search(r"GRAPHSTASH_DATA_DIR=.*graphstash token create .*", server.log)[0]
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("GRAPHSTASH_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    filled_in = command.replace("***", password)
    token = captured(["sh", "-c", filled_in], env=environment).stdout.strip()
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{server.url}/v1/default/artifacts"
    return httpx.get(url, headers=headers, trust_env=False).status_code


def test_failed_start_prints_one_line(tmp_path, refusal):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refusal("--port", port, status=1)
    assert said.startswith(f"graphstash: error: cannot listen on 127.0.0.1 port {port}: ")
    assert "; choose another --port" in said

    said = refusal("--port", "0", "--host", "192.0.2.1", "--auth", "tokens", status=1)
    assert "cannot listen on 192.0.2.1 port 0: " in said
    assert "; choose a --host of this machine" in said

    (tmp_path / "file").touch()
    said = refusal("--port", "0", status=1, data_dir=tmp_path / "file" / "d")
    assert "cannot write to the data directory" in said


def test_start_on_a_taken_port_fails_before_it_imports_the_application(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = python(
            """
            import sys
            from graphstash_server.__main__ import main
            try:
                main()
            finally:
                print("graphstash_server.app" in sys.modules)
            """,
            *("--port", port, "--data-dir", tmp_path / "data"),
        )
    assert "cannot listen" in found.stderr
    assert found.stdout.split() == ["False"]


def test_postgresql_that_fails_the_clock_query_fails_the_start(postgres, tmp_path):
    url = postgres.new_database()
    name = url.rpartition("/")[2]
    postgres.execute(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'terminating' USING ERRCODE = '57P01'; END $$",
        name,
    )
    postgres.execute(f"ALTER DATABASE {name} SET search_path = public, pg_catalog")
    settings = load_settings(data_dir=tmp_path / "d", database_url=url)

    async def start():
        async with open_context(settings, blob_store=None, clock=system_clock):
            pytest.fail("the server started")

    with pytest.raises(StartError, match="the database does not answer"):
        asyncio.run(start())


def test_start_that_fails_leaves_no_corruption_check_running(tmp_path, monkeypatch):
    async def endless(_):
        await asyncio.Event().wait()

    monkeypatch.setattr(context_module, "find_corruption", endless)
    monkeypatch.setattr(context_module, "_CHECK_SECONDS", 0)
    settings = load_settings(data_dir=tmp_path, auto_migrate=False)  # refuses an empty database

    async def start():
        with pytest.raises(StartError):
            async with open_context(settings, blob_store=None, clock=system_clock):
                pytest.fail("the server started")
        return [each for each in asyncio.all_tasks() if not each.cancelling()]

    assert len(asyncio.run(start())) == 1  # `start`


def test_background_task_that_failed_keeps_no_other_task_running(tmp_path, monkeypatch, caplog):
    async def failing(_, **__):
        raise RuntimeError("by this test")

    monkeypatch.setattr(Accounting, "run", failing)

    async def serve():
        settings = load_settings(data_dir=tmp_path)
        async with open_context(settings, blob_store=None, clock=system_clock):
            await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(serve()) == 1  # `serve`
    assert "a background task failed" in caplog.text


def test_invalid_variable_is_named_with_value_and_range(monkeypatch):
    for variable, value, named in (
        ("GRAPHSTASH_PORT", "http", "a whole number"),
        ("GRAPHSTASH_WORKERS", "65", "(1 to 64)"),
        ("GRAPHSTASH_MAX_ARTIFACT_BYTES", "0", "above 0"),
        ("GRAPHSTASH_MAX_ARTIFACT_BYTES", "much", "a size such as"),
        ("GRAPHSTASH_RETAIN_DAYS", "inf", "365,000"),
        ("GRAPHSTASH_LOG_LEVEL", "loud", "debug"),
        ("GRAPHSTASH_INSECURE", "perhaps", "true or false"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(StartError) as refusal:
                load_settings()
        assert str(refusal.value).startswith(f"{variable}={value} is not valid: ")
        assert named in str(refusal.value)


def test_options_override_the_environment_and_sizes_have_units(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHSTASH_PORT", "1234")
    monkeypatch.setenv("GRAPHSTASH_MAX_ARTIFACT_BYTES", "2GiB")
    assert [load_settings(port=port).port for port in (None, 4321)] == [1234, 4321]
    assert load_settings().max_artifact_bytes == 2 * 1024**3
    assert load_settings(max_artifact_bytes="500MB").max_artifact_bytes == 500 * 10**6

    settings = load_settings(data_dir=tmp_path)
    assert settings.database_url == f"sqlite+aiosqlite:///{tmp_path}/graphstash.sqlite3"
    elsewhere = "sqlite+aiosqlite:////srv/x.sqlite3"
    assert load_settings(database_url=elsewhere).database_url == elsewhere
    with pytest.raises(StartError, match=r"database-url=\.\.\. is not valid: .*postgresql://"):
        load_settings(database_url="mysql://x/y")
    with pytest.raises(StartError, match=r"^--workers=x is not valid: .* number \(1 to 64\)$"):
        load_settings(workers="x")


def test_server_does_not_start_with_an_empty_store(postgres, tmp_path, connect):
    """If the directory is not mounted, the server would drop every artifact as lost."""
    url = postgres.new_database()
    with LiveServer(tmp_path / "mounted", database_url=url, log_level="error") as server:
        assert connect(server.url).put(b"precious", 1).status_code == 201

    with pytest.raises(RuntimeError, match="did not start"):
        LiveServer(tmp_path / "forgotten", database_url=url, log_level="error").start()

    with LiveServer(tmp_path / "mounted", database_url=url, log_level="error") as server:
        assert connect(server.url).get(1).content == b"precious"


@pytest.fixture
def outdated(postgres):
    """A database at a revision whose successors change the table of leases."""
    url = postgres.new_database(template=EMPTY)
    command.upgrade(alembic_config(url), "0012")
    return url


@pytest.fixture
def starting(process_environment, tmp_path):
    """Start a server on a port without waiting until it serves."""

    @contextmanager
    def start(port, database, *options):
        variables = {
            "GRAPHSTASH_DATABASE_URL": database,
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "PYTHONUNBUFFERED": "1",
        }
        with (tmp_path / "log").open("wb") as log:
            server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "graphstash_server", "--port", str(port)),
                    *("--data-dir", str(tmp_path / "data"), *options),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, **process_environment, **variables},
                start_new_session=True,
            )
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    return start


def children_of(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def health(url, **options):
    with httpx.Client(timeout=60, trust_env=False, **options) as http:
        return http.get(f"{url}/healthz").status_code


@pytest.mark.anyio
@pytest.mark.parametrize("workers", most_extended([1, 2], quick=[2]))
async def test_starting_server_refuses_connections_until_it_answers(
    starting, refusal, outdated, tmp_path, workers
):
    """The server's migration waits for a transaction, and the log names the transaction."""
    port = reserved_port()
    own = own_socket_path({"XDG_STATE_HOME": str(tmp_path / "state")})
    log = tmp_path / "log"

    async def said(text):
        assert server.poll() is None, log.read_text()
        return text in log.read_text()

    async with connected(outdated) as slow:
        holder = slow.get_server_pid()
        await slow.execute("SET application_name = 'pg_dump'")
        await slow.execute("BEGIN; SELECT * FROM leases")
        with starting(port, outdated, "--workers", str(workers)) as server:
            await eventually(lambda: said("the migration waits for a transaction"))
            assert re.search(rf"ago: session {holder} of pg_dump, user \w+\n", log.read_text())
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            with socket.socket(socket.AF_UNIX) as job, pytest.raises(ConnectionRefusedError):
                job.connect(str(own))
            if workers == 1:
                error = refusal("--port", str(port), status=1, data_dir=tmp_path / "other")
                assert f"cannot listen on 127.0.0.1 port {port}: " in error
                assert not (tmp_path / "other").exists()
            else:
                (worker,) = children_of(server.pid)
                os.kill(worker, signal.SIGKILL)
                await eventually(lambda: said(f"worker {worker} was killed by SIGKILL"))
            await slow.execute("COMMIT")
            await eventually(lambda: said("Ctrl-C stops the server"))
            assert health(f"http://127.0.0.1:{port}") == 200
            assert health("http://localhost", transport=httpx.HTTPTransport(uds=str(own))) == 200


@pytest.mark.anyio
async def test_migration_behind_a_lasting_transaction_ends_with_one_line(
    outdated, tmp_path, monkeypatch
):
    monkeypatch.setattr(migration, "LOCK_SECONDS", 1)
    settings = load_settings(database_url=outdated, data_dir=tmp_path)
    async with connected(outdated) as slow:
        await slow.execute("BEGIN; SELECT * FROM leases")
        with pytest.raises(StartError) as refused:
            await prepare_database(settings, is_migrating=True)
        await slow.execute("COMMIT")
    assert "has waited too long for another transaction" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    await prepare_database(settings, is_migrating=True)


@pytest.mark.anyio
async def test_start_fails_if_the_database_does_not_return_its_revision(
    outdated, tmp_path, monkeypatch
):
    settings = load_settings(database_url=outdated, data_dir=tmp_path)
    async with connected(outdated) as slow:
        await slow.execute("BEGIN; LOCK TABLE alembic_version")
        with monkeypatch.context() as patch:
            patch.setattr(migration, "_READ_SECONDS", 1.0)
            with pytest.raises(StartError, match=r"has not answered for 1 s: .*alembic_version"):
                await prepare_database(settings, is_migrating=True)
        await slow.execute("COMMIT")
    await prepare_database(settings, is_migrating=True)


def test_server_whose_first_workers_are_killed_repeatedly_ends(start):
    killed = "import os, graphstash_server.app as app; from graphstash_server.__main__ import main;"
    killed += "app.open_context = lambda *_, **__: os.kill(os.getpid(), 9); main()"

    with pytest.raises(RuntimeError, match="the server exited with 1") as failure:
        start("--workers", "2", command=(sys.executable, "-c", killed))

    assert str(failure.value).count("was killed by SIGKILL") == 5
    assert "was killed by SIGKILL: the server cannot start" in str(failure.value)


def test_start_waits_a_limited_time_for_a_suspended_process(tmp_path, monkeypatch, caplog):
    suspended, waiting = (ServerLock(tmp_path / "server.lock") for _ in range(2))
    assert (suspended.was_alone, waiting.was_alone) == (True, False)
    monkeypatch.setattr(file_locks, "_WAIT_SECONDS", 0)
    with pytest.raises(StartError, match=r"server\.lock.*may be suspended"):
        waiting.share()
    with pytest.raises(StartError, match=r"server\.lock.*may be suspended"):
        migrate(f"sqlite+aiosqlite:///{tmp_path / 'db'}", lock_path=tmp_path / "server.lock")
    waits = f"another process starts or migrates: waiting for {tmp_path / 'server.lock'}"
    assert caplog.messages == [waits] * 2
    monkeypatch.setattr(file_locks, "_WAIT_SECONDS", 60)

    def resume():
        until(lambda: len(caplog.messages) == 3)
        suspended.share()

    threading.Thread(target=resume).start()
    waiting.share()
    assert caplog.messages == [waits] * 3
    for lock in (suspended, waiting):
        lock.close()
