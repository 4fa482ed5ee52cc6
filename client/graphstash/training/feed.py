"""Feed: batches are loaded and uploaded while the training runs on those before.

    with Feed(loader, upload=lambda batch: to_device(batch, device)) as feed:
        for batch in feed:
            ...

Batch i+2 is loaded and batch i+1 is uploaded while step i runs. One thread pulls from the source,
so that the order, and whatever the source does to the state of random generators, is as in a plain
loop.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from graphstash._errors import ConfigError
from graphstash.training.executor import DeviceExecutor
from graphstash.training.placeholder import ExecutorClosed, Placeholder

__all__ = ["Feed", "InlineFeed"]

_Batch = TypeVar("_Batch")


@dataclasses.dataclass(frozen=True)
class _End:
    """Stands where a batch would have come: there is none, or it could not be had."""

    error: BaseException | None = None


class Feed(Generic[_Batch]):
    """Iterates over batches once, ahead of the consumer.

    An exception of the source, of `upload` or of `on_loaded` is raised where the batch would have
    come, after all batches before it. Nothing is loaded before the first batch is asked for.

    Args:
        batches: the source; what it yields must stay as it is, so it may not reuse its buffers.
        ahead: how many batches may be loaded beyond the one in the consumer's hands, 1 or more.
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
            raise ConfigError(f"ahead is {ahead}, the least is 1: one batch beyond the one in use")
        self._batches = batches
        self._source: Iterator[_Batch] | None = None
        self._ahead = ahead
        self._upload_batch = upload
        self._on_loaded = on_loaded
        self._loaded_count = 0
        self._stopping = False
        self._queue: deque[Placeholder[_Batch | _End]] = deque()
        self._loader = DeviceExecutor("feed-load", depth=ahead + 1)  # one for the end of `close`
        self._uploader = DeviceExecutor("feed-upload", depth=ahead)

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

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
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


class InlineFeed(Generic[_Batch]):
    """A `Feed` without threads: each batch is loaded when it is asked for."""

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

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()
