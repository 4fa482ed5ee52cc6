"""Packages that import their names lazily list the same names everywhere."""

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    "package",
    [
        *("graphstash", "graphstash.training", "graphstash.training.reduce", "graphstash.tuning"),
        *("graphstash.hooks", "graphstash_schema"),
    ],
)
def test_every_public_name_can_be_imported(package):
    module = import_module(package)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_unknown_name_of_lazy_package_raises_attribute_error():
    tuning = import_module("graphstash.tuning")
    for name in ("Nothing", "__wrapped__", "TYPE_CHECKING_"):
        with pytest.raises(AttributeError, match=name):
            getattr(tuning, name)
