"""The server's operations, independent of HTTP. Every transaction is opened and closed here.

Each call raises `ServerError` with 503 if the database or the blob store that it uses does not
answer. Docstrings name only the other errors. Use the services from the event loop only.
"""

__all__: list[str] = []
