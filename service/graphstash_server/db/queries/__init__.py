"""Every SQL statement, one module per table. They take a connection and never end a transaction."""

__all__: list[str] = []
