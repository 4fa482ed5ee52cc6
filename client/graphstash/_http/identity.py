"""Get this job's JWT from its identity provider, such as a CI system or Kubernetes.

`graphstash login --oidc` exchanges the JWT for a token of the server.
"""

import json
import sys
from pathlib import Path
from typing import Final

from graphstash._http.errors import map_httpx_errors, read_small
from graphstash._http.lean_httpx import httpx
from graphstash.config import TOKEN, github_token_request
from graphstash.errors import CacheError, ConfigError, Reason

__all__ = ["jwt_from_github", "read_jwt"]

_MAX_BYTES: Final = 16 * 1024
_SECONDS: Final = 10.0


def read_jwt(path: Path) -> str:
    """Read a JWT from a file, such as a projected service-account token, or from standard input if
    the path is `-`.

    Raises:
        ConfigError: the file cannot be read, or holds no JWT.
    """
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(_MAX_BYTES)
        else:
            with path.open("rb") as file:
                raw = file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"--jwt-file {path}: {error.strerror}") from None
    return _check_jwt(raw.decode("ascii", "replace").strip(), f"--jwt-file {path}")


def jwt_from_github(audience: str) -> str:
    """Request a new JWT for this GitHub Actions job.

    Raises:
        ConfigError: this process is not part of a GitHub Actions job, the job lacks the permission,
            or the response holds no JWT.
        CacheError: GitHub does not answer, or refuses.
    """
    request = github_token_request()
    if request is None:
        raise ConfigError(
            "there is no JWT to log in with: give its file with --jwt-file (- for standard input); "
            "a job of GitHub Actions needs `permissions: id-token: write`"
        )
    with map_httpx_errors("ACTIONS_ID_TOKEN_REQUEST_URL"):
        url = httpx.URL(request[0]).copy_merge_params({"audience": audience})
    place = f"{url.scheme}://{url.host}"
    with (
        map_httpx_errors(place),
        # Unlike calls to the cache, this call uses the proxy of the environment.
        httpx.Client(timeout=_SECONDS) as client,
        client.stream("GET", url, headers={"Authorization": f"Bearer {request[1]}"}) as response,
    ):
        body = read_small(response)
        if response.status_code != 200:
            raise CacheError(
                Reason.REFUSED, f"{place} gives no JWT: it answered {response.status_code}"
            )
    try:
        value = json.loads(body)["value"]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    return _check_jwt(value if isinstance(value, str) else "", place)


def _check_jwt(jwt: str, source: str) -> str:
    if jwt.count(".") != 2 or TOKEN.fullmatch(jwt) is None:
        raise ConfigError(f"{source} holds no JWT of at most 8192 characters")
    return jwt
