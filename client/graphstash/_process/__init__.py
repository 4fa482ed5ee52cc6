"""One training process, from install to exit."""

__all__: list[str] = []
