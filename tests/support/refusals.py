"""The error of a call that the cache refuses."""

from collections.abc import Callable

import pytest

from graphstash import CacheError


def refusal(call: Callable[..., object], *arguments: object, **named: object) -> CacheError:
    """Return the `CacheError` that the call raises. Without an error, the test fails."""
    with pytest.raises(CacheError) as caught:
        call(*arguments, **named)
    return caught.value
