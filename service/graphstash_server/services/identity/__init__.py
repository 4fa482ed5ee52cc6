"""Authentication, grants and the audit log."""

__all__: list[str] = []
