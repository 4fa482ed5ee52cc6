"""Dynamic communication thresholding: hold back small blocks until they have grown.

After Gupta et al., "Training Recommender Models at Scale: Communication-Efficient Model and Data
Parallelism" (KDD 2021, arXiv 2010.08899). The paper selects single elements; this module selects
blocks, the unit of sending. It adds held-back blocks to the next gradient (error feedback). Values
arrive late, so training gives other results than without thresholding. If the optimizer skips a
step, the values sent in this step are lost.

An all-zero gradient releases no held-back values: DDP discards the sum if no rank used the
parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from graphstash.training.lent import Lent
from graphstash.training.reduce.blocks import BlockView

__all__ = ["Thresholding"]


class Thresholding:
    """Holds back each block whose norm is below the threshold of its gradient.

    Do not use it with a dynamic loss scale: held-back values keep the scale of their step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keep: float = 0.1,
        refresh_every: int = 100,
        largest_error: float = 0.5,
    ) -> None:
        """Choose how much to hold back.

        Args:
            model: The model whose gradients are sent. Checkpoints use its parameter names.
            keep: Share of a gradient's nonzero blocks that a new threshold lets pass, above 0 and
                up to 1.
            refresh_every: Steps after which a gradient's threshold is computed again, 1 or more.
            largest_error: Maximum norm of the held-back blocks, as a share of the gradient's norm,
                0 to 1. Above it, the whole gradient is sent.

        Raises:
            ValueError: an argument is out of its range.
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
        self._block_sizes: dict[str, int] = {}
        self._held: dict[str, Tensor] = {}

    def __str__(self) -> str:
        """Return the settings, which must be equal on all ranks."""
        return f"keep {self._keep:g} every {self._refresh_every}, {self._largest_error:g} at most"

    def hold_back_(self, parameter: Tensor, gradient: Tensor, *, block_size: int) -> None:
        """Add the held-back values to a gradient, then hold back its small blocks and zero them.

        Reads nothing from the device. Blocks with NaN or infinity are always sent.

        Args:
            parameter: A parameter of the model.
            gradient: Its flat, contiguous, floating-point gradient; changed in place.
            block_size: Elements of a block.
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
        gradient.addcmul_(held, is_used.to(held.dtype))  # held is finite, so 0 * held is 0
        norms = blocks.norms()
        finite = norms.masked_fill(~norms.isfinite(), 0)
        step = self._steps.get(key, 0)
        self._steps[key] = step + 1
        is_stale = self._block_sizes.get(key) != block_size  # also of an earlier release
        self._block_sizes[key] = block_size
        if is_stale or step % self._refresh_every == 0:
            passing = (self._keep * finite.count_nonzero()).ceil().long().clamp(min=1)
            new = finite.sort(descending=True).values[passing - 1]
            self._thresholds[key] = torch.where(is_used, new, self._thresholds[key]).to(norms.dtype)
        waits = norms < self._thresholds[key]  # False for NaN
        waiting = norms.masked_fill(~waits, 0).norm()
        waits &= waiting <= self._largest_error * finite.norm()
        torch.where(is_used, gradient, held, out=held)
        BlockView(held, block_size).zero_(is_used & ~waits)
        blocks.zero_(waits)

    def waiting(self, parameter: Tensor) -> Tensor:
        """Return the held-back values of a parameter's gradient as a flat tensor."""
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
        """Return the held-back values, thresholds and step counts, for a checkpoint.

        A collective call. The held-back values are the mean over all ranks, so any number of ranks
        can load them.
        """
        world = distributed.get_world_size(group)
        held = {key: value / world for key, value in sorted(self._held.items())}
        for value in held.values():
            with Lent(value):
                distributed.all_reduce(value, group=group)
        return {
            "held": held,
            "thresholds": dict(self._thresholds),
            "block_sizes": dict(self._block_sizes),
            "steps": dict(self._steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Raises:
            ValueError: the checkpoint is of another model.
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
        self._block_sizes = dict(state.get("block_sizes", {}))
        self._steps = dict(state["steps"])
