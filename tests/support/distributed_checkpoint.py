"""Save and load a model and its optimizers with torch.distributed.checkpoint in one process.

The state of the optimizers is one flat dictionary, or nested by parameters.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

Optimizers = Optimizer | Iterable[Optimizer]


def save(model: nn.Module, optimizers: Optimizers, folder: Path, *, is_flat: bool) -> None:
    state = _state(model, optimizers, StateDictOptions(flatten_optimizer_state_dict=is_flat))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own code
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)


def load(
    model: nn.Module,
    optimizers: Optimizers,
    folder: Path,
    *,
    is_flat: bool,
    is_partial: bool = False,
) -> None:
    """Load a checkpoint. If `is_partial`, it may lack some options of the optimizers."""
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = _state(model, optimizers, options)
    planner = DefaultLoadPlanner(allow_partial_load=is_partial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own code
        state_dict_loader.load(state, checkpoint_id=folder, planner=planner, no_dist=True)
    set_model_state_dict(model, state["model"])
    given = state["optimizer"]
    set_optimizer_state_dict(model, optimizers, optim_state_dict=given, options=options)


def _state(model: nn.Module, optimizers: Optimizers, options: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers, options=options),
    }
