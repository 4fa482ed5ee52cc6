"""How every command starts and fails."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext
    from graphstash_server.settings import Settings

__all__ = ["fail", "load", "parse_age", "run_with_services", "size_of"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def run_with_services(work: "Callable[[ProcessContext], Awaitable[None]]") -> None:
    """Opens database and store as the environment says, and does the work.

    Whatever goes wrong is one line on stderr: exit code 2 for a bad setting, 1 for the rest.
    """
    settings = load()
    from graphstash_server.clock import system_clock
    from graphstash_server.context import open_services, prepare_database
    from graphstash_server.errors import ServerError, StartError

    if not settings.data_dir.is_dir():
        fail(
            f"there is no data directory {settings.data_dir}: set GRAPHSTASH_DATA_DIR as for the "
            "server"
        )

    async def main() -> None:
        await prepare_database(settings, is_migrating=False)
        # Past the tier, which keeps what jobs need and not what is looked at once.
        durable = settings.model_copy(update={"tier_limit_bytes": 0})
        async with open_services(durable, blob_store=None, clock=system_clock) as context:
            await work(context)

    try:
        asyncio.run(main())
    except StartError as error:
        fail(str(error))
    except ServerError as error:
        fail(error.detail)
    except OSError as error:
        fail(str(error))


def load() -> "Settings":
    """The settings of a server, as the environment says; ends the process when it cannot."""
    try:
        from graphstash_server import context  # noqa: F401 - everything that a server needs
        from graphstash_server.errors import StartError
        from graphstash_server.settings import load_settings
    except ModuleNotFoundError as error:
        fail(
            f"this needs the server's packages ({error.name} is missing): "
            "pip install 'graphstash[server]'"
        )
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    try:
        return load_settings()
    except StartError as error:
        fail(str(error), status=2)


def parse_age(text: str) -> timedelta:
    """Reads `90d`, `12h`, `30m`, `45s` or `2w`.

    Ends the process for anything else.
    """
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        fail(f"{text!r} is no age: it takes a number with s, m, h, d or w, e.g. 90d", status=2)
    return timedelta(**{_UNITS[unit]: float(number)})


def size_of(size_bytes: float) -> str:
    """For people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Says why, and ends the process."""
    print(f"graphstash: {message}", file=sys.stderr)  # noqa: T201
    raise SystemExit(status)
