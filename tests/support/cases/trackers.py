"""Call the callbacks of trackers as `train` does, and return the curves that they wrote, offline.

Each curve, by name, is a list of points (step, value).
"""

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import graphstash
from graphstash import training
from graphstash_schema import ArtifactKey

Curves = dict[str, list[tuple[Any, Any]]]


def build(number: int) -> None:
    key = ArtifactKey.parse("schedule", "cpu", f"{number:064x}")
    graphstash.get_or_compile(key, lambda: b"x")


def play(callback: training.Callback) -> None:
    build(1)
    callback.on_start(0, 20)
    callback.on_log(training.LogEntry(10, (0.5,), (0.1,), 1.0))
    build(1)
    callback.on_log(training.LogEntry(20, (0.4,), (0.1,), 1.0))
    callback.on_end(training.TrainingResult(20, (0.5, 0.4), 1.0, "steps"))


def tensorboard(*, folder: str) -> Curves:
    processing = import_module("tensorboard.backend.event_processing.event_accumulator")
    writer = import_module("tensorboard.summary").Writer(folder)
    play(training.TensorBoardCallback(writer))
    writer.close()
    read = processing.EventAccumulator(folder, size_guidance={"tensors": 0})
    read.Reload()
    return {
        tag: [(event.step, float(event.tensor_proto.float_val[0])) for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }


def records_in(log: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file: LevelDB's log format behind a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # no room for a header: the rest of the block is padding
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", log[at + 4 : at + 7])
        record += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb(*, folder: str) -> Curves:
    wandb = import_module("wandb")
    records = import_module("wandb.proto.wandb_internal_pb2")
    run = wandb.init(project="test", mode="offline", dir=folder)
    run.log({"loss": 1.0}, step=7)  # the run's own step is independent
    play(training.WandbCallback(run))
    run.log({"loss": 0.5}, step=30)
    run.finish()
    wandb.teardown()  # ends the writer process after its last write
    (written,) = Path(folder).rglob("run-*.wandb")
    curves: Curves = {}
    for data in records_in(written.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        items = {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        for name, value in items.items():
            curves.setdefault(name, []).append((items.get("graphstash/step"), value))
    return curves
