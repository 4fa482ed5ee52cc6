"""The server's operations, independent of HTTP. They open and close every transaction.

Each call raises `ServerError` with 503 if the database or the blob store does not respond.
Docstrings name only other errors. Call services only in the event loop.
"""

__all__: list[str] = []
