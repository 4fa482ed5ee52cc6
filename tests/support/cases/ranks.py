"""Shared code of cases in several processes: the loop that runs them, and checks of all ranks.

Every process has joined a gloo group when a case begins. A case that fails raises.
"""

import hashlib
import importlib
import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed


def serve(*, address: str, store: str, rank: int, world: int) -> NoReturn:
    """Run the cases that `support.warm_ranks.WarmRanks` requests, in turn.

    The process ends with `os._exit`, because `destroy_process_group` may deadlock: it may hold the
    interpreter lock while it waits for a thread that needs the lock (torch 2.7).
    """
    distributed.init_process_group(
        "gloo",
        init_method=Path(store).as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),  # it ends what hangs; a loaded machine delays ranks
    )
    torch.manual_seed(0)
    with Client(address, family="AF_UNIX") as pipe:
        pipe.send_bytes(json.dumps(rank).encode())
        while request := json.loads(pipe.recv_bytes()):
            pipe.send_bytes(json.dumps(_answer(**request)).encode())
        distributed.monitored_barrier()  # the first rank hosts the store
    os._exit(0)


def _answer(*, case: str, keywords: dict[str, Any]) -> dict[str, Any]:
    module, _, function = case.partition(":")
    try:
        run = getattr(importlib.import_module(f"support.cases.{module}"), function)
        return {"value": run(**keywords)}
    except BaseException:
        return {"error": traceback.format_exc()}


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def assert_same_bits(name: str, *tensors: Tensor) -> None:
    """Require that all tensors of all ranks have the same bits."""
    digests = [
        hashlib.sha256(each.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for each in tensors
    ]
    assert len({each for of_rank in gathered(digests) for each in of_rank}) == 1, name


def error_of(work: Callable[[], object]) -> str:
    """Return "KIND: text" of the exception that the call raises, or "" if it raises none."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
