"""Trains with dropout on torch_xla, anew or from a checkpoint; reports losses and counts."""

import argparse
import gc
import json
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from torch import nn
from torch.nn import functional

from graphstash.training.checkpoints import Checkpoints
from graphstash.training.data.position import random_state, set_random_state
from graphstash.training.device import upload
from graphstash.training.optimizers import SGD


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--start", choices=("new", "resumed"), required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    gc.disable()  # which tensors are alive decides what a lazy step is
    device = torch_xla.device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 1))
    model = model.to(device)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch_xla.sync()

    def counts():
        xm.wait_device_ops()
        names = ("CompileTime", "ExecuteTime", "TransferFromDeviceTime")
        data = {name: xla_metrics.metric_data(name) for name in names}
        return {name: int(one[0]) if one else 0 for name, one in data.items()}

    def change(before):
        return {name: number - before[name] for name, number in counts().items()}

    def pending():
        return sum(torch_xla._XLAC._check_device_tensor_need_materialization(str(device)))

    def step(number):
        generator = torch.Generator().manual_seed(number)
        (inputs,) = upload([torch.randn(16, 8, generator=generator)], device)
        loss = functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch_xla.sync()
        return loss.detach()

    def state():
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": random_state(device),
        }

    report = {}
    with Checkpoints(options.checkpoints) as checkpoints:
        if options.start == "new":
            losses = [step(number) for number in range(5)]
            saved = state() | {"tensors": list(optimizer.device_tensors())}
            before = counts() | {"pending": pending()}
            report["pending_before_save"] = before.pop("pending")
            checkpoints.save(5, saved)
            report["counts_of_save"] = change(before)
            report["pending_after_save"] = pending()
            before = counts()
            losses += [step(number) for number in range(5, 10)]
            report["counts_after_save"] = change(before)
        else:
            last = checkpoints.load().state
            torch.manual_seed(12345)
            torch.rand(3, device=device).cpu()
            model.load_state_dict(last["model"])
            optimizer.load_state_dict(last["optimizer"])
            torch_xla.sync()
            set_random_state(last["random"], device)
            losses = [step(number) for number in range(5, 10)]
    report["losses"] = [float(loss) for loss in losses]
    report["parameters"] = [value.cpu().tolist() for value in model.state_dict().values()]
    if options.start == "new":  # the sixth step again, from its checkpoint but for the seed
        last = Checkpoints(options.checkpoints).load().state
        model.load_state_dict(last["model"])
        torch_xla.sync()
        report["without_seed"] = float(step(5))
    options.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
