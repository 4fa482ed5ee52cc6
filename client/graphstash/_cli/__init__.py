"""The command line: one file per group of commands, `output` and `main`."""

__all__: list[str] = []
