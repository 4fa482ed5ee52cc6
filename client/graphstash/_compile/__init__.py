"""Find an artifact or compile it, and everything that a compilation here needs."""

__all__: list[str] = []
