"""Processes of torch.distributed with gloo that run several cases in turn."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Self

from support.jobs import Jobs, Running
from support.run_case import RUN_CASE, case_arguments

SECONDS = 200


class WarmRanks:
    """The processes, forked from one that has imported torch.

    A case is a typed function of a module in `support.cases`, as for `support.run_case`. Each rank
    calls it. After a case that fails, the next case gets new processes.
    """

    def __init__(self, jobs: Jobs, directory: Path, world: int) -> None:
        self._jobs, self._directory, self._world = jobs, directory, world
        self._running: list[Running] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # otherwise a rank may still wait for another
            with suppress(OSError):
                for pipe in self._pipes:
                    pipe.send_bytes(b"null")
                for process in self._running:
                    process.status()
        self.kill()

    def run(self, case: str, **keywords: object) -> list[Any]:
        """Run `module:function` on every rank, and return each rank's result.

        Raises:
            AssertionError: has the traceback of the first rank that failed.
        """
        self.begin(case, **keywords)
        return self.answers()

    def begin(self, case: str, **keywords: object) -> None:
        """Start a case without waiting for it."""
        if not self._pipes:
            self._start()
        request = json.dumps({"case": case, "keywords": keywords}, default=str).encode()
        for pipe in self._pipes:
            pipe.send_bytes(request)

    def answers(self, *, killed: Sequence[int] = (), end_others: bool = False) -> list[Any]:
        """Wait for the started case. Ranks in `killed` must end without an answer.

        With `end_others`, each other rank ends after its answer, as in a job that fails. Otherwise,
        its connections stay open, and a rank that waits for it waits for the timeout of the group.
        """
        answers: dict[int, Any] = {}
        missing = dict(zip(self._pipes, range(self._world), strict=True))
        deadline = time.monotonic() + SECONDS
        while missing:
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(missing.values())} have not ended the case")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = missing.pop(pipe)
                try:
                    answer = json.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    if rank not in killed:
                        self._fail(f"rank {rank} has ended: {self._running[rank].errors}")
                    continue
                if "error" in answer:
                    self._fail(f"rank {rank}: {answer['error']}")
                assert rank not in killed, f"rank {rank} was not killed"
                answers[rank] = answer["value"]
                if end_others:
                    self._running[rank].kill()
        if killed:
            self.kill()
        return [answers[rank] for rank in sorted(answers)]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    def kill(self) -> None:
        """End the processes. The next case starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._running:
            process.kill()
        self._pipes, self._running = [], []

    def _start(self) -> None:
        directory = Path(mkdtemp(dir=self._directory))
        # The path of a socket may have only 107 characters, and pytest's folders are deeper.
        with (
            TemporaryDirectory(prefix="ranks-") as short,
            Listener(address := f"{short}/socket", "AF_UNIX", self._world) as listener,
        ):
            for rank in range(self._world):
                place = {"rank": rank, "world": self._world, "store": directory / "store"}
                options = case_arguments("ranks:serve", address=address, **place)
                at = directory / str(rank)
                self._running.append(self._jobs.start(at, *options, script=RUN_CASE, under="torch"))
            pipes = [listener.accept() for _ in range(self._world)]
        by_rank = {int(pipe.recv_bytes()): pipe for pipe in pipes}
        self._pipes = [by_rank[rank] for rank in range(self._world)]

    def _fail(self, text: str) -> None:
        errors = [process.errors.read_text() for process in self._running]
        self.kill()
        raise AssertionError("\n".join([text, *filter(None, errors)]))
