"""Store, serve, withhold and evict artifacts."""

__all__: list[str] = []
