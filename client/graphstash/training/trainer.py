"""train: a training loop that keeps the device busy and can be stopped at any time.

Between logging boundaries the host only hands out work: batches are loaded and uploaded ahead, each
step is recorded, or run from its graph, and nothing is read. At a boundary the numbers of all steps
since the last one come in one read; that is where a run that has diverged is noticed, where the
progress moves, and where checkpoints are taken, which a thread writes while training goes on.

A checkpoint has everything that decides what comes next: model, optimizer, schedule, loss scale,
the place in the data, and the random generators. A job that was killed and started again with the
same command makes the same steps.
"""

import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
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
from graphstash.training.progress import Progress
from graphstash.training.randomness import (
    host_random_state,
    random_state,
    set_random_state,
)
from graphstash.training.traced import traced_step
from graphstash.training.training_step import LossFunction, Precision, TrainingStep, call_model

__all__ = ["train"]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: Iterable[Any],
    *,
    steps: int,
    loss: LossFunction = call_model,
    precision: Precision = "fp32",
    loss_scale: LossScale | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    schedule: LRScheduler | None = None,
    traced: bool = False,
    ahead: int | None = None,
    log_every: int = 50,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    checkpoints: Path | str | None = None,
    checkpoint_every: int = 1000,
    keep: int = 3,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    job: str | None = None,
) -> TrainingResult:
    """Trains a model for `steps` steps, or goes on with a run that has made some of them.

    Args:
        model: on its device. In a job of several processes every process has the same one.
        optimizer: of the model's parameters. Those of this package never read the device; with
            others it depends on them, and they cannot be used with a loss scale.
        data: batches: a DataLoader, `Batches`, or anything else that can be iterated over again
            and again; it is, until the steps are made.
        steps: how many in all, those of the run that is resumed included.
        loss: `loss(model, batch)` gives the mean loss of a batch; by default the model does,
            `model(*batch)`.
        precision: "bf16" and "fp16" compute in torch.autocast; "fp16" with a dynamic loss scale.
        loss_scale: another one than `LossScale()`; also for other precisions, to leave out steps
            whose gradients are not finite.
        clip_norm: limit of the gradients' global norm.
        clip_value: limit of every element of the gradients.
        accumulate: micro-batches of `data` that make up the batch of one step; all in one graph.
        schedule: stepped after every step.
        traced: run the whole step as one graph; see `traced_step` for what it asks of the model.
        ahead: batches that are loaded and uploaded beforehand by threads. None: 2, but 0 where the
            model draws its random numbers from the generator that the data draws from, that is on
            a CPU without torch_xla.
        log_every: steps between two logging boundaries.
        evaluate: `evaluate(model)` gives metrics, in `eval()` mode and without gradients.
        evaluate_every: steps between two evaluations; there is one after the last step.
        checkpoints: directory of the checkpoints. If there are any, training goes on from the
            newest. SIGTERM makes one more and ends the process with status 143.
        checkpoint_every: steps between two of them; there is one after the last step.
        keep: so many stay.
        callbacks: see `Callback`.
        progress: show it on standard error.
        job: bring the executables of earlier runs of this job to this host beforehand, if there is
            a graphstash server; the same as `graphstash run --job`.

    Returns:
        Where and how training ended.

    Raises:
        ConfigError: an argument is out of its range, or two do not go together.
        DivergedError: the loss or the gradients stay infinite or NaN.
    """
    _require_positive(
        steps=steps,
        accumulate=accumulate,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        evaluate_every=steps if evaluate_every is None else evaluate_every,
    )
    if precision not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"precision is {precision!r}; it can be 'fp32', 'bf16' or 'fp16'")
    if job is not None:
        from graphstash._session import install

        if (session := install()) is not None:
            session.name_job(job)
    if loss_scale is None and precision == "fp16":
        loss_scale = LossScale()
    if loss_scale is not None and "found_inf" not in inspect.signature(optimizer.step).parameters:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot leave out a step whose gradients are not finite; "
            "with a loss scale, use one of graphstash.training's optimizers"
        )
    device = next(model.parameters()).device
    parallel = Parallel.current(device)
    optimizer.zero_grad(set_to_none=True)
    step = TrainingStep(
        parallel.wrap(model),
        optimizer,
        loss,
        device=device,
        parallel=parallel,
        precision=precision,
        scale=loss_scale,
        clip_norm=clip_norm,
        clip_value=clip_value,
        log_rows=log_every,
    )
    if ahead is None:
        ahead = 0 if device.type == "cpu" else 2
    with ExitStack() as stack:
        shown: list[Callback] = []
        if progress and parallel.is_first:
            bar = Progress()
            stack.callback(bar.close)
            shown.append(bar)
        run = _Run(
            model=model,
            optimizer=optimizer,
            position=Position(data),
            schedule=schedule,
            loss_scale=loss_scale,
            step=step,
            device=device,
            parallel=parallel,
            steps=steps,
            accumulate=accumulate,
            ahead=ahead,
            log_every=log_every,
            evaluate=evaluate,
            evaluate_every=steps if evaluate_every is None else evaluate_every,
            checkpoint_every=checkpoint_every,
            callbacks=(*shown, *callbacks),
        )
        if checkpoints is not None:
            run.checkpoints = stack.enter_context(Checkpoints(checkpoints, keep=keep))
            run.resume()
        parallel.require_same("the step to begin with", run.done)
        return run.loop(traced=traced)


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")


@dataclass
class _Run:
    """One call of `train`."""

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
    losses: list[float] = field(default_factory=list)
    divergence: Divergence = field(default_factory=Divergence)
    places: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Where the data stood when the batch of a boundary's step had been loaded."""
    interval_began: float = 0.0

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one."""
        found = self.checkpoints.load() if self.checkpoints is not None else None
        if found is None:
            self.position.state_dict()  # data whose place cannot be saved is refused now
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
        for callback in self.callbacks:
            callback.on_start(self.done, self.steps)
        with _terminations() as terminated:
            try:
                with self._feed() as feed:
                    self._make_steps(feed, self._one_step(traced=traced), terminated)
            except StopTraining:
                stopped_by = "callback"
            self._finish()
            if terminated.is_set() and self.done < self.steps:
                raise SystemExit(128 + signal.SIGTERM)
        result = TrainingResult(
            step=self.done,
            losses=tuple(self.losses),
            seconds=time.perf_counter() - began,
            stopped_by=stopped_by,
            resumed_from=resumed_from,
        )
        for callback in self.callbacks:
            callback.on_end(result)
        return result

    def _make_steps(
        self,
        feed: "_Feed",
        one_step: Callable[..., object],
        terminated: threading.Event,
    ) -> None:
        while self.done < self.steps:
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
                # Processes make a checkpoint of the same step, or none.
                if self.parallel.world > 1 and any(self.parallel.gather(terminated.is_set())):
                    terminated.set()
                    return

    def _finish(self) -> None:
        """Nothing that was trained is lost."""
        with suppress(StopTraining):
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
        steps = _grouped(self.position, self.accumulate)

        def upload(batches: tuple[Any, ...]) -> tuple[Any, ...]:
            return to_device(batches, self.device)

        if self.ahead == 0:
            return InlineFeed(steps, upload=upload)

        def remember(number: int) -> None:
            if self._is_boundary(first + number):
                self.places[first + number] = self._place()

        return Feed(steps, ahead=self.ahead, upload=upload, on_loaded=remember)

    def _place(self) -> dict[str, Any]:
        """What the next batch depends on."""
        return {"data": self.position.state_dict(), "random": host_random_state()}

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
        for callback in self.callbacks:
            callback.on_log(entry)

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        self.model.eval()
        try:
            with torch.no_grad():
                metrics = self.evaluate(self.model)
        finally:
            self.model.train()
        for callback in self.callbacks:
            callback.on_evaluation(self.done, metrics)

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        # Without threads that load ahead, data and generators are where the step has left them.
        place = self.places.get(self.done) or self._place()
        self.places.clear()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": _state_of(self.schedule),
            "loss_scale": _state_of(self.loss_scale),
            # Of every process.
            "random": self.parallel.gather(random_state(self.device) | place["random"]),
            "data": self.parallel.gather(place["data"]),
        }
        if self.parallel.is_first:
            self.checkpoints.save(self.done, state)
        self.saved = self.done
        for callback in self.callbacks:
            callback.on_checkpoint(self.done, self.checkpoints.directory)


_Feed = Feed[tuple[Any, ...]] | InlineFeed[tuple[Any, ...]]


def _state_of(part: LRScheduler | LossScale | None) -> dict[str, Any] | None:
    return None if part is None else dict(part.state_dict())


def _grouped(batches: Position, count: int) -> Iterator[tuple[Any, ...]]:
    try:
        while True:
            yield tuple([next(batches) for _ in range(count)])
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
