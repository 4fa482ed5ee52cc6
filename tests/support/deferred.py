"""Modules that few tests need. To collect the tests, every worker imports all test files."""

from importlib import import_module
from typing import Any


class Deferred:
    """A stand-in for a module that imports the module when one of its names is first used.

    A test may patch the stand-in like the module.
    """

    __slots__ = ("_module_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_module_name", name)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override] # pytest's patches restore it
        return vars(import_module(self._module_name))

    def __getattr__(self, name: str) -> Any:
        # pytest looks up such names in every object of a test file.
        if name.startswith("__") or name == "_mock_name":
            raise AttributeError(name)
        return getattr(import_module(self._module_name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(import_module(self._module_name), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(import_module(self._module_name), name)

    def __dir__(self) -> list[str]:
        return dir(import_module(self._module_name))
