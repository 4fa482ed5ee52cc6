"""Dynamic communication thresholding: small blocks wait until they have grown.

After Gupta et al., "Training Recommender Models at Scale: Communication-Efficient Model and Data
Parallelism" (KDD 2021, arXiv 2010.08899), which drops elements; here it is blocks, for blocks are
what is sent. What is not sent is kept and added to the next gradient (error feedback), so nothing
is lost but in steps that the optimizer skips; it comes late, though: training is no longer what it
would be without. A gradient that is zero releases nothing: its parameter may not have been used,
and then DDP throws the sum away.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from graphstash.training.reduce.blocks import BlockView

__all__ = ["Thresholding"]


class Thresholding:
    """Holds back the blocks of each gradient whose norm is below the gradient's threshold.

    Not for gradients that are multiplied with a changing loss scale: what waits has the old one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keep: float = 0.1,
        refresh_every: int = 100,
        largest_error: float = 0.5,
    ) -> None:
        """Takes what is held back.

        Args:
            model: whose gradients these are; a checkpoint knows them by their parameters' names.
            keep: share of a gradient's blocks, of those that are not zero, that the threshold lets
                pass when it is refreshed.
            refresh_every: steps after which a gradient gets a new threshold.
            largest_error: what waits has at most this share of the gradient's norm, 0 to 1;
                where more would wait, all of the gradient is sent.

        Raises:
            ValueError: when one is out of its range.
        """
        if not 0 < keep <= 1:
            raise ValueError(f"keep={keep}: take a share of the blocks above 0 and up to 1")
        if refresh_every < 1:
            raise ValueError(f"refresh_every={refresh_every}: take 1 step or more")
        if not 0 <= largest_error <= 1:
            raise ValueError(f"largest_error={largest_error}: take a share from 0 to 1")
        self._keep = keep
        self._refresh_every = refresh_every
        self._largest_error = largest_error
        self._names: dict[Tensor, str] = {each: name for name, each in model.named_parameters()}
        self._steps: dict[str, int] = {}
        self._thresholds: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}

    def __str__(self) -> str:
        """What all ranks have to agree on."""
        return f"keep {self._keep:g} every {self._refresh_every}, {self._largest_error:g} at most"

    def hold_back_(self, parameter: Tensor, gradient: Tensor, *, block_size: int) -> None:
        """Adds what waited to a gradient, and leaves zeros in it for what waits now; reads nothing.

        A block with NaN or infinity never waits.

        Args:
            parameter: of the model.
            gradient: flat and contiguous, of a floating-point type; changed in place.
            block_size: elements of a block.
        """
        key = self._name_of(parameter)
        if not len(gradient):
            return
        if key not in self._held:
            self._held[key] = torch.zeros_like(gradient)
            self._thresholds[key] = gradient.new_zeros((), dtype=torch.float32)
        held = self._held[key]
        blocks = BlockView(gradient, block_size)
        is_used = blocks.nonzero().any()
        gradient.addcmul_(held, is_used.to(held.dtype))  # what waits is finite
        norms = blocks.norms()
        finite = norms.masked_fill(~norms.isfinite(), 0)
        step = self._steps.get(key, 0)
        self._steps[key] = step + 1
        if step % self._refresh_every == 0:
            passing = (self._keep * finite.count_nonzero()).ceil().long().clamp(min=1)
            new = finite.sort(descending=True).values[passing - 1]
            self._thresholds[key] = torch.where(is_used, new, self._thresholds[key]).to(norms.dtype)
        waits = norms < self._thresholds[key]  # false for NaN
        waiting = norms.masked_fill(~waits, 0).norm()
        waits &= waiting <= self._largest_error * finite.norm()
        torch.where(is_used, gradient, held, out=held)
        BlockView(held, block_size).zero_(is_used & ~waits)
        blocks.zero_(waits)

    def waiting(self, parameter: Tensor) -> Tensor:
        """What is held back of a parameter's gradient, flat."""
        held = self._held.get(self._name_of(parameter))
        return parameter.new_zeros(parameter.numel()) if held is None else held

    def _name_of(self, parameter: Tensor) -> str:
        name = self._names.get(parameter)
        if name is None:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is not of the model that this "
                "Thresholding was made for: make one for each model, before DDP wraps it"
            )
        return name

    def state_dict(self, group: distributed.ProcessGroup) -> dict[str, Any]:
        """What waits and what is known, for a checkpoint. Of what waits it is the mean over the
        ranks, so that every rank calls this, and any number of ranks can go on with it.
        """
        world = distributed.get_world_size(group)
        held = {key: value / world for key, value in sorted(self._held.items())}
        for value in held.values():
            distributed.all_reduce(value, group=group)
        return {"held": held, "thresholds": dict(self._thresholds), "steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint.

        Raises:
            ValueError: it is another model's.
        """
        parameters = {name: each for each, name in self._names.items()}
        for name, value in state["held"].items():
            found = parameters[name].numel() if name in parameters else "no such parameter"
            if value.numel() != found:
                raise ValueError(
                    f"the checkpoint holds back {value.numel()} elements of {name!r}, and this "
                    f"model has {found}: load one of the same model"
                )
        self._held = {
            name: value.to(parameters[name].device, copy=True)
            for name, value in state["held"].items()
        }
        self._thresholds = {
            name: value.to(parameters[name].device) for name, value in state["thresholds"].items()
        }
        self._steps = dict(state["steps"])
