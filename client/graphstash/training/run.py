"""Run: the loop behind `train`, from resuming to the last checkpoint."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphstash._errors import ConfigError
from graphstash.training.batch import to_device
from graphstash.training.checkpoint import Checkpoints
from graphstash.training.data import Position
from graphstash.training.device import settle
from graphstash.training.device_state import State, StateElement
from graphstash.training.divergence import Divergence
from graphstash.training.events import Callback, LogEntry, StopTraining, TrainingResult
from graphstash.training.feed import Feed, InlineFeed
from graphstash.training.loss_scale import LossScale
from graphstash.training.parallel import Parallel
from graphstash.training.randomness import (
    host_random_state,
    random_state,
    set_random_state,
)
from graphstash.training.snapshot import to_host
from graphstash.training.traced import traced_step
from graphstash.training.training_step import TrainingStep

__all__ = ["Run"]


@dataclass
class Run:
    """One call of `train`; its arguments are described there."""

    model: nn.Module
    optimizer: Optimizer
    position: Position
    schedule: LRScheduler | None
    loss_scale: LossScale | None
    step: TrainingStep
    device: torch.device
    parallel: Parallel
    steps: int
    accumulate: int
    ahead: int
    log_every: int
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None
    evaluate_every: int
    checkpoint_every: int
    callbacks: Sequence[Callback]

    checkpoints: Checkpoints | None = None
    done: int = 0
    """Steps that are made."""
    logged: int = 0
    """Steps whose numbers the host has."""
    saved: int = 0
    """The step of the newest checkpoint."""
    stop_asked: bool = False
    """A callback has raised `StopTraining`."""
    losses: list[float] = field(default_factory=list)
    divergence: Divergence = field(default_factory=Divergence)
    places: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Where the data stood when the batch of a boundary's step had been loaded."""
    interval_began: float = 0.0
    drawing: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever draws from the host's random generators beside the training."""

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one."""
        found = self.checkpoints.load() if self.checkpoints is not None else None
        if found is None:
            to_host(self._state())  # what a checkpoint cannot hold is refused now
            return
        state = found.state
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for part, name in ((self.schedule, "schedule"), (self.loss_scale, "loss_scale")):
            if (part is None) != (state[name] is None):
                raise ConfigError(
                    f"{found.path} was made {'without' if part is not None else 'with'} {name}; "
                    "resume with the arguments of the run that made it, or give another directory"
                )
            if part is not None:
                part.load_state_dict(state[name])
        if len(state["random"]) != self.parallel.world:
            raise ConfigError(
                f"{found.path} was made by {len(state['random'])} processes, not by "
                f"{self.parallel.world}; resume with as many, or give another directory"
            )
        self.position.load_state_dict(state["data"][self.parallel.rank])
        set_random_state(state["random"][self.parallel.rank], self.device)
        for element in (*self._elements(), self.step.log):
            settle(State([element]).tensors())
        self.done = self.logged = self.saved = found.step

    def loop(self, *, traced: bool) -> TrainingResult:
        """Makes the steps that are missing."""
        began = self.interval_began = time.perf_counter()
        resumed_from = self.done
        stopped_by: Literal["steps", "callback"] = "steps"
        with _terminations() as terminated:
            self._tell(lambda callback: callback.on_start(self.done, self.steps))
            with self._feed() as feed:
                self._make_steps(feed, self._one_step(traced=traced), terminated)
            if self.stop_asked:
                stopped_by = "callback"
            self._finish()
            if terminated.is_set():
                raise SystemExit(128 + signal.SIGTERM)
        result = TrainingResult(
            step=self.done,
            losses=tuple(self.losses),
            seconds=time.perf_counter() - began,
            stopped_by=stopped_by,
            resumed_from=resumed_from,
        )
        self._tell(lambda callback: callback.on_end(result))
        return result

    def _make_steps(
        self,
        feed: "_Feed",
        one_step: Callable[..., object],
        terminated: threading.Event,
    ) -> None:
        while self.done < self.steps and not self.stop_asked:
            if terminated.is_set() and self.parallel.world == 1:
                feed.stop_loading()  # what is loaded is trained on: the data can stop nowhere else
            batches = next(feed, None)
            if batches is None:
                return
            one_step(*batches)
            if self.schedule is not None:
                self.schedule.step()
            self.done += 1
            if self._is_boundary(self.done):
                self._boundary()
                if self.parallel.world > 1:  # processes stop after the same step
                    asked = self.parallel.gather((self.stop_asked, terminated.is_set()))
                    self.stop_asked = any(stop for stop, _ in asked)
                    if any(terminate for _, terminate in asked):
                        terminated.set()
                        return

    def _finish(self) -> None:
        """Nothing that was trained is lost."""
        if self.done > self.logged:
            self._read_log()
        if self.checkpoints is not None:
            if self.done > self.saved:
                self._save()
            self.checkpoints.wait()

    def _one_step(self, *, traced: bool) -> Callable[..., object]:
        if traced:
            return traced_step(self.step, [*self._elements(), self.step.log])
        if self.device.type != "xla":
            return self.step
        import torch_xla

        def lazy_step(*batches: Any) -> None:
            self.step(*batches)
            torch_xla.sync()

        return lazy_step

    def _elements(self) -> list[StateElement]:
        elements: list[StateElement] = [self.model, self.optimizer]
        return elements if self.loss_scale is None else [*elements, self.loss_scale]

    def _feed(self) -> "_Feed":
        first = self.done
        steps = _grouped(self.position, self.accumulate, self.drawing)

        def upload(batches: tuple[Any, ...]) -> tuple[Any, ...]:
            return to_device(batches, self.device)

        if self.ahead == 0:
            return InlineFeed(steps, upload=upload)

        def remember(number: int) -> None:
            if self._is_boundary(first + number):
                self.places[first + number] = self._place()

        on_loaded = remember if self.checkpoints is not None else None
        return Feed(steps, ahead=self.ahead, upload=upload, on_loaded=on_loaded)

    def _place(self) -> dict[str, Any]:
        """What the next batch depends on."""
        return {"data": deepcopy(self.position.state_dict()), "random": host_random_state()}

    def _is_boundary(self, step: int) -> bool:
        return step % self.log_every == 0 or self._evaluates(step) or self._saves(step)

    def _evaluates(self, step: int) -> bool:
        last = step == self.steps
        return self.evaluate is not None and (step % self.evaluate_every == 0 or last)

    def _saves(self, step: int) -> bool:
        last = step == self.steps
        return self.checkpoints is not None and (step % self.checkpoint_every == 0 or last)

    def _boundary(self) -> None:
        self._read_log()
        if self._evaluates(self.done):
            self._evaluate()
        if self._saves(self.done):
            self._save()
        self.interval_began = time.perf_counter()

    def _read_log(self) -> None:
        """Learns what the steps since the last boundary were like."""
        rows = self.step.log.read(self.done - self.logged)
        seconds = time.perf_counter() - self.interval_began
        self.divergence.look(self.logged + 1, rows)
        self.logged = self.done
        entry = LogEntry(
            step=self.done,
            losses=tuple(row["loss"] for row in rows),
            learning_rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            steps_per_second=len(rows) / seconds,
            loss_scale=rows[-1].get("loss_scale"),
            skipped=sum(row.get("found_inf", 0.0) != 0 for row in rows),
            gradient_norm=rows[-1].get("gradient_norm"),
        )
        self.losses += entry.losses
        self._tell(lambda callback: callback.on_log(entry))

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        modes = [(module, module.training) for module in self.model.modules()]
        # What an evaluation draws is no part of the training, nor may it come between two draws
        # of the thread that loads.
        with self.drawing:
            generators = host_random_state()
            self.model.eval()
            try:
                with torch.no_grad():
                    metrics = dict(self.evaluate(self.model) or {})
            finally:
                set_random_state(generators)
                for module, mode in modes:
                    module.training = mode
        self._tell(lambda callback: callback.on_evaluation(self.done, metrics))

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        state = self._state()
        for step in [step for step in list(self.places) if step <= self.done]:
            del self.places[step]
        if self.parallel.is_first:
            self.checkpoints.save(self.done, state)
        self.saved = self.done
        directory = self.checkpoints.directory
        self._tell(lambda callback: callback.on_checkpoint(self.done, directory))

    def _state(self) -> dict[str, Any]:
        """Everything that decides what comes after this step."""
        # Without threads that load ahead, data and generators are where the step has left them.
        place = self.places.get(self.done) or self._place()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": _state_of(self.schedule),
            "loss_scale": _state_of(self.loss_scale),
            # Of every process.
            "random": self.parallel.gather(random_state(self.device) | place["random"]),
            "data": self.parallel.gather(place["data"]),
        }

    def _tell(self, event: Callable[[Callback], None]) -> None:
        """Tells every callback, also where one of them asks to stop."""
        for callback in self.callbacks:
            try:
                event(callback)
            except StopTraining:
                self.stop_asked = True


_Feed = Feed[tuple[Any, ...]] | InlineFeed[tuple[Any, ...]]


def _state_of(part: LRScheduler | LossScale | None) -> dict[str, Any] | None:
    return None if part is None else dict(part.state_dict())


def _grouped(batches: Position, count: int, drawing: threading.Lock) -> Iterator[tuple[Any, ...]]:
    try:
        while True:
            with drawing:
                step = tuple([next(batches) for _ in range(count)])
            yield step
    finally:
        batches.close()


@contextmanager
def _terminations() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, where a handler can be installed."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
