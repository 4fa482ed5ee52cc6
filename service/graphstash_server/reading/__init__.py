"""What a GET or HEAD of an artifact is answered with, for every transport.

    reads            decides the answer, and counts hits, misses and bytes
    representation   status and headers of a stored artifact
    conditions       request headers: conditions, ranges and preferences
    headers          which request headers a read depends on, and which it ignores

The room knows the semantics of HTTP but no framework. `fast` and `api.artifacts` carry requests and
answers.
"""

__all__: list[str] = []
