"""Traced step: a whole training step that is traced once and then runs as one graph.

    step = traced_step(train_step, state=[model, optimizer, loss_scale])
    for batch in data:
        loss = step(*batch)

`train_step(*batch)` is forward, backward and optimizer; it reads nothing from the device. In a lazy
step, the host spends most of its time recording the same operations as in the step before. The
traced step records a few real steps, and checks that they are the same graph over the same
arguments. From then on it runs that graph: one execution, no compile, and no Python of the step.

Rules for `train_step`:

* Everything that changes from step to step must be a tensor: in `state`, in the batch, or the
  random seed. A Python number that changes with every step is detected, named, and refused.
* A Python number that changes rarely is detected if it is an option of an optimizer, `training` or
  `requires_grad` of a module, or part of the batch. Any other number keeps its old value, and so
  does a tensor outside of `state` and the batch. Other effects of the Python code, such as a
  counter, do not happen. Call `retrace()` after such a change.
* Results come without their autograd graph. A batch must be on the device and stay unchanged.
* Between steps, everything may be read and changed as usual. Views of the state other than
  `detach()`, `.data` and `state_dict()` keep their old values.

A step that cannot be frozen runs lazily, with a warning that says why. Results are always correct.

    step        the state of a step, and what all implementations share
    xla         torch_xla: when to record, to refuse, and to run the frozen step
    recorder    one recorded step as a graph, and whether two are the same
    bindings    the functions of torch_xla that this needs
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
    """Return a training step that is traced once.

    Args:
        function: One whole training step. Returns a tensor, or tuples, lists and dictionaries of
            tensors, None and Python constants.
        state: Everything that the step changes, or that changes between steps: modules, optimizers,
            objects with `device_tensors()` and `refresh()`, tensors. All on one device.
        donate: Let the graph overwrite old state, so that it is in memory only once. None: True,
            except on a CPU, where donation is slower.

    Raises:
        ValueError: the state has no tensor.
        TypeError: an element of the state has another type.
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
