"""Training with dropout on torch_xla, from the start and from a checkpoint."""

import gc
from typing import Any

import torch
import torch_xla
from torch import nn
from torch.nn import functional

from graphstash.training.checkpoints import Checkpoints
from graphstash.training.data.position import random_state, set_random_state
from graphstash.training.device import upload
from graphstash.training.optimizers import SGD
from support.cases.xla import counts

NAMES = ("CompileTime", "ExecuteTime", "TransferFromDeviceTime")


class Run:
    def __init__(self) -> None:
        gc.disable()  # live tensors decide the contents of a lazy step
        self.device = torch_xla.device()
        torch.manual_seed(0)
        layers = (nn.Linear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 1))
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        torch_xla.sync()

    def pending(self) -> int:
        waits = torch_xla._XLAC._check_device_tensor_need_materialization(str(self.device))
        return int(sum(waits))

    def step(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        (inputs,) = upload([torch.randn(16, 8, generator=generator)], self.device)
        loss = functional.mse_loss(self.model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch_xla.sync()
        return loss.detach()

    def report(self, losses: list[Any]) -> dict[str, Any]:
        parameters = [value.cpu().tolist() for value in self.model.state_dict().values()]
        return {"losses": [float(loss) for loss in losses], "parameters": parameters}


def change(before: list[int]) -> list[int]:
    return [b - a for a, b in zip(before, counts(*NAMES), strict=True)]


def new(*, checkpoints: str) -> dict[str, Any]:
    """Make ten steps. The checkpoint after five is one transfer and changes no graph."""
    run = Run()
    with Checkpoints(checkpoints) as saved:
        losses = [run.step(number) for number in range(5)]
        state = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "random": random_state(run.device),
            "tensors": list(run.optimizer.device_tensors()),
        }
        before = counts(*NAMES)
        assert run.pending() == 0
        saved.save(5, state)
        assert change(before) == [0, 0, 1]
        assert run.pending() == 0
        before = counts(*NAMES)
        losses += [run.step(number) for number in range(5, 10)]
        assert change(before)[:2] == [0, 5]
    report = run.report(losses)
    assert len(set(report["losses"])) == 10
    with Checkpoints(checkpoints) as saved:  # repeat the sixth step without its random state
        last = saved.load()
    assert last is not None
    run.model.load_state_dict(last.state["model"])
    torch_xla.sync()
    assert float(run.step(5)) != report["losses"][5]
    return report


def resumed(*, checkpoints: str) -> dict[str, Any]:
    """Make the last five steps from the checkpoint."""
    run = Run()
    with Checkpoints(checkpoints) as saved:
        last = saved.load()
    assert last is not None
    torch.manual_seed(12345)
    torch.rand(3, device=run.device).cpu()
    run.model.load_state_dict(last.state["model"])
    run.optimizer.load_state_dict(last.state["optimizer"])
    torch_xla.sync()
    set_random_state(last.state["random"], run.device)
    return run.report([run.step(number) for number in range(5, 10)])
