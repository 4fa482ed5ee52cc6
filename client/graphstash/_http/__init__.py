"""HTTP client for the server: bounds every wait, checks every response, raises `CacheError`."""

__all__: list[str] = []
