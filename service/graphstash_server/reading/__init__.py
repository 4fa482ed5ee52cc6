"""The response to a GET or HEAD of an artifact, independent of the web framework.

    reads            decides the response, and counts hits, misses and bytes
    representation   status and headers of a stored artifact
    conditions       request headers: conditions, ranges and preferences
    headers          which request headers a read depends on, and which it ignores

`fast` and `api.artifacts` receive the requests and send the responses.
"""

__all__: list[str] = []
