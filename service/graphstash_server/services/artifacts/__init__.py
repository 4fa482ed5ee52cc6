"""How an artifact is stored, served, withheld and evicted."""

__all__: list[str] = []
