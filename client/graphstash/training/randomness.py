"""Random generators: their state, to go on with the same numbers after a restart.

Nothing here reads a device: the generators of CUDA and torch_xla have their state on the host. That
of torch_xla begins anew with every step, from a seed of its own; it is complete where nothing was
drawn since the last `torch_xla.sync()`.
"""

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["host_random_state", "random_state", "set_random_state"]


def random_state(device: torch.device | str) -> dict[str, Any]:
    """The state of all generators that training may draw from, of plain types.

    Those of the host, those of all CUDA devices that this process sees, if it uses any of them,
    and on torch_xla that of `device`. Call it where a step has ended.
    """
    state = host_random_state()
    device = torch.device(device)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        state["torch_xla"] = xm.get_rng_state(str(device))
    return state


def host_random_state() -> dict[str, Any]:
    """The state of the generators that data is drawn with: Python's, torch's, and NumPy's."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words), gauss),
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = _map(
            numpy.random.get_state(legacy=False),
            numpy.ndarray,
            lambda a: torch.from_numpy(a.copy()),
        )
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Brings the generators that `state` knows back to it.

    Args:
        state: of `random_state`, or of `host_random_state`.
        device: whose torch_xla generator is meant; it may have another number than it had.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(  # noqa: NPY002 - the user draws from it, not we
            _map(state["numpy"], torch.Tensor, lambda tensor: tensor.numpy())
        )
    device = torch.device(device)
    if "cuda" in state and torch.cuda.is_available():
        for number, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, number)
    if "torch_xla" in state and device.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(state["torch_xla"], str(device))


def _map(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A copy of nested dictionaries with `function` applied to whatever is of a kind."""
    if isinstance(value, dict):
        return {key: _map(part, kind, function) for key, part in value.items()}
    return function(value) if isinstance(value, kind) else value
