"""The store of a job whose ranks are threads of this process."""

import threading


class Values:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}


class MemoryRanks:
    def __init__(
        self, values: Values, rank: int, size: int, *, compiles_together: bool = False
    ) -> None:
        self._values = values
        self.rank = rank
        self.size = size
        self.compiles_together = compiles_together

    def claim(self, name: str, value: bytes) -> bytes:
        with self._values.changed:
            self._values.changed.notify_all()
            return self._values.values.setdefault(name, value)

    def set(self, name: str, value: bytes) -> None:
        assert len(value) <= 1024**2
        with self._values.changed:
            assert name not in self._values.values
            self._values.values[name] = value
            self._values.changed.notify_all()

    def wait(self, name: str, *, timeout_seconds: float) -> bytes | None:
        with self._values.changed:
            self._values.changed.wait_for(lambda: name in self._values.values, timeout_seconds)
            return self._values.values.get(name)

    def delete(self, name: str) -> None:
        with self._values.changed:
            del self._values.values[name]
