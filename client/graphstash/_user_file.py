"""The user's config file: address and token of the server, which `graphstash init` stores.

Options and the environment take precedence. A damaged file is ignored. The file therefore never
holds settings that protect a job, such as trusted keys.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from graphstash._regular_file import open_regular
from graphstash._replacing import replacing

__all__ = ["STORED_SETTINGS", "UserFile", "read_user_file", "user_file_path", "write_user_file"]

STORED_SETTINGS: Final[tuple[str, ...]] = ("url", "token")

_MAX_BYTES: Final = 64 * 1024


class UserFile(NamedTuple):
    """The settings by name, not validated, and why the file or a part of it is ignored, or ""."""

    values: Mapping[str, str]
    problem: str = ""


def user_file_path(environ: Mapping[str, str]) -> Path | None:
    """Return `$XDG_CONFIG_HOME/graphstash/config.toml` (default: below `$HOME/.config`), or None if
    that is no absolute path.
    """
    home = environ.get("HOME")
    base = Path(environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else ""))
    return base / "graphstash" / "config.toml" if base.is_absolute() else None


def read_user_file(environ: Mapping[str, str]) -> UserFile:
    """Read the file of this environment's user. Returns problems instead of raising them."""
    path = user_file_path(environ)
    if path is None:
        return UserFile({})
    try:
        content = _read_own(path)
    except (FileNotFoundError, NotADirectoryError):
        return UserFile({})
    except OSError as error:
        return UserFile({}, f"{path} is ignored: {error.strerror or error}")
    import tomllib  # slow to import, and most users have no such file

    try:
        found = tomllib.loads(content.decode())
    except (ValueError, RecursionError):  # the error's message may contain the token
        return UserFile({}, f"{path} is ignored, because it is not valid TOML")
    unknown = sorted(set(found) - set(STORED_SETTINGS))
    problem = f"{path}: {', '.join(unknown)} ignored; it takes url and token" if unknown else ""
    values = {name: found[name] for name in STORED_SETTINGS if name in found}
    if not all(isinstance(value, str) for value in values.values()) or "url" not in values:
        return UserFile({}, f"{path} is ignored: it takes the text url, and perhaps the text token")
    return UserFile(values, problem)


def write_user_file(path: Path, values: Mapping[str, str]) -> None:
    """Replace the file atomically. Only its owner can read it."""
    import json  # slow to import, and only one command writes the file

    path = Path(os.path.realpath(path))  # keep a symbolic link to a user's dotfiles
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write("# Written by `graphstash init`. GRAPHSTASH_* variables take precedence.\n")
        file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def _read_own(path: Path) -> bytes:
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"it belongs to another user (uid {status.st_uid})")
        if mode & 0o077:
            raise PermissionError(
                f"other users may have read or changed it (mode {mode:o}). Run `chmod 600 {path}`, "
                "and replace its token"
            )
        content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise PermissionError(f"it has more than {_MAX_BYTES} bytes")
        return content
