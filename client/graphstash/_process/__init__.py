"""The cache's lifetime in one training process, from install to exit."""

__all__: list[str] = []
