"""A user's own cache manager for Triton."""

from triton.runtime.cache import FileCacheManager

__all__ = ["OwnManager"]


class OwnManager(FileCacheManager):
    pass
