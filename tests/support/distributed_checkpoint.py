"""A model and its optimizer, saved and loaded as torch.distributed.checkpoint says, in one process.

The state of the optimizer is one flat dictionary, or nested by parameters.
"""

import warnings
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer


def save(model: nn.Module, optimizer: Optimizer, folder: Path, *, is_flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch itself
        state_dict_saver.save(_state(model, optimizer, options), checkpoint_id=folder, no_dist=True)


def load(model: nn.Module, optimizer: Optimizer, folder: Path, *, is_flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = _state(model, optimizer, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch itself
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"], options=options)


def _state(model: nn.Module, optimizer: Optimizer, options: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
