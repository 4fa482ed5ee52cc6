"""Traced step: a whole training step that is traced once and then runs as one graph.

    step = traced_step(train_step, state=[model, optimizer, loss_scale])
    for batch in data:
        loss = step(*batch)

`train_step(*batch)` is forward, backward and optimizer; it reads nothing from the device. In a lazy
step, the host mostly records the same operations as in the step before. On torch_xla, the traced
step records two real steps, and checks that they are the same graph over the same arguments. From
then on it runs that graph: one execution, no compile, and no Python of the step.

Rules for `train_step`:

* Everything that changes from step to step must be a tensor in `state` or in the batch, or the
  random seed. A traced step detects and refuses a Python number that changes with every step. On
  CUDA it does so only in a job of one process, only above the noise of the kernels, and by making
  one step three times.
* On CUDA, the comparison searches closures, attributes, containers and named globals for tensors
  outside of `state` that the step changes (a running loss, a queue, an average). It restores and
  compares these tensors as it does the state. A graph cannot repeat some changes, such as `self.sum
  = self.sum + loss`; the step then runs without a graph, so write in place. The search misses
  tensors in local variables of other frames, generators, slots and C++ objects, replaced attributes
  of a class, and writes through `.data` or NumPy. The comparison changes these tensors three times,
  so put them into `state`.
* A Python number that changes rarely is detected if it is an option of an optimizer, `training` or
  `requires_grad` of a module, or part of the batch. So are other tensors in a place of the state,
  and other values of its tensors on the host: the step is then recorded again. Call `retrace()`
  after any other change. Otherwise a graph keeps the old number, or the old tensor from outside of
  `state` and the batch.
* Hooks may be registered and removed between steps. On a CPU, the step runs uncompiled while a
  module has hooks and had none at the compilation, or the reverse, and while other weights are tied
  than then: torch.compile notices neither. `retrace()` compiles for the present hooks and ties.
* A graph repeats no other effect of the Python code, such as a counter.
* Results have no autograd graph. A batch must be on the device; `train_step` must not change it.
* Between steps, everything may be read and changed as usual. On torch_xla, a traced step does not
  update views of the state, except `detach()`, `.data` and `state_dict()`.

A step that cannot be traced runs as usual, with a warning that says why.

    state       what a step changes, and what changes between steps
    step        what all implementations share
    xla         torch_xla: when to record, to refuse, and to run the frozen step
    referents   whether the state still has the objects of a recording
    recorder    one recorded step as a graph, and whether two are the same
    bindings    the functions of torch_xla that this needs
    torch_graph plain torch: torch.compile, CUDA graphs
    capture     capture a CUDA graph, and restore torch's state after a failed capture
    comparison  whether a CUDA graph makes the step of the function
    outside     tensors that a step changes outside of its state
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from graphstash.training.device import donates
from graphstash.training.traced.state import State, StateElement
from graphstash.training.traced.step import TracedStep

__all__ = ["TracedStep", "traced_step"]

R = TypeVar("R")


def traced_step(
    function: Callable[..., R], state: Sequence[StateElement], *, donate: bool | None = None
) -> TracedStep[R]:
    """Return a training step that traces `function`, and then runs it as a graph.

    Args:
        function: One whole training step. Returns a tensor, or tuples, lists and dictionaries of
            tensors, None and Python constants.
        state: Everything that the step changes, or that changes between steps: modules, optimizers,
            objects with `device_tensors()` and `refresh()`, tensors. All on one device.
        donate: Whether a graph of torch_xla overwrites old state, which needs less memory. Default:
            only if the device is not a CPU, where donation is slower.

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
    from graphstash.training.traced.torch_graph import CudaGraphStep, TorchStep

    if tensors[0].device.type == "cuda":
        return CudaGraphStep(function, elements, device=tensors[0].device)
    return TorchStep(function, elements)
