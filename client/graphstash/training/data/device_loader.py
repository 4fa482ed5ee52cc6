"""DeviceLoader: load and upload batches while training runs on earlier ones.

    with DeviceLoader(data, upload=lambda batch: to_device(batch, device)) as loader:
        for batch in loader:
            ...

With `ahead=2`, batch i+1 is uploaded and batch i+2 is loaded while step i runs. A single thread
pulls from the source, so the order of batches and random draws match a plain loop.
"""

import copy
import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from graphstash.errors import ConfigError
from graphstash.training.threads import DeviceExecutor, DeviceFuture, ExecutorClosed

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceLoader", "InlineLoader", "tensors_in", "to_device"]

_Batch = TypeVar("_Batch")


@dataclasses.dataclass(frozen=True)
class _End:
    """Takes the place of a batch at the end of the source or after a failure."""

    error: BaseException | None = None


class DeviceLoader(Generic[_Batch]):
    """Iterates over batches once, ahead of the consumer.

    An exception of the source or `upload` is raised in place of its batch, after all earlier
    batches. Loading starts at the first request for a batch.

    Args:
        batches: the source. It must not reuse the buffers of earlier batches.
        ahead: number of batches to load beyond the consumer's current one, 1 or more.
        upload: called with each batch, in order, on a second thread; usually `to_device`.
    """

    def __init__(
        self,
        batches: Iterable[_Batch],
        *,
        ahead: int = 2,
        upload: Callable[[_Batch], _Batch] | None = None,
    ) -> None:
        if ahead < 1:
            raise ConfigError(f"ahead must be at least 1 (got {ahead})")
        self._batches = batches
        self._source: Iterator[_Batch] | None = None
        self._ahead = ahead
        self._upload_batch = upload
        self._stopping = False
        self._queue: deque[DeviceFuture[_Batch | _End]] = deque()
        self._loader = DeviceExecutor("batch-load", depth=ahead + 1)  # one extra for `close`
        self._uploader = DeviceExecutor("batch-upload", depth=ahead)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Batch:
        with suppress(ExecutorClosed):  # if closed, the queue is empty
            while len(self._queue) < self._ahead:
                self._load()
        if not self._queue:
            raise StopIteration
        batch = self._queue[0].result()
        del self._queue[0]
        if isinstance(batch, _End):
            self.close()
            raise batch.error or StopIteration
        with suppress(ExecutorClosed):
            self._load()
        return batch

    def stop_loading(self) -> None:
        """Stop after the batch being loaded; the iteration ends after the loaded batches.

        Only sets a flag, so a signal handler may call it.
        """
        self._stopping = True

    def close(self) -> None:
        """Stop after the batch being loaded, close the source and end the threads."""
        self._stopping = True
        with suppress(ExecutorClosed):  # it is closed already
            self._loader.submit(self._pull)  # closes the source in the thread that used it
        self._loader.close()
        self._uploader.close(cancel=True)
        self._queue.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> None:
        batch = self._loader.submit(self._pull)
        if self._upload_batch is not None:
            batch = self._uploader.submit(self._upload, batch, _current_stream())
        self._queue.append(batch)

    def _pull(self) -> _Batch | _End:
        """Return the next batch, or close the source and return an `_End`."""
        end = _End()
        try:
            if not self._stopping:
                if self._source is None:
                    self._source = iter(self._batches)
                batch = next(self._source, end)
                if not isinstance(batch, _End):
                    return batch
        except BaseException as error:  # noqa: BLE001 - the consumer's thread raises it
            end = _End(error)
        self._stopping = True
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
        except BaseException as error:  # noqa: BLE001 - the same
            end = _End(end.error or error)
        return end

    def _upload(self, batch: _Batch | _End, stream: AbstractContextManager[None]) -> _Batch | _End:
        if isinstance(batch, _End) or self._upload_batch is None:
            return batch
        try:
            with stream:
                return self._upload_batch(batch)
        except BaseException as error:  # noqa: BLE001 - the consumer's thread raises it
            self._stopping = True
            return _End(error)


def _current_stream() -> AbstractContextManager[None]:
    """Return a context of this thread's CUDA stream, for another thread.

    On a stream of its own, a copy could still be under way when training reads the batch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return nullcontext()
    return cast("AbstractContextManager[None]", torch.cuda.stream(torch.cuda.current_stream()))


class InlineLoader(Generic[_Batch]):
    """A `DeviceLoader` without threads, which loads each batch when it is requested."""

    def __init__(
        self, batches: Iterable[_Batch], *, upload: Callable[[_Batch], _Batch] | None = None
    ) -> None:
        self._source = iter(batches)
        self._upload = upload
        self._stopping = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Batch:
        if self._stopping:
            raise StopIteration
        batch = next(self._source)
        return batch if self._upload is None else self._upload(batch)

    def stop_loading(self) -> None:
        """End the iteration."""
        self._stopping = True

    def close(self) -> None:
        """Close the source."""
        self._stopping = True
        if callable(close := getattr(self._source, "close", None)):
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_device(batch: _Batch, device: "torch.device | str") -> _Batch:
    """Return a copy of the batch with its tensors on `device`; other values do not change.

    Traverses tuples (named ones included), lists, mutable mappings and dataclasses. On torch_xla,
    one call transfers all tensors of a batch. On CUDA, tensors are copied from pinned memory
    without waiting. Use them on the calling thread's current stream, or synchronize first. A
    `DeviceLoader` calls this on the stream of the thread that takes its batches.
    """
    import torch

    device = torch.device(device)
    tensors = {id(each): each for each in tensors_in(batch) if each.device != device}
    moved = dict(zip(tensors, _move(list(tensors.values()), device), strict=True))
    return cast("_Batch", _map(lambda leaf: moved.get(id(leaf), leaf), batch))


def tensors_in(batch: object) -> "list[torch.Tensor]":
    """Return the tensors of a batch, each as often as it occurs, where `to_device` finds them."""
    import torch

    tensors: list[torch.Tensor] = []

    def collect(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        return leaf

    _map(collect, batch)
    return tensors


def _move(tensors: "list[torch.Tensor]", device: "torch.device") -> "list[torch.Tensor]":
    if device.type == "xla" and tensors:
        import torch_xla.core.xla_model as xm

        return cast("list[torch.Tensor]", xm.send_cpu_data_to_device(tensors, device))
    if device.type == "cuda":
        tensors = [t.pin_memory() if t.device.type == "cpu" else t for t in tensors]
    return [tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        parts = [_map(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        mapping.update({key: _map(function, value[key]) for key in value})
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(new, field.name, _map(function, getattr(value, field.name)))
        return new
    return function(value)
