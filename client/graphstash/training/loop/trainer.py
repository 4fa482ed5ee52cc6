"""train: a training loop that keeps the device busy and can be stopped at any time.

Between logging boundaries, the host queues steps and reads nothing from the device, while threads
load and upload batches ahead. At a boundary, one read returns the numbers of all steps since the
last boundary. `train` then checks for divergence, updates the progress bar and takes checkpoints,
which a thread writes while training continues.

A checkpoint contains everything that determines the next steps: model, optimizer, schedule, loss
scale, position in the data, and random generators. A job that was killed and restarted with the
same command makes the same steps.
"""

import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from graphstash.errors import ConfigError, GraphstashError
from graphstash.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    gather_shards,
    to_host,
)
from graphstash.training.data.batches import Batches
from graphstash.training.data.device_loader import (
    DeviceLoader,
    InlineLoader,
    tensors_in,
    to_device,
)
from graphstash.training.data.generators import generators_in, restore, states_of
from graphstash.training.data.position import (
    DataPosition,
    host_random_state,
    random_state,
    set_random_state,
)
from graphstash.training.device import settle
from graphstash.training.fusion import Fusion, FusionError, fuse
from graphstash.training.loop.events import (
    Callback,
    DivergedError,
    Divergence,
    LogEntry,
    Progress,
    StopTraining,
    TrainingResult,
)
from graphstash.training.loop.parallel import Parallel
from graphstash.training.loop.resuming import (
    common_arguments,
    describe_run,
    load_schedule,
    require_compatible,
    schedule_state,
    state_of,
    warn_of_changes,
)
from graphstash.training.loop.training_step import Options, TrainingStep
from graphstash.training.sharding import distributed_like
from graphstash.training.traced import traced_step
from graphstash.training.traced.state import State, StateElement

__all__ = ["train"]

_log = logging.getLogger("graphstash")


class _Run:
    def __init__(self, options: Options, parallel: Parallel, callbacks: Sequence[Callback]) -> None:
        self.options = options
        self.parallel = parallel
        self.device = options.device
        self.callbacks = callbacks
        self.step = TrainingStep(options, parallel)
        self.position = DataPosition(options.data)
        self.checkpoints: Checkpoints | None = None
        self.done = 0
        self.logged = 0
        """Number of steps whose rows of the log the host has read."""
        self.saved = 0
        self.fusion: Fusion | None = None
        self.has_step_callbacks = any(type(c).on_step is not Callback.on_step for c in callbacks)
        self.in_step = False
        """Whether the state may not be saved: partly updated, or replaced by averages."""
        self.stop_requested = False
        self.losses: list[float] = []
        self.divergence = Divergence()
        self.positions: dict[int, dict[str, Any]] = {}
        """By step of a boundary: the position in the data once the step's batches are loaded."""
        self.interval_began = 0.0
        self.loaded = 0
        """Number of steps for which at least one batch was loaded."""
        self.taken = 0
        """Number of steps whose batches the training has taken."""
        self.shares_batches = False
        """Whether the training reads the data's own tensors while a thread loads more."""
        self.changed_batches: ConfigError | None = None
        self.data_lock = threading.Lock()
        """Held while a step's batches are loaded, and by code that no loading may interrupt."""
        elements = (options.model, options.optimizer, options.loss_scale)
        self.elements: list[StateElement] = [part for part in elements if part is not None]
        switches = (getattr(options.optimizer, name, None) for name in ("train", "eval"))
        self.averaging_optimizer: Any = options.optimizer if all(map(callable, switches)) else None
        """The optimizer, if it evaluates averaged parameters (Schedule-Free)."""

    def resume(self) -> None:
        found = self._load_newest()
        if found is None:
            to_host(self._state())  # raises before the first step if state cannot be saved
            return
        state = found.state
        require_compatible(found, self.options)
        warn_of_changes(found, self.options)
        self._load_weights(state["model"], state["optimizer"])
        if self.options.schedule is not None:
            load_schedule(self.options.schedule, state["schedule"])
        if self.options.loss_scale is not None:
            self.options.loss_scale.load_state_dict(state["loss_scale"])
        for name, part in self.options.stateful.items():
            part.load_state_dict(state["stateful"][name])
        if self.options.reduce is not None:
            self.options.reduce.load_state_dict(state.get("reduce") or {})
        self._load_position(found)
        for element in (*self.elements, self.step.log):
            settle(State([element]).tensors())
        self.done = self.logged = self.saved = found.step

    def _load_newest(self) -> Checkpoint | None:
        """Lock the directory, and return its newest checkpoint. An error is raised in every
        process: none may wait for a process that has failed.
        """
        if self.checkpoints is None:
            return None
        found, failure = None, None
        try:
            if self.parallel.is_first:
                self.checkpoints.lock()
            found = self.checkpoints.load()
        except GraphstashError as error:
            failure = error
        failures = self.parallel.gather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if message := next(filter(None, failures), None):
            raise CheckpointError(message)
        self.parallel.require_same({"the checkpoint to resume": found and found.path.name})
        return found

    def _load_position(self, found: Checkpoint) -> None:
        """Restore data position and generators. Another number of processes may have saved them."""
        data, random = found.state["data"], found.state["random"]
        rank, processes = self.parallel.rank, len(data)
        if processes != self.parallel.world and not isinstance(self.options.data, Batches):
            raise ConfigError(
                f"{found.path} was made by {processes} processes, not by {self.parallel.world}; "
                "resume with as many, or give another directory (the position of `Batches` can "
                "be resumed with any number of processes)"
            )
        # Modulo, because there may be more processes now. `Batches` has the same position in all.
        position, state = data[rank % processes], random[rank % processes]
        if rank >= processes:  # the generators of the data and the model keep their own seeds
            position, state = position | {"generators": {}}, state | {"own": {}}
        self.position.load_state_dict(position)
        set_random_state(state, self.device)
        restore(self._own_generators(), state.get("own", {}))
        if rank >= processes:
            torch.manual_seed(torch.initial_seed() + rank)

    def _own_generators(self) -> dict[str, Any]:
        """Return the generators of model, loss and callbacks that are not the data's."""
        options = self.options
        of_data = {*map(id, generators_in(options.data).values())}
        found = generators_in(options.model, options.loss, *options.callbacks)
        return {name: each for name, each in found.items() if id(each) not in of_data}

    def _load_weights(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        here = self.options.model.state_dict()
        for name, value in model.items():
            if isinstance(value, Tensor):
                model[name] = distributed_like(value, here.get(name))
        groups = self.options.optimizer.param_groups
        for number, parameter in enumerate(p for group in groups for p in group["params"]):
            state = optimizer["state"].get(number, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":
                    state[name] = distributed_like(value, parameter)
        self.options.model.load_state_dict(model)
        self.options.optimizer.load_state_dict(optimizer)

    def train(self) -> TrainingResult:
        began = self.interval_began = time.perf_counter()
        resumed_from = self.done
        stopped_by: Literal["steps", "callback"] = "steps"
        if self.averaging_optimizer is not None:
            # The caller or a checkpoint may have left it in eval mode.
            self.averaging_optimizer.train()
        with self._fused(), _Signals(interrupt=self.checkpoints is not None) as signals:
            self._notify(lambda callback: callback.on_start(self.done, self.options.steps))
            with self._open_loader() as loader:
                try:
                    self._make_steps(loader, self._make_step_function(), signals)
                except BaseException as error:
                    self._save_after(error)
                    if self.changed_batches not in (None, error):  # autograd raises another error
                        raise self.changed_batches from error
                    raise
            if self.stop_requested:
                stopped_by = "callback"
            self._finish()
            signals.end_process()
        result = TrainingResult(
            step=self.done,
            losses=tuple(self.losses),
            seconds=time.perf_counter() - began,
            stopped_by=stopped_by,
            resumed_from=resumed_from,
        )
        self._notify(lambda callback: callback.on_end(result))
        return result

    @contextmanager
    def _fused(self) -> Iterator[None]:
        if self.options.fuse is None:
            yield
            return
        try:
            self.fusion = fuse(self.step.model, self.options.optimizer, when=self.options.fuse)
        except FusionError as error:
            raise ConfigError(f"fuse={self.options.fuse!r}: {error}") from error
        with self.fusion:
            yield

    def _make_steps(
        self, loader: "_Loader", one_step: Callable[..., object], signals: "_Signals"
    ) -> None:
        if self._is_stopping(signals):
            return
        from graphstash._process.session import record_step

        stops_between = self.checkpoints is None and self.parallel.world == 1
        resumed_from = self.done
        while self.done < self.options.steps:
            if self.parallel.world == 1 and (self.stop_requested or signals.received):
                # The position in the data is after the loaded batches. A checkpoint now would lose
                # them, so train on them first.
                loader.stop_loading()
            batches = next(loader, None)
            if batches is None:
                return
            self.taken += 1
            self.in_step = True
            one_step(*batches)
            if self.options.schedule is not None:
                self.options.schedule.step()
            self.done += 1
            self.in_step = False
            if self.done == resumed_from + 1:
                record_step()
            if self.has_step_callbacks:
                self._make_waiting_updates()
            self._notify(lambda callback: callback.on_step(self.done))
            is_boundary = self._is_boundary(self.done)
            if is_boundary:
                self._pass_boundary()
            if (is_boundary or stops_between) and self._is_stopping(signals):
                return

    def _is_stopping(self, signals: "_Signals") -> bool:
        """Return whether a callback or a signal in any process of the job ends the training.

        All processes call this, and stop, after the same step.
        """
        if self.parallel.world > 1:
            requests = self.parallel.gather((self.stop_requested, signals.received))
            self.stop_requested = any(stop for stop, _ in requests)
            signals.received = max(number for _, number in requests)
        return self.stop_requested or signals.received != 0

    def _save_after(self, error: BaseException) -> None:
        """Save a checkpoint after an exception, if a later run can resume from this step."""
        if (
            self.checkpoints is None
            or self.done <= self.saved
            or self.in_step
            or self.parallel.world > 1  # `gather` hangs if the other processes did not fail
            or isinstance(error, DivergedError)
        ):
            return
        with self.data_lock:  # the loading thread must not move the position
            if self.done not in self.positions and self.loaded != self.done:
                return
            try:
                self._save()
                self.checkpoints.wait()
            except Exception as failure:  # noqa: BLE001 - the first exception matters
                error.add_note(f"a checkpoint of step {self.done} could not be written: {failure}")

    def _finish(self) -> None:
        if self.done > self.logged:
            self._read_log()
        if self.checkpoints is not None:
            if self.done > self.saved:
                self._save()
            self.checkpoints.wait()

    def _make_step_function(self) -> Callable[..., object]:
        if self.options.traced:
            return traced_step(self.step, [*self.elements, self.step.log])
        if self.device.type != "xla":
            return self.step
        import torch_xla

        def lazy_step(*batches: Any) -> None:
            self.step(*batches)
            torch_xla.sync()

        return lazy_step

    def _open_loader(self) -> "_Loader":
        self.loaded = self.taken = self.done

        def upload(batches: tuple[Any, ...]) -> tuple[Any, ...]:
            return to_device(batches, self.device)

        ahead = self.options.ahead
        if ahead is None:
            ahead = 0 if self.device.type == "cpu" else 2
        if ahead == 0:
            # Steps and data may share generators, so `_state` takes the position after the step.
            return InlineLoader(self._load_steps(remember=False), upload=upload)
        if self.checkpoints is not None and self.device.type == "cpu":
            _log.warning(
                "with ahead=%d on a CPU, batches are loaded while the model draws from the same "
                "random generators: a run with dropout or similar will not resume exactly; use "
                "ahead=0",
                ahead,
            )
        self.shares_batches = self.device.type == "cpu"
        steps = self._load_steps(remember=self.checkpoints is not None)
        return DeviceLoader(steps, ahead=ahead, upload=upload)

    def _load_steps(self, *, remember: bool) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of each step. With `remember`, record boundaries in `positions`."""
        waiting: list[tuple[int, Tensor, int]] = []  # step, tensor of a batch, and its version
        try:
            while True:
                with self.data_lock:
                    batches: list[Any] = []
                    while len(batches) < self.options.accumulate:
                        batches.append(next(self.position))
                        self.loaded += len(batches) == 1
                        # Inference tensors have no version.
                        tensors = [t for t in tensors_in(batches[-1]) if not t.is_inference()]
                        self._require_unchanged(waiting, tensors)
                        waiting += [(self.loaded, each, each._version) for each in tensors]
                    if remember and self._is_boundary(self.loaded):
                        self.positions[self.loaded] = self._position()
                yield tuple(batches)
                first = self.taken + 1 - self.shares_batches
                waiting = [each for each in waiting if each[0] >= first]
        finally:
            self.position.close()

    def _require_unchanged(
        self, waiting: list[tuple[int, Tensor, int]], tensors: list[Tensor]
    ) -> None:
        """Raise if the data has written into earlier batches that the training still reads.

        The training may write into batches that it has taken. A write into one of these counts as
        the data's only if the data returns the same tensor again.
        """
        again = {*map(id, tensors)} if self.shares_batches else set()
        changed = [(step, each) for step, each, version in waiting if each._version != version]
        if any(step > self.taken or id(each) in again for step, each in changed):
            self.changed_batches = ConfigError(
                "the data writes into the tensors of a batch that it has returned, before the "
                "training has used them: return new tensors for each batch, or use ahead=0 and "
                "accumulate=1"
            )
            raise self.changed_batches

    def _position(self) -> dict[str, Any]:
        return {"data": deepcopy(self.position.state_dict()), "random": host_random_state()}

    def _is_boundary(self, step: int) -> bool:
        return step % self.options.log_every == 0 or self._evaluates(step) or self._saves(step)

    def _evaluates(self, step: int) -> bool:
        options = self.options
        if options.evaluate is None or step == options.steps:
            return options.evaluate is not None
        return options.evaluate_every is not None and step % options.evaluate_every == 0

    def _saves(self, step: int) -> bool:
        last = step == self.options.steps
        return self.checkpoints is not None and (step % self.options.checkpoint_every == 0 or last)

    def _make_waiting_updates(self) -> None:
        if self.fusion is not None:
            self.in_step = True  # an error may leave only some of the updates made
            self.fusion.flush()
            self.in_step = False

    def _pass_boundary(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.check()
        self._read_log()
        if self._evaluates(self.done):
            self._evaluate()
        if self._saves(self.done):
            self._save()
        self.interval_began = time.perf_counter()

    def _read_log(self) -> None:
        self._make_waiting_updates()
        rows = self.step.log.read(self.done - self.logged)
        seconds = time.perf_counter() - self.interval_began
        self.divergence.check(self.logged + 1, rows)
        self.logged = self.done
        entry = LogEntry(
            step=self.done,
            losses=tuple(row["loss"] for row in rows),
            learning_rates=tuple(
                float(group["lr"]) for group in self.options.optimizer.param_groups
            ),
            steps_per_second=len(rows) / seconds,
            loss_scale=rows[-1].get("loss_scale"),
            skipped=sum(row.get("found_inf", 0.0) != 0 for row in rows),
            gradient_norm=rows[-1].get("gradient_norm"),
            metrics={name: tuple(row[name] for row in rows) for name in self.options.metrics},
            reduced=self.options.reduce.scalars() if self.options.reduce is not None else {},
        )
        self.losses += entry.losses
        self._notify(lambda callback: callback.on_log(entry))

    def _evaluate(self) -> None:
        evaluate = self.options.evaluate
        if evaluate is None:
            return
        modes = [(module, module.training) for module in self.options.model.modules()]
        # Random numbers of the evaluation must change neither the training nor the loaded data.
        with self.data_lock, self._averaged():
            generators = random_state(self.device)
            self.options.model.eval()
            try:
                with torch.no_grad():
                    metrics = dict(evaluate(self.options.model) or {})
            finally:
                set_random_state(generators, self.device)
                for module, mode in modes:
                    module.training = mode
        self._notify(lambda callback: callback.on_evaluation(self.done, metrics))

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Put the averages of a Schedule-Free optimizer into the model. Block checkpoints."""
        if self.averaging_optimizer is None:
            yield
            return
        self.in_step = True
        try:
            self.averaging_optimizer.eval()
            yield
        finally:
            self.averaging_optimizer.train()
            self.in_step = False

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        state = self._state()
        for step in [step for step in list(self.positions) if step <= self.done]:
            del self.positions[step]
        if self.parallel.is_first:
            self.checkpoints.save(self.done, state)
        self.saved = self.done
        directory = self.checkpoints.directory
        self._notify(lambda callback: callback.on_checkpoint(self.done, directory))

    def _state(self) -> dict[str, Any]:
        """Return everything that determines the following steps."""
        # Without a recorded position, all loaded batches were trained on.
        position = self.positions.get(self.done) or self._position()
        return {
            **describe_run(self.options),
            "model": gather_shards(self.options.model.state_dict()),
            "optimizer": gather_shards(self.options.optimizer.state_dict()),
            "schedule": schedule_state(self.options.schedule),
            "loss_scale": state_of(self.options.loss_scale),
            "stateful": {name: state_of(part) for name, part in self.options.stateful.items()},
            "reduce": state_of(self.options.reduce),
            # One entry per process.
            "random": self.parallel.gather(
                random_state(self.device)
                | position["random"]
                | {"own": states_of(self._own_generators())}
            ),
            "data": self.parallel.gather(position["data"]),
        }

    def _notify(self, event: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            try:
                event(callback)
            except StopTraining:
                self.stop_requested = True


_Loader = DeviceLoader[tuple[Any, ...]] | InlineLoader[tuple[Any, ...]]


class _Signals:
    """Records SIGTERM, and SIGINT if `interrupt`, so that the loop can end with a checkpoint.

    A second SIGINT raises KeyboardInterrupt. Does nothing outside the main thread, and keeps a
    SIGINT handler that is not Python's.
    """

    def __init__(self, *, interrupt: bool) -> None:
        self.received = 0  # number of the signal
        self._interrupt = interrupt
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._receive)
            if self._interrupt and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def end_process(self) -> None:
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received:
            raise SystemExit(128 + self.received)

    def _receive(self, number: int, _: object) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _with_parameters_of(
    make: Callable[_P, Options],
) -> Callable[[Callable[[Options], _R]], Callable[_P, _R]]:
    """Let a function of `Options` take the arguments of `make`, which makes the options."""

    def decorate(function: Callable[[Options], _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return function(make(*args, **kwargs))

        vars(call)["__signature__"] = inspect.signature(make).replace(
            return_annotation=function.__annotations__["return"]
        )
        return call

    return decorate


@_with_parameters_of(Options)
def train(options: Options) -> TrainingResult:  # noqa: D417 - documents the fields of Options
    """Train a model for `steps` steps, or resume a run that has made some of them.

    Args:
        model: on its device. All processes of a job start with the same model.
        optimizer: an optimizer of the model's parameters. Optimizers of this package never read the
            device, others may. A loss scale requires one of this package.
        data: batches: a DataLoader, `Batches`, or any iterable that gives one epoch per iteration.
            `train` iterates over it again until all steps are made. With `ahead` or `accumulate`,
            it must not write into batches that it has returned.
        steps: total number of steps, including those of the resumed run.
        loss: `loss(model, batch)` returns the mean loss of a batch, or a mapping or object with it
            as `loss`. Default: the model computes it, `model(*batch)` or `model(**batch)`.
        precision: "bf16" and "fp16" compute in torch.autocast; "fp16" with a dynamic loss scale.
        loss_scale: scale of the loss, which also skips steps with non-finite gradients. Default:
            `LossScale()` with "fp16", otherwise none.
        clip_norm: limit of the global norm of the gradients.
        clip_value: limit of each element of the gradients.
        accumulate: number of batches of `data` per step; all in one graph.
        schedule: stepped after every step.
        traced: run the whole step as one graph; see `traced_step` for its requirements.
        fuse: update parameters inside backward or right before the next forward; see `fuse`. All
            updates are made before callbacks, evaluations and checkpoints: if a callback has
            `on_step`, "forward" means at the end of the step. A resumed run may use another value.
        reduce: how processes of torch.distributed sum gradients that are mostly zero; see
            `graphstash.training.reduce`.
        ahead: steps whose batches threads load and upload in advance. Default: 2, or 0 on a CPU
            without torch_xla, where model and data draw from the same random generator. There,
            a run with dropout resumes exactly only with 0.
        log_every: maximum steps between two logging boundaries. Each evaluation and checkpoint is
            at a boundary.
        metrics: names of further numbers in the result of `loss`, logged with it.
        evaluate: `evaluate(model)` returns metrics; called in `eval()` mode without gradients. If
            the optimizer has `eval()` and `train()`, the model then contains its averages.
        evaluate_every: steps between two evaluations. Step `steps` is always followed by one.
        checkpoints: directory of the checkpoints. Training resumes from the newest one, if any.
            SIGTERM and Ctrl-C write another after the steps of the loaded batches or, with several
            processes, at the next logging boundary. Then SIGTERM ends the process with status 143,
            and Ctrl-C raises KeyboardInterrupt. A second Ctrl-C interrupts at once.
        checkpoint_every: steps between two checkpoints. One always follows the last step.
        keep: number of checkpoints to keep.
        stateful: by name, further objects to save in checkpoints, such as averaged parameters.
        callbacks: see `Callback`.
        progress: show progress on standard error.
        job: name of the job, as in `graphstash run --job`. Downloads the artifacts of its earlier
            runs in advance if a graphstash server is configured.

    Raises:
        ConfigError: an argument is out of its range, or two arguments conflict.
        DivergedError: the loss or the gradients stay infinite or NaN.
    """
    if options.job is not None:
        from graphstash._process.session import install

        if (session := install()) is not None:
            session.name_job(options.job)
    parallel = Parallel.current(options.device)
    if isinstance(options.data, Batches) and options.data.world != parallel.world:
        raise ConfigError(
            f"the batches are for {options.data.world} processes, but {parallel.world} train; give "
            "Batches their rank and world"
        )
    options.optimizer.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        shown: list[Callback] = []
        if options.progress and parallel.is_first:
            bar = Progress()
            stack.callback(bar.close)
            shown.append(bar)
        run = _Run(options, parallel, (*shown, *options.callbacks))
        if parallel.world > 1:  # it reads the loss scale on the device
            parallel.require_same(common_arguments(options))
        if options.checkpoints is not None:
            run.checkpoints = stack.enter_context(
                Checkpoints(options.checkpoints, keep=options.keep)
            )
            run.resume()
        return run.train()
