"""Command line: one module per group of commands, plus `output` and `main`."""

__all__: list[str] = []
