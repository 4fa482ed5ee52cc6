"""HookContract: the promises of every hook, tested by jobs of its real compiler."""

import itertools
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey, ArtifactMetadata, Namespace
from support.compiler_jobs import CompilerJobs
from support.fault_proxy import IMPATIENT, LEASE_REQUEST, Fault, FaultProxy
from support.jobs import Jobs, Outcome
from support.offline import unplugged
from support.server import Server
from support.tiers import most_extended
from support.waiting import PATIENT

REASONS = {
    "missing": "connect",
    Fault.SILENT: "timeout",
    Fault.DRIP: "timeout",
    Fault.FAILING: "server_error",
    Fault.FLIP: "digest_mismatch",
    Fault.TRUNCATE: "truncated",
    Fault.SWAP: "wrong_key",
}
"""Fallback reasons of a job whose server is missing, slow, broken, or sends other payloads."""

_REASON = "the cache beneath the hook keeps it, whatever the version of the compiler"
OF_THE_CACHE = {
    "test_fault_of_the_server_costs_a_compilation_and_is_counted": _REASON,
    "test_host_that_found_the_programs_needs_no_server": _REASON,
    "test_another_host_compiles_for_a_lease_holder_that_was_ended": _REASON,
}
"""Entries of `cannot` for tests that one version of a compiler proves for all versions."""

STRANGER = ArtifactKey.parse("schedule", "cpu-other", "0" * 64)

_numbers = itertools.count()


class HookContract:
    """Tests of a hook. A subclass describes a small job of its compiler.

    The job is a function of a module in `support.cases`, unless the subclass overrides `options`.

    Attributes:
        case: `module:function` of the job.
        keywords: arguments of the function.
        programs: number of programs that a cold job compiles.
        herd_programs: number of programs that simultaneous jobs compile only once. Default: all.
        package: the compiler's package, whose `__version__` the hook reads.
        unsupported: a version with which the hook is not installed.
        cold_under: start of the first job, see `support.jobs`.
        cannot: names of tests that do not hold for the hook, with the reason.
    """

    case: ClassVar[str]
    keywords: ClassVar[Mapping[str, Any]] = {}
    programs: ClassVar[int]
    herd_programs: ClassVar[int | None] = None
    package: ClassVar[str] = ""
    unsupported: ClassVar[str] = "0.0.1"
    cold_under: ClassVar[str] = "graphstash run"
    cannot: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        for name, reason in cls.cannot.items():
            assert callable(getattr(HookContract, name)), name
            assert reason, name
            setattr(cls, name, None)  # pytest does not collect None

    @classmethod
    def open(cls, directory: Path, **settings: Any) -> CompilerJobs:
        """Return an object that starts jobs of the compiler."""
        raise NotImplementedError

    def compiled(self, outcome: Outcome) -> int:
        """Return the number of programs that the job compiled, as counted by the compiler."""
        raise NotImplementedError

    def result(self, outcome: Outcome) -> object:
        """Return the result that the job computed."""
        raise NotImplementedError

    def compiled_by_herd(self, outcomes: Sequence[Outcome]) -> int:
        """Return how many of the `herd_programs` several jobs compiled together."""
        return sum(map(self.compiled, outcomes))

    @classmethod
    def options(cls, wrapper: str = "", **keywords: Any) -> tuple[tuple[object, ...], Any]:
        """Return options and arguments of `start` for the job, or for a case around it."""
        module, _, function = cls.case.partition(":")
        if not wrapper:
            return (function, {**cls.keywords, **keywords}), {"cases": module}
        around = {"function": cls.case, "keywords": dict(cls.keywords), **keywords}
        under = {"under": "python"} if wrapper == "on_other_version" else {}
        return (wrapper, around), {"cases": "contract", **under}

    @classmethod
    def run(cls, hosts: CompilerJobs, host: str, **arguments: Any) -> Outcome:
        options, chosen = cls.options()
        return hosts.run(host, *options, **chosen, **arguments)

    @pytest.fixture(scope="class")
    @classmethod
    def namespace(cls) -> str:
        # Tests in random order run the class in parts, and each part needs a namespace without
        # artifacts.
        return f"contract-{cls.__name__.lower()}-{next(_numbers)}"

    @pytest.fixture(scope="class")
    @classmethod
    def hosts(
        cls, jobs: Jobs, server: Server, namespace: str, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[CompilerJobs]:
        directory = tmp_path_factory.mktemp(namespace)
        with cls.open(directory, jobs=jobs, url=server.url, namespace=namespace) as hosts:
            yield hosts

    @pytest.fixture(scope="class")
    @classmethod
    def cold(cls, hosts: CompilerJobs) -> Outcome:
        return cls.run(hosts, "cold", under=cls.cold_under)

    @pytest.fixture(scope="class")
    @classmethod
    def warm(cls, hosts: CompilerJobs, cold: Outcome) -> Outcome:
        assert cold.stats["published"]
        return cls.run(hosts, "warm")

    @pytest.fixture
    def empty(self) -> str:
        """A namespace without artifacts."""
        return f"contract-empty-{next(_numbers)}"

    @pytest.fixture(scope="class")
    @classmethod
    def stranger(cls, hosts: CompilerJobs, server: Server, namespace: str) -> str:
        """The key of a sound artifact that no compiler requests."""
        place = hosts.directory / "stranger"
        settings = {"namespace": Namespace(namespace), "cache_dir": place, **PATIENT}
        with Stash(ClientConfig.load({}, url=server.url, **settings)) as stash:
            stash.put(STRANGER, b"sound", ArtifactMetadata(compile_seconds=1, raw_size_bytes=5))
        return str(STRANGER)

    def test_another_host_loads_what_one_host_compiled(self, cold: Outcome, warm: Outcome) -> None:
        assert self.compiled(cold) == self.programs
        assert cold.stats["misses"] == cold.stats["published"] >= self.programs
        assert cold.hits == warm.stats["published"] == warm.stats["misses"] == 0
        assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == {}
        assert self.compiled(warm) == 0
        assert warm.hits >= self.programs
        assert warm.stats["saved_compile_seconds"] > 0
        assert self.result(warm) == self.result(cold)

    @pytest.mark.extended  # for most hooks: the lease is the cache's
    def test_hosts_that_start_at_once_compile_each_program_once(
        self, hosts: CompilerJobs, empty: str
    ) -> None:
        options, chosen = self.options()
        herd = [
            hosts.start(f"herd-{number}", *options, **chosen, namespace=empty)
            for number in range(3)
        ]
        outcomes = [running.finish() for running in herd]
        once = self.programs if self.herd_programs is None else self.herd_programs
        assert self.compiled_by_herd(outcomes) == once
        assert all(outcome.stats["fallbacks"] == {} for outcome in outcomes)
        assert all(self.result(each) == self.result(outcomes[0]) for each in outcomes)

    @pytest.mark.parametrize("fault", most_extended(list(REASONS), quick=[Fault.FLIP]))
    def test_fault_of_the_server_costs_a_compilation_and_is_counted(
        self, hosts: CompilerJobs, cold: Outcome, server: Server, stranger: str, fault: str
    ) -> None:
        with FaultProxy(server.port) as proxy:
            proxy.fault = Fault(fault) if fault in set(Fault) else Fault.NONE
            proxy.swap_to = stranger
            url = "http://127.0.0.1:9" if fault == "missing" else proxy.url
            # These two faults only end at a timeout, so a short one causes no other fallback.
            waits = {Fault.SILENT: "first_byte_seconds", Fault.DRIP: "fetch_seconds"}
            patience = {waits[Fault(fault)]: 0.3} if fault in waits else {}
            outcome = self.run(hosts, str(fault), url=url, **(IMPATIENT | patience))
        assert self.compiled(outcome) == self.programs
        assert self.result(outcome) == self.result(cold)
        assert outcome.hits == 0
        assert outcome.stats["fallbacks"].get(REASONS[fault], 0) >= 1, outcome.stats["fallbacks"]
        for reason in outcome.stats["fallbacks"]:
            assert outcome.errors.count(f"graphstash: {reason}:") == 1
        assert "the job goes on" in outcome.errors

    @pytest.mark.extended
    def test_host_that_found_the_programs_needs_no_server(
        self, hosts: CompilerJobs, cold: Outcome, server: Server
    ) -> None:
        tier = hosts.directory / "offline" / "tier"  # without files of the compiler in it
        shutil.copytree(hosts.directory / "cold" / "tier", tier)
        again = self.run(hosts, "offline", url=unplugged(tier, server.url))
        assert self.compiled(again) == 0
        assert again.stats["hits_host"] >= self.programs
        assert again.stats["misses"] == 0
        assert again.stats["fallbacks"] == {}
        assert self.result(again) == self.result(cold)

    @pytest.mark.extended
    def test_hook_steps_aside_with_one_warning_on_an_unsupported_version(
        self, hosts: CompilerJobs, cold: Outcome
    ) -> None:
        options, chosen = self.options(
            "on_other_version", package=self.package, version=self.unsupported
        )
        outcome = hosts.run("unsupported", *options, **chosen)
        assert outcome.errors.count(f"not {self.unsupported}; the hook is not installed") == 1
        assert outcome.errors.count("graphstash: ") == 1
        assert self.compiled(outcome) == self.programs
        assert self.result(outcome) == self.result(cold)
        assert outcome.stats == {}

    @pytest.mark.extended
    def test_forked_child_shares_as_its_parent_does(
        self, hosts: CompilerJobs, cold: Outcome
    ) -> None:
        options, chosen = self.options("in_a_forked_child")
        outcome = hosts.run("forked", *options, **chosen)
        assert self.compiled(outcome) == 0
        assert outcome.hits >= self.programs
        assert self.result(outcome) == self.result(cold)

    @pytest.mark.extended
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_another_host_compiles_for_a_lease_holder_that_was_ended(
        self, hosts: CompilerJobs, cold: Outcome, server: Server, empty: str, number: signal.Signals
    ) -> None:
        options, chosen = self.options()
        settings: dict[str, Any] = {"namespace": empty, "lease_seconds": 2}
        with FaultProxy(server.port) as proxy:
            proxy.hold = LEASE_REQUEST
            name, through_proxy = f"{number.name}-holder", settings | {"url": proxy.url}
            holder = hosts.start(name, *options, **chosen, **through_proxy)
            assert proxy.held.wait(120), holder.errors.read_text()
            os.kill(holder.pid, number)
            proxy.go_on.set()
            assert holder.status() != 0
        after = self.run(hosts, f"{number.name}-after", **settings)
        assert self.result(after) == self.result(cold)
        # If the interrupt reaches Python after the compilation has ended, the program is published.
        assert self.compiled(after) + after.hits >= self.programs
        assert number == signal.SIGINT or self.compiled(after) == self.programs
