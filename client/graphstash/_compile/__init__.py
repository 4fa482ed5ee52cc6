"""Fetch artifacts or compile them, and manage the compilations of this process."""

__all__: list[str] = []
