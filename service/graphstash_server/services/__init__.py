"""What the server does, apart from HTTP. Every transaction is opened and closed here.

Every call that uses the database or the blob store raises `ServerError` with 503 when that does not
answer; docstrings name only the other errors. The services are used from the event loop only.
"""

__all__: list[str] = []
