"""`train`: the loop, one step of it, and the events that it reports."""

__all__: list[str] = []
