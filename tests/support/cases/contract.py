"""Wrappers of other cases, for the contract of hooks."""

import importlib
import multiprocessing
from collections.abc import Callable
from typing import Any


def _case(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"support.cases.{module}"), function
    )
    return found


def on_other_version(*, package: str, version: str, function: str, keywords: dict[str, Any]) -> Any:
    """Run a case after the compiler's package has reported another version to the hook."""
    vars(importlib.import_module(package))["__version__"] = version
    import graphstash

    graphstash.install()
    return _case(function)(**keywords)


def in_a_forked_child(*, function: str, keywords: dict[str, Any]) -> Any:
    run = _case(function)  # imports the compiler here
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(run(**keywords)))
    child.start()
    report = receiver.recv()
    child.join()
    assert child.exitcode == 0
    return report
