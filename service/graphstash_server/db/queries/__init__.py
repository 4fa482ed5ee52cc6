"""Every SQL statement, one module per table. No function ends a transaction."""

__all__: list[str] = []
