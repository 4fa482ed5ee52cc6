"""A train step to compile ahead of time. The script does not use graphstash."""

# mypy: disallow-untyped-calls=False
# JAX is partly typed.

import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


def loss_of(parameters: Any, x: Any, y: Any) -> Any:
    first, second = parameters
    return ((jnp.tanh(x @ first) @ second - y) ** 2).mean()


@jax.jit
def step(parameters: Any, x: Any, y: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
    return [p - 0.1 * g for p, g in zip(parameters, gradients, strict=True)], loss


def abstract_step(devices: Any, *, width: int = 256) -> Any:
    """Return the step with data on all devices and the same parameters on each device."""
    mesh = jax.sharding.Mesh(devices, ("data",))

    def abstract(shape: tuple[int, ...], *axes: str) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    parameters = [abstract((128, width)), abstract((width, 128))]
    return step, (parameters, abstract((64, 128), "data"), abstract((64, 128), "data"))


def wider_step(devices: Any) -> Any:
    return abstract_step(devices, width=512)


def waiting_step(devices: Any) -> Any:
    """Return another step when the file `go on` is in the folder FARM_FOLDER. Each call adds the
    number of its process to the file `waiting` there.
    """
    folder = Path(os.environ["FARM_FOLDER"])
    with (folder / "waiting").open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not (folder / "go on").exists():
        time.sleep(0.01)
    return abstract_step(devices, width=640)


def nothing(_: Any) -> Any:
    """Return a program for this host instead of the topology."""
    return step, ([jnp.ones((4, 4)), jnp.ones((4, 4))], jnp.ones((4, 4)), jnp.ones((4, 4)))


def a_string(devices: Any) -> str:
    return f"{len(devices)} devices"
