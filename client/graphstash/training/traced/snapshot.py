"""Snapshot: the state before an attempt that may fail halfway through a step."""

import torch

from graphstash.training.device_state import State

__all__ = ["Snapshot"]


class Snapshot:
    """Copies a state with its gradients and the CPU's random state; for as long as the attempt."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._values = [(tensor, tensor.detach().clone()) for tensor in state.tensors()]
        self._grads = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in state.parameters
        ]
        self._optimizers = [
            (optimizer, {parameter: dict(of) for parameter, of in optimizer.state.items()})
            for optimizer in state.optimizers
        ]
        self._random = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; tensors stay the same objects, new optimizer state is dropped."""
        for tensor, value in self._values:
            tensor.copy_(value)
        for parameter, gradient, before in self._grads:
            if gradient is not None and before is not None:
                gradient.copy_(before)
            parameter.grad = gradient
        for optimizer, states in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(states)
        torch.set_rng_state(self._random)
