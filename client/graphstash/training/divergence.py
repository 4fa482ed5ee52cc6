"""Divergence: tells a run that is lost from one that stumbles.

With a dynamic loss scale single bad steps are normal: they are left out and the scale shrinks. A
loss that stays infinite or NaN is not, and neither are gradients that stay so at any scale; such a
run would go on for ever and train nothing.
"""

import math
from collections.abc import Mapping, Sequence

from graphstash.training.events import DivergedError

__all__ = ["Divergence"]

_PATIENCE = 3
"""So many steps in a row with a bad loss are no accident. Without a loss scale one is enough: its
gradients have already been applied."""

_LEAST_SCALE = 2.0**-10
"""Below this a scale is not what makes gradients overflow."""


class Divergence:
    """Looks at the rows of a `DeviceLog` at each boundary."""

    def __init__(self) -> None:
        self._bad_loss_since: int | None = None
        self._skipping_since: int | None = None

    def look(self, first_step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Takes in the rows of steps `first_step`, `first_step + 1`, ...

        Raises:
            DivergedError: training is lost; the message names step, loss and scale.
        """
        for step, row in enumerate(rows, first_step):
            if math.isfinite(row["loss"]):
                self._bad_loss_since = None
            elif self._bad_loss_since is None:
                self._bad_loss_since = step
            if not row.get("found_inf"):
                self._skipping_since = None
            elif self._skipping_since is None:
                self._skipping_since = step
        step, row = first_step + len(rows) - 1, rows[-1]
        scale = row.get("loss_scale")
        scaled = "" if scale is None else f", loss scale {scale:g}"
        if self._bad_loss_since is not None:
            count = step - self._bad_loss_since + 1
            if scale is None or count >= _PATIENCE:
                raise DivergedError(
                    f"the loss is {row['loss']} in step {step} and has not been finite since step "
                    f"{self._bad_loss_since}{scaled}; lower the learning rate, clip the gradients "
                    "(clip_norm), or look at the batch of that step"
                )
        elif self._skipping_since is not None and scale is not None and scale < _LEAST_SCALE:
            raise DivergedError(
                f"step {step}: gradients are infinite or NaN at any loss scale, and no step has "
                f"counted since step {self._skipping_since}{scaled}; look for a division by zero "
                "or the like in the model's backward pass, or train in bf16"
            )
