"""Traced step: a whole training step that is traced once and then runs as one graph.

    step = traced_step(train_step, state=[model, optimizer, loss_scale])
    for batch in data:
        loss = step(*batch)

`train_step(*batch)` is forward, backward and optimizer; it reads nothing from the device. In a lazy
step most of the host's time goes into recording again what was recorded the step before. The traced
step records a few real steps, makes sure that they are the same graph over the same arguments, and
from then on runs that graph: no Python of the step, one execution, no compile.

What that means for `train_step`:

* Everything that changes from step to step is a tensor: in `state`, in the batch, or the random
  seed. A Python number that changes with every step is noticed, named, and refused. One that
  changes rarely is noticed if it is an option of an optimizer, `training` or `requires_grad` of a
  module, or part of the batch. Any other, and a tensor that is neither in `state` nor in the batch,
  keeps the value that it had, and other effects of the Python code, such as a counter, do not
  happen: call `retrace()`.
* Results come without their autograd graph. A batch is on the device, and is not changed.
* Between steps everything may be read and changed as usual. Views of the state other than
  `detach()`, `.data` and `state_dict()` keep the value they had.

What cannot be frozen runs lazily, with a warning that says why: results are always correct.

    step        the state of a step, and what every form has in common
    xla         torch_xla: when to record, to refuse, and to run the frozen step
    recorder    one recorded step as a graph, and whether two are the same
    bindings    torch_xla's functions behind it
    torch_graph plain torch: torch.compile, CUDA graphs
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from graphstash.training.device import donates
from graphstash.training.traced.step import State, StateElement, TracedStep

__all__ = ["TracedStep", "traced_step"]

R = TypeVar("R")


def traced_step(
    function: Callable[..., R], state: Sequence[StateElement], *, donate: bool | None = None
) -> TracedStep[R]:
    """Makes a training step that is traced once.

    Args:
        function: one whole training step; gives a tensor, or tuples, lists and dictionaries of
            tensors, None and Python constants.
        state: everything that the step changes, or that changes between steps: modules, optimizers,
            objects with `device_tensors()` and `refresh()`, tensors. All on one device.
        donate: let the graph write new state over the old, so that none of it exists twice. None:
            yes, but not on a CPU, where that is slower.

    Raises:
        ValueError: the state has no tensor.
        TypeError: an element of the state is none of these.
    """
    elements = State(state)
    tensors = elements.tensors()
    if not tensors:
        raise ValueError("the state has no tensor; it must have at least the model's parameters")
    if tensors[0].device.type == "xla":
        from graphstash.training.traced.xla import XlaStep

        donating = donates() if donate is None else donate
        return XlaStep(function, elements, device=tensors[0].device, donate=donating)
    from graphstash.training.traced.torch_graph import plain_torch_step

    return plain_torch_step(function, elements, device=tensors[0].device)
