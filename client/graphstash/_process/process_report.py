"""ProcessReport: what a process reports to its user, later commands on this host and the server."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from graphstash._compile.stats import Stats
from graphstash._process.run_name import started_at
from graphstash.config import UNIX, ClientConfig
from graphstash.hooks.import_hook import is_imported
from graphstash.hooks.registry import hook_specs
from graphstash_schema import ManifestName
from graphstash_schema.display import plural

if TYPE_CHECKING:
    from graphstash._compile.cache import CompileCache
    from graphstash._compile.explaining import Cause
    from graphstash._compile.misses import Miss
    from graphstash_schema import ArtifactKey

__all__ = ["ProcessReport", "print_to_stderr"]

_log = logging.getLogger("graphstash")


@dataclass(frozen=True, kw_only=True)
class ProcessReport:
    """Report of one process. Its methods only log their failures.

    Attributes:
        run: name of the run.
        started_at: start of the process in seconds since 1970.
        job: returns the name of the job.
        cache: the process's cache, or None if the process has not opened it.
        hooks: whether each requested hook whose compiler is imported is installed.
    """

    config: ClientConfig
    run: str
    started_at: float
    job: Callable[[], ManifestName]
    stats: Stats
    cache: "CompileCache | None"
    hooks: Mapping[str, bool]

    def save(self, known: "Mapping[ArtifactKey, Cause]") -> None:
        """Write the record and report the run so far, with the causes that the server has named."""
        self._record()
        self._report(self._explain(known, asked=False))

    def send(
        self, known: "Mapping[ArtifactKey, Cause]", *, explains_all: bool, until: float
    ) -> None:
        """At exit: print the summary, write the record, explain the misses and report the run.

        Args:
            known: causes that the server has named.
            explains_all: whether to ask the server for all other causes, and to print them.
            until: when to stop reporting, in seconds of `time.monotonic`.
        """
        self._summarize()
        self._record()
        causes = self._explain(known, asked=explains_all)
        page = self._report(causes) if time.monotonic() < until else None
        if page is not None and self.config.summary and self.stats.misses:
            from graphstash._compile.explaining import brief_line

            missed = {each.description.key for each in self._misses if each.trouble is None}
            if line := brief_line(causes, missed=missed, misses=self.stats.misses, page=page):
                print_to_stderr(f"graphstash: {line}")

    @property
    def _misses(self) -> "Sequence[Miss]":
        return () if self.cache is None else self.cache.log.misses

    def _explain(self, known: "Mapping[ArtifactKey, Cause]", *, asked: bool) -> Sequence["Cause"]:
        """Return the known causes of this process's misses. If `asked`, print all causes."""
        wanted = [
            (each.description, each.trouble)
            for each in self._misses
            if asked or each.description.key in known
        ]
        if self.cache is None or not wanted:
            return ()
        from graphstash._compile.explaining import causes_of, format_causes

        causes: list[Cause] = []
        try:
            causes = causes_of(
                self.cache.stash.server, wanted, started_at=started_at(self.run), known=known
            )
            if not asked:
                return causes
            lines = format_causes(causes)
            if (more := self.stats.misses - len(self._misses)) > 0:
                lines.append(f"{plural(more, 'miss')}: not recorded")
        except Exception as error:  # noqa: BLE001 - an explanation must not fail the job
            lines = [f"the misses cannot be explained: {error}"]
        print_to_stderr("\n".join(f"graphstash: {line}" for line in lines))
        return causes

    def _report(self, causes: Sequence["Cause"]) -> str | None:
        """Send this process's counts to the server. A failure is only logged.

        Returns:
            The address of the run's page, or "" if there is none, or None if the report failed.
        """
        cache, stats = self.cache, self.stats
        if cache is None or not cache.stash.server.is_configured:
            return None
        if not self.config.report_runs:
            return ""
        if not (stats.hits or stats.misses or stats.fallbacks):
            return None
        from graphstash._process import run_report

        try:
            report = run_report.report_of(cache, job=self.job(), causes=causes)
            process = run_report.name_of_process()
            times = run_report.times_of(cache)
            cache.stash.server.report_run(run_report.RunName(self.run), process, report, times)
        except Exception as error:  # noqa: BLE001 - the job has ended; reporting must not fail it
            _log.debug("the run is not reported: %s", error)
            return None
        url = self.config.url
        return "" if url.startswith(UNIX) else f"{url}/runs/{self.config.namespace}/{self.run}"

    def _record(self) -> None:
        """Write the record that `graphstash explain` reads."""
        has_looked_up = bool(self.stats.hits or self._misses)
        notes = self._notes(has_looked_up=has_looked_up)
        if has_looked_up or notes:
            from graphstash._process import run_record

            try:
                run_record.save(
                    self.config,
                    self.stats,
                    self._misses,
                    run=self.run,
                    started_at=self.started_at,
                    notes=notes,
                )
            except (OSError, ValueError) as error:
                _log.debug("the record of this run cannot be written: %s", error)

    def _notes(self, *, has_looked_up: bool) -> list[str]:
        """Return why this process did not use the cache or does not share its results. A hook that
        is switched off is a reason only if the process looked up nothing.
        """
        notes = []
        in_place = {name for name, is_installed in self.hooks.items() if is_installed}
        specs = [spec for spec in hook_specs().values() if any(map(is_imported, spec.modules))]
        used = {module for spec in specs if spec.name in in_place for module in spec.modules}
        for spec in specs:
            if used.isdisjoint(spec.modules):
                if self.config.wants_hook(spec.name):
                    notes.append(f"the hook {spec.name} stepped aside; the log says why")
                elif not has_looked_up:
                    notes.append(f"the hook {spec.name} is off (GRAPHSTASH_HOOKS)")
        if self.config.read_only and self.config.url:
            notes.append("the job only reads (GRAPHSTASH_READ_ONLY): its results stay on this host")
        elif self.cache is not None and not self.cache.stash.server.may_write:
            notes.append("the token may not write to the namespace: the results stay on this host")
        return notes

    def _summarize(self) -> None:
        """Print the summary, and append it to the stats file."""
        stats = self.stats
        if not (stats.hits or stats.misses or stats.published or stats.fallbacks):
            return
        if self.config.summary:
            print_to_stderr(f"graphstash: {stats.summary()}")
        if self.config.stats_file is not None:
            record = {"pid": os.getpid(), "argv": sys.argv, **asdict(stats)}
            line = (json.dumps(record) + "\n").encode()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            try:
                # Without O_NONBLOCK, a pipe without a reader would block the exit. A single write
                # keeps the lines of processes that share the file apart.
                descriptor = os.open(self.config.stats_file, flags | os.O_NONBLOCK, 0o666)
                try:
                    os.write(descriptor, line)
                finally:
                    os.close(descriptor)
            except OSError as error:
                _log.warning("graphstash: %s: %s", self.config.stats_file, error)


def print_to_stderr(text: str) -> None:
    """Print to stderr, if possible."""
    with suppress(OSError, ValueError, AttributeError):  # full, closed, or absent
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - for the user
