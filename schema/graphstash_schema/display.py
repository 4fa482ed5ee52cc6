"""Format counts and sizes for people."""

__all__ = ["format_bytes", "plural"]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 hit`, `2 misses`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


def format_bytes(size: float) -> str:
    """Return a size with its unit: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
