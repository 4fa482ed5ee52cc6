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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from graphstash._errors import ConfigError
from graphstash.training.batches import Batches
from graphstash.training.checkpoint import Checkpoints
from graphstash.training.data import Position
from graphstash.training.events import Callback, TrainingResult
from graphstash.training.loss_scale import LossScale
from graphstash.training.parallel import Parallel
from graphstash.training.progress import Progress
from graphstash.training.run import Run
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
        from graphstash_schema import InvalidValueError

        if (session := install()) is not None:
            try:
                session.name_job(job)
            except InvalidValueError as error:
                raise ConfigError(f"job: {error}") from None
    if loss_scale is None and precision == "fp16":
        loss_scale = LossScale()
    if loss_scale is not None and "found_inf" not in inspect.signature(optimizer.step).parameters:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot leave out a step whose gradients are not finite; "
            "with a loss scale, use one of graphstash.training's optimizers"
        )
    device = next(model.parameters()).device
    parallel = Parallel.current(device)
    _require_fitting(data, schedule, parallel)
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
        log_rows=min(log_every, steps),
    )
    if ahead is None:
        ahead = 0 if device.type == "cpu" else 2
    with ExitStack() as stack:
        shown: list[Callback] = []
        if progress and parallel.is_first:
            bar = Progress()
            stack.callback(bar.close)
            shown.append(bar)
        run = Run(
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


def _require_fitting(data: object, schedule: object, parallel: Parallel) -> None:
    if isinstance(data, Batches) and data.world != parallel.world:
        raise ConfigError(
            f"the batches are for {data.world} processes, and {parallel.world} train: give Batches "
            "their rank and world"
        )
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau wants a metric at every step, which the host does not have: step it "
            "in a callback's on_evaluation, or give another schedule"
        )


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
