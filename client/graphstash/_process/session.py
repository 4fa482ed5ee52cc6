"""Session: the state of the cache in one training process, from install to exit.

The session imports the cache's packages on first use, because most processes compile nothing. The
global `_current` is the only session of the process, because hooks patch the process's only copy of
each compiler.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn

from graphstash._compile.stats import Counters, Stats
from graphstash._executor import BoundedExecutor
from graphstash._forking import forkable, unforked
from graphstash._process.notices import log_once, notices
from graphstash._process.process_report import ProcessReport, print_to_stderr
from graphstash._process.run_name import command_of_run, started_at, this_run
from graphstash._process.settled import WhenSettled
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, ConfigError, Reason
from graphstash.hooks import installing
from graphstash.hooks.registry import hook_specs
from graphstash_schema import ManifestName

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from graphstash._artifacts.stash import Stash
    from graphstash._compile.cache import CompileCache
    from graphstash._compile.compile_limit import CompileLimit
    from graphstash._compile.explaining import Cause
    from graphstash._process.late_uploads import LateUploads
    from graphstash._process.live_causes import LiveCauses
    from graphstash._tracing import Close, Tracer
    from graphstash.hooks import Hook
    from graphstash_schema import ArtifactKey

__all__ = [
    "Session",
    "add_hook",
    "begin_for_hook",
    "get_or_compile",
    "install",
    "open_cache",
    "record_step",
    "stats",
    "uninstall",
]

_log = logging.getLogger("graphstash")

_MANIFEST_SECONDS = 5.0
"""Seconds that a running prefetch may delay the process's exit."""

_TRACES_SECONDS = 2.0
"""Seconds that the trace collector may delay the process's exit."""

_FAIL_ON_MISS: Final = "GRAPHSTASH_FAIL_ON_MISS"

_FILES: Final = ("ca_file", "client_cert", "signing_key", "trusted_keys")
"""Settings that are paths of files. `install` reports an unusable file."""


class Session:
    """Owns this process's stash, publisher and hooks. Raises ConfigError for unusable files."""

    def __init__(self, config: ClientConfig, *, run: str = "") -> None:
        self.config = config
        self.run = run or this_run()
        self._pid = os.getpid()
        self._started_at = time.time()
        self._closed = False
        self._counters = Counters()
        self._opening = threading.Lock()  # guards the field below
        self._cache: CompileCache | None = None
        self._tracer: Tracer | None = None
        self._ending = threading.RLock()  # a signal handler may close while its thread holds it
        self._is_prefetching = False
        self._prefetched_for: ManifestName | None = None
        self._publisher = BoundedExecutor(
            "graphstash-publish", workers=1, capacity=config.publish_queue, delays_forks=True
        )
        self._prefetcher = BoundedExecutor(
            "graphstash-prefetch", workers=1, capacity=1, delays_forks=True
        )
        self._settled = WhenSettled(self._counters, self._report_so_far)
        self._remembered = 0  # artifacts in `cache.used` that the manifests list
        self._late_uploads: LateUploads | None = None
        self._live_causes: LiveCauses | None = None
        self._hooks: dict[str, Hook | None] = {}
        if any(getattr(config, name) for name in _FILES):
            self.cache  # noqa: B018 - report a file error now, not at the first compilation

    @property
    def cache(self) -> "CompileCache":
        """The cache. The first access opens it."""
        with unforked(), self._opening:
            if self._cache is None:
                self._cache = self._open_cache()
                self._cache.stash.server.name_job(self.job)
                if self.config.fail_on_miss or self.config.max_compile_seconds:
                    self._cache.limit = self._limit(self._cache.stash)
                self._begin_late_uploads(self._cache)
                self._begin_live_causes(self._cache)
        self.start_prefetch()
        return self._cache

    def _open_cache(self) -> "CompileCache":
        from graphstash._artifacts.stash import Stash
        from graphstash._compile.cache import CompileCache

        counting: Any = {"counters": self._counters, "publisher": self._publisher}
        if not self.config.tracing:
            return CompileCache(Stash(self.config, run=self.run), **counting)
        try:
            from graphstash._compile.traced import TracedCache
            from graphstash._tracing import Tracer
        except ImportError as error:
            cache = CompileCache(Stash(self.config, run=self.run), **counting)
            cache.record_fallback(CacheError(Reason.TRACING, f"no traces are made: {error!r}"))
            return cache
        tracer = self._tracer = Tracer(_own_provider)
        stash = Stash(self.config, run=self.run, tracer=tracer)
        return TracedCache(stash, **counting, tracer=tracer)

    @property
    def job(self) -> ManifestName:
        """The configured name of the job, or a name derived from the command."""
        return self.config.job or self._own_names[0]

    @cached_property
    def _own_names(self) -> tuple[ManifestName, ...]:
        from graphstash._process.job_name import names_of

        return names_of(command_of_run())

    @property
    def _manifests(self) -> tuple[ManifestName, ...]:
        """Manifests to update. The first that exists lists the artifacts to prefetch."""
        if self.config.job is not None:
            return (self.config.job,)
        return self._own_names if self.config.prefetch_limit else ()

    def _limit(self, stash: "Stash") -> "CompileLimit":
        from graphstash._compile.compile_limit import CompileLimit  # few jobs have a limit

        folder = stash.local.run_folder(self.run)
        return CompileLimit(self.config, self._end_job, shared=folder / "compile-seconds")

    @property
    def _stash(self) -> "Stash":
        return self.cache.stash

    @property
    def is_closed(self) -> bool:
        """Whether compilers now continue without the cache."""
        return self._closed

    @property
    def hooks_in_place(self) -> Mapping[str, bool]:
        """Map each requested hook whose compiler is imported to whether it is installed."""
        return {name: hook is not None for name, hook in self._hooks.items()}

    def stats(self) -> Stats:
        """Return the counters of this process so far."""
        return self._counters.snapshot()

    def record_step(self) -> None:
        """Record when this process made its first step. Later steps change nothing."""
        self._counters.record_step()

    def add_hook(self, name: str) -> None:
        """Install a hook, unless this was tried before. A failure is only logged."""
        if name in self._hooks or self._closed:
            return
        self._hooks[name] = None
        try:
            self._hooks[name] = installing.install(name, self.cache)
        except Exception as error:  # noqa: BLE001 - outermost frame of a hook; training must go on
            _log.warning("graphstash: cannot install the %s hook: %s", name, error)
            _log.debug("hook installation failed", exc_info=True)
        # Exit handlers run in reverse order. Upload before compilers and hooks tear down.
        atexit.unregister(self.close)
        atexit.register(self.close)

    def record_without_cache(self, error: OSError) -> None:
        """Count a failure to open the cache. Log the first one."""
        if self._counters.count_fallback(Reason.LOCAL_IO):
            _log.warning("graphstash: %s; the job goes on without the cache", error)

    def begin_for_hook(self, name: str) -> None:
        """Open the cache, so that the prefetch runs during the long import of the compiler."""
        if self.config.wants_hook(name) and not self._closed:
            self.cache  # noqa: B018 - opening starts the prefetch

    def end_in_child(self) -> None:
        """Stop publishing in a forked child without a session: it has no publisher thread."""
        publisher = BoundedExecutor("graphstash-publish", workers=1, capacity=1)
        publisher.close()
        if self._cache is not None:
            self._cache.publisher = publisher  # a closed publisher releases each lease at once
            self._cache.log.added = lambda _: None
        self._counters.program_ready = lambda: None

    def take_over(self, parent: "Session") -> None:
        """Take over the parent's hooks in a forked child."""
        for name, hook in parent._hooks.items():  # noqa: SLF001 - same class
            self._hooks[name] = None
            with suppress(Exception):
                if hook is not None and hook.after_fork(self.cache):
                    self._hooks[name] = hook

    def close(self) -> None:
        """Remove the hooks, then finish: see `_finish`."""
        if self._pid != os.getpid():  # a forked child does not own the parent's session
            return
        with self._ending:  # a thread in `_end_job` ends this process and never releases it
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + self.config.drain_seconds
        for hook in self._hooks.values():
            if hook is not None:
                with suppress(Exception):
                    hook.close()
        self._finish(until)
        with suppress(OSError):
            if self._cache is not None:
                self._cache.stash.close()

    def _end_job(self, why: str, *, status: int) -> None:
        """End all processes of this run. An exception would not: compilers run hooks in their own
        threads and swallow exceptions. The hooks stay installed, because a compiler executes one.
        """
        from graphstash._process import run_end

        with self._ending:  # other threads that want to compile block here
            run_end.claim_end(status)
            try:
                print_to_stderr(f"graphstash: the job ends: {why}")
                if not self._closed:
                    self._closed = True
                    with suppress(Exception):
                        self._finish(time.monotonic() + self.config.drain_seconds, explain=True)
            finally:
                run_end.end_run(status)

    def _finish(self, until: float, *, explain: bool = False) -> None:
        """Wait for uploads, release leases, update manifests, print the summary, report the run."""
        if not self._publisher.drain(self.config.drain_seconds):
            _log.warning(
                "graphstash: uploads did not finish within %g s (GRAPHSTASH_DRAIN_SECONDS)",
                self.config.drain_seconds,
            )
        self._publisher.close()
        if self._cache is not None:
            self._cache.abandon_all()
        if self._settled.end(max(0.0, until - time.monotonic())):
            self._describe()  # otherwise a call that does the same is still waiting for the server
        self._prefetcher.drain(_MANIFEST_SECONDS)
        self._prefetcher.close()
        if self._late_uploads is not None:
            self._late_uploads.end(until)
        self._end_traces(until)
        known: Mapping[ArtifactKey, Cause] = {}
        if self._live_causes is not None:
            # Usually all requests have ended. Wait for the last less long than for the report.
            left = max(0.0, until - time.monotonic())
            with suppress(OSError):
                known = self._live_causes.end(min(self.config.first_byte_seconds / 2, left))
        explains_all = explain or self.config.explain is True
        self._new_report().send(known, explains_all=explains_all, until=until)

    def _report_so_far(self) -> None:
        """Leave what later runs and commands need of this process, in case it is killed."""
        self._wait_for_uploads()
        self._describe()
        known = {} if self._live_causes is None else self._live_causes.found()
        self._new_report().save(known)

    def _new_report(self) -> ProcessReport:
        return ProcessReport(
            config=self.config,
            run=self.run,
            started_at=self._started_at,
            job=lambda: self.job,
            stats=self.stats(),
            cache=self._cache,
            hooks=self.hooks_in_place,
        )

    def _end_traces(self, until: float) -> None:
        """Send the last spans, for at most `_TRACES_SECONDS`, and not after `until`."""
        if self._tracer is None or self._cache is None:
            return
        left = max(0.0, until - time.monotonic())
        lost = self._tracer.close(min(_TRACES_SECONDS, left))
        if lost is not None:
            self._cache.record_fallback(CacheError(Reason.TRACING, lost))

    def name_job(self, job: str) -> None:
        """Name the job, unless a name is configured, and start the prefetch. Raises
        InvalidValueError for a malformed name.
        """
        if self.config.job is None:
            self.config = replace(self.config, job=ManifestName(job))
            if self._cache is not None:
                self._cache.stash.server.name_job(self.job)
            self.start_prefetch()

    def start_prefetch(self) -> None:
        """Download in the background what earlier runs used. Starts once per job name."""
        if not self.config.url or not self.config.prefetch_limit:
            return
        if self._prefetched_for != self.config.job or not self._is_prefetching:
            self._prefetched_for, self._is_prefetching = self.config.job, True
            self._prefetcher.submit(self._prefetch)

    def _prefetch(self) -> None:
        from graphstash._process.run_prefetch import prefetch_once

        prefetch_once(
            self._stash,
            self._manifests,
            is_stopped=lambda: self._closed,
            fetched=lambda size: self._counters.add(prefetched_bytes=size),
        )

    def _begin_late_uploads(self, cache: "CompileCache") -> None:
        from graphstash._process.late_uploads import LateUploads

        self._late_uploads = LateUploads(
            cache.stash,
            job=lambda: self.job,
            before_each=self._wait_for_uploads,
            published=lambda size: self._counters.add(published=1, published_bytes=size),
            failed=cache.record_fallback,
        )
        cache.stash.unsent.added = self._late_uploads.start
        self._late_uploads.start()

    def _begin_live_causes(self, cache: "CompileCache") -> None:
        logs = self.config.explain == "live"
        if logs or (self.config.summary and self.config.url):
            from graphstash._process.live_causes import LiveCauses

            self._live_causes = LiveCauses(
                cache.stash.server, started_at=started_at(self.run), logs=logs
            )
            cache.log.added = self._live_causes.add

    def _wait_for_uploads(self) -> None:
        """Give way to this job's own uploads."""
        with forkable():
            self._publisher.drain(self.config.drain_seconds)

    def _describe(self) -> None:
        """Describe to the server the artifacts that this process has published since the last call.
        Add the artifacts that it has used since then to the job's manifests.
        """
        cache = self._cache
        if cache is None:
            return
        cache.log.send(cache.stash.server)
        if cache.stash.server.is_read_only:
            return
        used = cache.used
        if added := used[self._remembered :]:
            with suppress(CacheError, OSError):
                for name in self._manifests:
                    cache.stash.server.update_manifest(name, added)
                self._remembered = len(used)


_lock = threading.RLock()  # guards `_current`; reentrant because a hook's import may install
_current: Session | None = None


def install(**settings: Any) -> Session | None:
    """Start the cache in this process. Hook each supported compiler when it is imported.

    A second call changes nothing, and warns if its settings differ. If it requests stricter
    signature checks than the first call, it stops the cache.

    Args:
        settings: fields of `ClientConfig`. They override `GRAPHSTASH_*` variables.

    Returns:
        The session, or None if the job runs without the cache. A warning says why, except if the
        user has switched it off (`enabled=False`).
    """
    session = _session(settings)
    if session is not None:
        specs = hook_specs().values()
        chosen = [spec for spec in specs if session.config.wants_hook(spec.name)]
        installing.install_when_needed(chosen, session.add_hook, on_begin=session.begin_for_hook)
    return session


def add_hook(name: str) -> None:
    """Install one hook, whose compiler is imported. Start the cache if necessary."""
    session = _session({})
    if session is not None and session.config.wants_hook(name):
        session.add_hook(name)


def begin_for_hook(name: str) -> None:
    """Start the cache if necessary. Called when the import of a hook's compiler begins."""
    session = _session({})
    if session is not None:
        session.begin_for_hook(name)


def uninstall() -> None:
    """Remove all hooks and end the session, as at process exit."""
    global _current  # noqa: PLW0603 - see the module's docstring
    with _lock:
        session = _current
    if session is None:
        return
    atexit.unregister(session.close)
    session.close()  # may wait for uploads, but calls in other threads must not
    with _lock:
        if _current is session:
            _current = None


def stats() -> Stats:
    """Return the counters of this process so far. Without a session, all are 0."""
    with _lock:
        return _current.stats() if _current is not None else Stats()


def record_step() -> None:
    """Record when this process made its first step. Without a session, do nothing."""
    with _lock:
        if _current is not None:
            _current.record_step()


def open_cache() -> "CompileCache | None":
    """Return this process's cache. Return None if it is off, has ended, or cannot be opened."""
    session = _session({})
    if session is None:
        return None
    try:
        return session.cache
    except OSError as error:  # no directory is writable, or no file descriptor is left
        session.record_without_cache(error)
        return None


def get_or_compile(
    key: "ArtifactKey",
    compile_payload: Callable[[], bytes],
    *,
    parts: Mapping[str, str] | None = None,
    toolchain: str = "",
    label: str = "",
) -> bytes:
    """Return an artifact that any job has compiled, or compile it now.

    Starts the cache if necessary. For the arguments, see `CompileCache.get_or_compile`.
    """
    cache = open_cache()
    if cache is None:
        return compile_payload()
    return cache.get_or_compile(key, compile_payload, parts=parts, toolchain=toolchain, label=label)


def _own_provider() -> "tuple[TracerProvider, Close]":
    from graphstash._process.tracing import exporting_provider

    return exporting_provider()


def _after_fork() -> None:
    """Give a forked child its own session: it has no threads, and shares its parent's sockets."""
    global _current, _lock  # noqa: PLW0603 - see the module's docstring
    parent = _current
    _lock = threading.RLock()  # another thread of the parent may have held the old lock
    if parent is None or parent.is_closed:
        return
    try:
        _current = Session(parent.config, run=parent.run)
    except (ConfigError, OSError):
        _current = None
        parent.end_in_child()
        return
    _current.take_over(parent)
    atexit.register(_current.close)
    # Children of `multiprocessing` skip `atexit` and run its finalizers. It clears these after a
    # fork, before it calls its after-fork functions.
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util.register_after_fork(_current, _close_with_multiprocessing)


def _close_with_multiprocessing(session: Session) -> None:
    from multiprocessing.util import Finalize

    Finalize(None, session.close, exitpriority=100)


os.register_at_fork(after_in_child=_after_fork)


def _session(settings: dict[str, Any]) -> Session | None:
    global _current  # noqa: PLW0603 - see the module's docstring
    with _lock:
        if _current is None:
            try:
                config = ClientConfig.load(**settings)
                if not config.enabled:
                    return None
                _current = Session(config)
            except (ConfigError, OSError) as error:
                if _fails_on_miss(settings):
                    _end_without_cache(str(error))
                log_once([f"disabled: {error}; the job runs without the cache"])
                return None
            log_once(notices(config, os.environ))
            if config.job is not None:
                _current.start_prefetch()
            atexit.register(_current.close)
        elif settings and not _current.is_closed and not _may_keep(_current, settings):
            return None
        return None if _current.is_closed else _current


def _fails_on_miss(settings: Mapping[str, Any]) -> bool:
    """Return whether a job whose settings cannot be used may still not compile."""
    environ = {_FAIL_ON_MISS: os.environ.get(_FAIL_ON_MISS, "")}
    with suppress(ConfigError):
        return ClientConfig.load(environ, fail_on_miss=settings.get("fail_on_miss")).fail_on_miss
    return False


def _end_without_cache(why: str) -> NoReturn:
    from graphstash._compile.compile_limit import STATUS_NO_CACHE
    from graphstash._process import run_end

    run_end.claim_end(STATUS_NO_CACHE)
    print_to_stderr(f"graphstash: the job ends: {why} ({_FAIL_ON_MISS})")
    run_end.end_run(STATUS_NO_CACHE)


def _may_keep(session: Session, settings: dict[str, Any]) -> bool:
    """Return whether a running session may continue after `install` with these settings."""
    try:
        requested = ClientConfig.load(**settings)
    except ConfigError as error:
        _log.warning("graphstash: %s; keeping the current settings", error)
        return True
    others = sorted(
        name for name in settings if getattr(requested, name) != getattr(session.config, name)
    )
    if not others:
        return True
    if requested.signature_policy.is_stricter_than(session.config.signature_policy):
        session.close()
        _log.warning(
            "graphstash: disabled: already running without the signature check that install() "
            "requested (%s); set GRAPHSTASH_TRUSTED_KEYS, or call install() before any compiler is "
            "imported",
            ", ".join(others),
        )
        return False
    _log.warning(
        "graphstash: already running with a different %s; set GRAPHSTASH_*, or call install() "
        "before any compiler is imported",
        ", ".join(others),
    )
    return True
