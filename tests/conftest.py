"""Select and order the tests, and provide the servers that all folders share.

`make test` excludes tests marked `extended`; `make test-all` passes `--extended` and runs every
test. If a test runs on two databases, its PostgreSQL variant is extended unless the test is marked
`sql`.

Each xdist worker runs whole files, so the tests of a file share its servers and jobs. Only the
pages of the documentation are spread over the workers. The files that took longest in the last run
start first; pytest's cache stores these times. On a new machine, files whose tests set a timeout
start first.
"""

import functools
import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import hypothesis
import pytest

from support import shared_zygotes, starts
from support.emulators import Azurite, FakeGcs
from support.jobs import Jobs
from support.moto import CREDENTIALS, Moto
from support.postgres import Postgres
from support.server import Server
from support.swift import Swift

_numbers = itertools.count()

_UMASK = os.umask(0o022)
os.umask(_UMASK)

_ZYGOTES = pytest.StashKey[dict[str, object]]()
_IMPORTED_BY_WORKERS = ("torch", "torch._dynamo", "torch._inductor.compile_fx")
"""Modules that every worker of a whole run imports. No plugin of pytest imports them."""

_PAGES = "tests/docs/test_pages.py"
"""Its tests share nothing and take longest. In one worker, they would determine a run's end."""

_SECONDS = "graphstash/seconds_of_groups"
_seconds_of_groups: Counter[str] = Counter()

# Jobs import torch and JAX hundreds of times. Without bytecode files, each import takes 20 s more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A user's output is buffered. CI's is not, and a test once passed only there.
os.environ.pop("PYTHONUNBUFFERED", None)

# Otherwise torch starts one compile process per core, even if the test compiles nothing.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# OpenMP's threads spin between two small operations, and two workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A fixture below moves XDG_CACHE_HOME. uv keeps its usual cache; otherwise it would download all
# packages again.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("UV_CACHE_DIR", str(_CACHE / "uv"))

# Otherwise Hugging Face's Trainer and Accelerate choose the XLA device of .venv. Both read the
# variable once, at import, and pytorch_optimizer imports them.
os.environ["USE_TORCH_XLA"] = "0"

# httpx loads all certificate authorities for each client: 20 ms of CPU, thousands of times. The
# product creates contexts of its own.
_new_context = httpx._transports.default.create_ssl_context
_shared_context = functools.cache(_new_context)


def _context(verify=True, cert=None, trust_env=True):  # noqa: FBT002 - as httpx declares it
    is_usual = (
        verify is True and cert is None and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & set(os.environ)
    )
    return _shared_context() if is_usual else _new_context(verify, cert, trust_env)


httpx._transports.default.create_ssl_context = _context

# On a busy machine, a server may exceed httpx's default timeout of 5 seconds.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(httpx.Timeout(60).as_dict())


def pytest_addoption(parser):
    parser.addoption("--extended", action="store_true", help="also run tests marked `extended`")
    parser.addoption("--pairs", type=int, help="generated pairs of programs for each compiler")
    parser.addoption("--seed-of-pairs", type=int, default=1, help="chooses the generated pairs")
    parser.addoption("--images", action="store_true", help="also run tests marked `images`")
    parser.addoption("--gpu", action="store_true", help="also run tests marked `gpu`")
    parser.addoption("--tpu", action="store_true", help="also run tests marked `tpu`")
    parser.addoption("--npm", action="store_true", help="also run tests marked `npm`")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # workers inherit the directory
        _make_temporary_directory(config)
    starts.install()
    if zygotes := getattr(config, "workerinput", {}).get("zygotes"):
        shared_zygotes.use(zygotes)
    # A shell starts background commands with SIGINT ignored. Every process that a test starts would
    # inherit this, and no test could interrupt a job.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Timing never decides: neither the time of an example nor the time to generate it.
    untimed = hypothesis.settings(
        deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    is_repeatable = not config.option.random_order_enabled
    hypothesis.settings.register_profile(
        "test", untimed, max_examples=50, derandomize=is_repeatable
    )
    hypothesis.settings.register_profile("test-all", untimed, max_examples=100)
    hypothesis.settings.load_profile("test-all" if config.option.extended else "test")


def _make_temporary_directory(config):
    """Make a temporary directory for this run, and remove it at the end.

    Compilers and killed jobs leave files behind. `tmp_path` stays in its usual place, so the files
    of the last runs remain readable. If the tests run as root, PostgreSQL runs as another user and
    stores its files here.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix="graphstash-tests-"))
    directory.chmod(0o755)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import the test files without garbage collection.

    The collector then never scans the imported objects, because they live as long as the process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item):
    if _is_on(item, "postgresql") and not item.get_closest_marker("sql"):
        item.add_marker("extended")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    for mark in ("extended", "images", "gpu", "tpu", "npm"):
        if not config.getoption(mark):
            left_out = [item for item in items if item.get_closest_marker(mark)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    yield
    if not config.option.random_order_enabled:
        seconds, timeouts = _known_seconds(config), _timeouts_of_groups(items)

        def length(item):
            group = _group_of(item.nodeid)
            return seconds.get(group, 0), timeouts[group]

        items.sort(key=length, reverse=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture, reset the directories, flags and umask that libraries have set.

    torch and torch_xla set them when the tests' own process imports or first uses these libraries.
    Every process that a later test starts would inherit them, and two hosts would share a cache.
    """
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XLA_FLAGS"):
        os.environ.pop(name, None)
    os.umask(_UMASK)  # a server makes its files private


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Restore the environment that a test, or a library that it imports, has changed."""
    before = dict(os.environ)
    try:
        return (yield)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After the fixtures of a file, restore the variables that libraries have set."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            starts.restore_environment()


def _is_on(item, database):
    return hasattr(item, "callspec") and database in item.callspec.params.values()


def _group_of(nodeid):
    """Return the file of a test, or `xla` for tests that share a process that imports torch_xla.

    These tests have torch_xla in their names or are in a file named `*_xla.py`. Each test of
    `_PAGES` is a group.
    """
    file, _, test = nodeid.partition("::")
    is_on_xla = file.endswith("_xla.py") or "torch_xla" in test.partition("[")[0]
    return "xla" if is_on_xla else nodeid if file == _PAGES else file


def _timeouts_of_groups(items):
    """Sum the timeouts that tests set for themselves. A test that may take long sets one."""
    timeouts = Counter()
    for item in items:
        for mark in item.iter_markers("timeout"):
            timeouts[_group_of(item.nodeid)] += mark.args[0]
    return timeouts


def pytest_xdist_setupnodes(config):
    """Let the workers share what takes long to import, unless coverage measures each import."""
    if not config.getoption("cov_source", None):
        is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
        zygotes = shared_zygotes.SharedZygotes(*(_IMPORTED_BY_WORKERS if is_whole else ()))
        config.add_cleanup(zygotes.close)
        config.stash[_ZYGOTES] = zygotes.shown


def pytest_configure_node(node):
    node.workerinput["zygotes"] = node.config.stash.get(_ZYGOTES, {})


def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return _group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    _seconds_of_groups[_group_of(report.nodeid)] += report.duration


def pytest_unconfigure():
    starts.close()
    shared_zygotes.leave()


def pytest_sessionfinish(session):
    config = session.config
    # Workers report to this process.
    if hasattr(config, "cache") and not hasattr(config, "workerinput"):
        config.cache.set(_SECONDS, _known_seconds(config) | _seconds_of_groups)


def _known_seconds(config):
    return config.cache.get(_SECONDS, {}) if hasattr(config, "cache") else {}


@pytest.fixture(scope="session")
def is_extended(pytestconfig):
    """Whether `make test-all` runs: budgets are larger and seeds are random."""
    return pytestconfig.option.extended


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch, tmp_path_factory):
    for name in tuple(os.environ):
        if name.startswith(("GRAPHSTASH_", "_GRAPHSTASH_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "no-server"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-file"))


@pytest.fixture(autouse=True)
def _no_cache_is_left_in_this_process():
    """Require that a test that calls `graphstash.install` in this process also uninstalls it."""
    yield
    session = sys.modules.get("graphstash._process.session")
    if session is not None and session._current is not None:
        session.uninstall()
        pytest.fail("this test has left the cache installed in pytest's own process")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One real server for all tests that do not damage it. Each test uses its own `namespace`."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def new_namespace():
    """Return a function that names a new namespace.

    Tests in random order may switch between databases. A module's fixture then runs again on the
    same server and needs another name.
    """
    return lambda: f"test-{next(_numbers)}"


@pytest.fixture
def namespace(new_namespace):
    return new_namespace()


@pytest.fixture(scope="session")
def jobs():
    """Start real training jobs."""
    jobs = Jobs()
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def postgres():
    """One PostgreSQL server. Each test uses its own `new_database()`."""
    with Postgres() as postgres:
        yield postgres


@pytest.fixture(scope="session")
def start_on_sqlite(tmp_path_factory):
    """Return a function that starts each kind of server once, on SQLite, for the whole session."""
    with ExitStack() as stack:
        yield functools.cache(
            lambda kind, **settings: stack.enter_context(
                kind(tmp_path_factory.mktemp("server"), **settings)
            )
        )


@pytest.fixture(scope="session")
def start_on_postgresql(tmp_path_factory, postgres):
    """Return a function like `start_on_sqlite`'s; each server has its own PostgreSQL database."""
    with ExitStack() as stack:
        yield functools.cache(
            lambda kind, **settings: stack.enter_context(
                kind(
                    tmp_path_factory.mktemp("server"),
                    database_url=postgres.new_database(),
                    **settings,
                )
            )
        )


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def start_once(request):
    """Return the function that starts each kind of server once, on the parameter's database."""
    return request.getfixturevalue(f"start_on_{request.param}")


@pytest.fixture(scope="session")
def moto():
    """A fast S3. Each test uses its own bucket."""
    with Moto() as moto:
        yield moto


@pytest.fixture(scope="session")
def swift(tmp_path_factory):
    """A real S3. Each test uses its own bucket."""
    with Swift(tmp_path_factory.mktemp("swift")) as swift:
        yield swift


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory):
    """An emulator of Google Cloud Storage; take a bucket of your own."""
    with FakeGcs(tmp_path_factory.mktemp("fake-gcs")) as fake_gcs:
        yield fake_gcs


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    """An emulator of Azure Blob Storage; take a container of your own."""
    with Azurite(tmp_path_factory.mktemp("azurite")) as azurite:
        yield azurite


@pytest.fixture
def s3_credentials(monkeypatch):
    """Credentials in environment variables, where users put them."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return CREDENTIALS
