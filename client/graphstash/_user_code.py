"""Load an object from a user's code by name."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from graphstash.errors import ConfigError

__all__ = ["load"]


def load(target: str, *, what: str) -> Any:
    """Import the module or run the script, and return the named object.

    Args:
        target: `module:name` or `script.py:name`.
        what: word for the object in error messages, such as `function`.

    Raises:
        ConfigError: the target is malformed, or the module, script or name does not exist.
        Exception: any error of the user's code.
    """
    name, _, attribute = target.rpartition(":")
    is_script = name.endswith(".py")
    if not name or not attribute or (name.startswith(".") and not is_script):
        raise ConfigError(f"{target!r}: expected module:{what} or script.py:{what}")
    try:
        module = _script(Path(name)) if is_script else _module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # an import of the module fails
        raise ConfigError(f"{target!r}: no module {error.name!r} here") from None
    if not hasattr(module, attribute):
        raise ConfigError(f"{target!r}: {name} has no {what} {attribute!r}")
    return getattr(module, attribute)


def _module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    return importlib.import_module(name)


def _script(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    sys.path.insert(0, str(path.resolve().parent))  # as `python script.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle finds its functions under this name
    spec.loader.exec_module(module)
    return module
