"""DeviceLoader: loads and uploads batches while training runs on those before.

    with DeviceLoader(data, upload=lambda batch: to_device(batch, device)) as loader:
        for batch in loader:
            ...

Batch i+2 is loaded and batch i+1 is uploaded while step i runs. One thread pulls from the source,
so that the order, and the effect of the source on random generators, is as in a plain loop.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from graphstash.errors import ConfigError
from graphstash.training.threads import DeviceExecutor, DeviceFuture, ExecutorClosed

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceLoader", "InlineLoader", "to_device"]

_Batch = TypeVar("_Batch")


@dataclasses.dataclass(frozen=True)
class _End:
    """Takes the place of a batch: there is none, or it could not be loaded."""

    error: BaseException | None = None


class DeviceLoader(Generic[_Batch]):
    """Iterates over batches once, ahead of the consumer.

    An exception of the source, of `upload` or of `on_loaded` is raised in place of its batch, after
    all batches before it. Nothing is loaded before the first batch is asked for.

    Args:
        batches: the source; what it yields must stay as it is, so it may not reuse its buffers.
        ahead: how many batches may be loaded beyond the one that the consumer has, 1 or more.
        upload: called with each batch, in order, on a second thread; `to_device`, mostly.
        on_loaded: called in the loading thread with the number of each batch (1, 2, ...) after it
            was pulled and before the next: then the state of data and random generators is that
            of a plain loop.
    """

    def __init__(
        self,
        batches: Iterable[_Batch],
        *,
        ahead: int = 2,
        upload: Callable[[_Batch], _Batch] | None = None,
        on_loaded: Callable[[int], None] | None = None,
    ) -> None:
        if ahead < 1:
            raise ConfigError(f"ahead must be at least 1 (got {ahead})")
        self._batches = batches
        self._source: Iterator[_Batch] | None = None
        self._ahead = ahead
        self._upload_batch = upload
        self._on_loaded = on_loaded
        self._loaded_count = 0
        self._stopping = False
        self._queue: deque[DeviceFuture[_Batch | _End]] = deque()
        self._loader = DeviceExecutor("batch-load", depth=ahead + 1)  # one for the end of `close`
        self._uploader = DeviceExecutor("batch-upload", depth=ahead)

    @property
    def loaded_count(self) -> int:
        """How many batches were pulled from the source; final once the iteration has ended."""
        return self._loaded_count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Batch:
        with suppress(ExecutorClosed):  # closed: only what is left comes, and that is nothing
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
        """Loads nothing after the batch in hand; the iteration ends after those that are loaded.

        Sets a flag only, so a signal handler may call it.
        """
        self._stopping = True

    def close(self) -> None:
        """Stops after the batch in hand, closes the source and ends the threads."""
        self._stopping = True
        with suppress(ExecutorClosed):  # it is closed already
            self._loader.submit(self._pull)  # closes the source, in the thread that has used it
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
            batch = self._uploader.submit(self._upload, batch)
        self._queue.append(batch)

    def _pull(self) -> _Batch | _End:
        """The next batch; after the last one closes the source, as often as it is called."""
        end = _End()
        try:
            if not self._stopping:
                if self._source is None:
                    self._source = iter(self._batches)
                batch = next(self._source, end)
                if not isinstance(batch, _End):
                    self._loaded_count += 1
                    if self._on_loaded is not None:
                        self._on_loaded(self._loaded_count)
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

    def _upload(self, batch: _Batch | _End) -> _Batch | _End:
        if isinstance(batch, _End) or self._upload_batch is None:
            return batch
        try:
            return self._upload_batch(batch)
        except BaseException as error:  # noqa: BLE001 - the consumer's thread raises it
            self._stopping = True
            return _End(error)


class InlineLoader(Generic[_Batch]):
    """A `DeviceLoader` without threads: each batch is loaded when it is asked for."""

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
        """Ends the iteration."""
        self._stopping = True

    def close(self) -> None:
        """Closes the source."""
        self._stopping = True
        if callable(close := getattr(self._source, "close", None)):
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_device(batch: _Batch, device: "torch.device | str") -> _Batch:
    """A copy of the batch whose tensors are on `device`; all else is as it was.

    Looks into tuples (named ones too), lists, mappings and dataclasses. On torch_xla the tensors
    of a batch travel in one call. On CUDA they go through pinned memory, without waiting, on the
    current stream: what is queued there later sees them.
    """
    import torch

    device = torch.device(device)
    tensors: dict[int, torch.Tensor] = {}

    def collect(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            tensors[id(leaf)] = leaf
        return leaf

    _map(collect, batch)
    moved = dict(zip(tensors, _move(list(tensors.values()), device), strict=True))
    return cast("_Batch", _map(lambda leaf: moved.get(id(leaf), leaf), batch))


def _move(tensors: "list[torch.Tensor]", device: "torch.device") -> "list[torch.Tensor]":
    if device.type == "xla" and tensors:
        import torch_xla.core.xla_model as xm

        return cast("list[torch.Tensor]", xm.send_cpu_data_to_device(tensors, device))
    if device.type == "cuda":
        tensors = [t.pin_memory() if t.device.type == "cpu" else t for t in tensors]
    return [tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of nested containers with `function` applied to everything that is not a container."""
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
