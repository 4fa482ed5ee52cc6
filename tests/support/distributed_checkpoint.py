"""A model and its optimizer, saved and loaded as torch.distributed.checkpoint says, in one process.

`options` None: the optimizer's state nested by parameters; FLAT: one flat dictionary.
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

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None, folder: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch itself
        state_dict_saver.save(_state(model, optimizer, options), checkpoint_id=folder, no_dist=True)


def load(
    model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None, folder: Path
) -> None:
    state = _state(model, optimizer, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch itself
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"], options=options)


def _state(
    model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None
) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
