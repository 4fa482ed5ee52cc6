"""SQL statements, by table or purpose. Callers begin and end transactions."""

__all__: list[str] = []
