"""End with one line if this host has no accelerator of a kind: `gpu` (of NVIDIA) or `tpu`."""

import sys


def lack_of(kind: str) -> str:
    """Return why the tests on a device cannot run here, or an empty string."""
    if kind == "gpu":
        import torch

        is_there = torch.cuda.is_available() and torch.version.hip is None
        return "" if is_there else f"torch {torch.__version__} finds no GPU of NVIDIA here"
    from jax._src import hardware_utils  # reads PCI; starts nothing

    count, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return "" if count else "this host has no chip of a TPU"


if __name__ == "__main__" and (lack := lack_of(sys.argv[1])):
    sys.exit(f"make test-{sys.argv[1]}: {lack}")
