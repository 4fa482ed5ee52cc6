"""Who may make a call: the first line of every one that is not open to all.

Nothing of a request is looked at before it is known who asks, neither its words nor its body. What
a caller may not read is answered as if it were not there: nobody learns whether it is by asking.

A body may take hours to come in, and a lease a minute to be granted. A token that was revoked
meanwhile has no say any more: at the end of either, the same is asked again (`api.bodies`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fastapi import Request

from graphstash_schema import AccessKind, ErrorCode, Namespace, NamespacePolicy, Scope
from graphstash_server.actor import Actor
from graphstash_server.api.bodies import ask_again_after
from graphstash_server.api.problems import refusals
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.services.principals import EVERYBODY, Principal

__all__ = [
    "OPEN_PATHS",
    "SECURITY_SCHEMES",
    "access_refusals",
    "actor_of",
    "administrator",
    "authenticated",
    "authorized",
]

OPEN_PATHS: Final = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
"""What everybody may ask: it tells nothing of what is stored."""

SECURITY_SCHEMES: Final[dict[str, Any]] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of `graphstash token create`, or a JWT of the identity provider "
        "that the server is set to trust.",
    }
}
"""OpenAPI: how a caller says who they are."""

_WAYS: Final = {Scope.READ: "read", Scope.WRITE: "write to", Scope.ADMIN: "administer"}


async def authorized(
    request: Request,
    namespace: str,
    scope: Scope,
    *,
    absent: Callable[[Request], ServerError] | None = None,
) -> Principal:
    """Whoever asks, when they may do it in a namespace; counts against the namespace's rate.

    Args:
        request: of them.
        namespace: as it stands in the path or the body; it is not checked before they are known.
        scope: what the call needs.
        absent: the answer to who may not even read there: exactly what the call says of what does
            not exist. By default a sentence for calls that have none.

    Raises:
        InvalidValueError: when the namespace is out of form.
        ServerError: 401, 404, 403, 429 or 503.
    """
    principal, where, policy = await _admitted(
        request, namespace=namespace, scope=scope, absent=absent
    )
    context: ProcessContext = request.app.state.context
    context.policies.admit(where, policy)
    ask_again_after(request, partial(_admitted, namespace=namespace, scope=scope, absent=absent))
    return principal


async def _admitted(
    request: Request,
    *,
    namespace: str,
    scope: Scope,
    absent: Callable[[Request], ServerError] | None,
) -> tuple[Principal, Namespace, NamespacePolicy]:
    context: ProcessContext = request.app.state.context
    principal = await _principal(request)
    is_anonymous = principal.kind is AccessKind.ANONYMOUS
    if is_anonymous and Namespace.form.fullmatch(namespace) is None:
        raise _unauthenticated()
    where = Namespace(namespace)
    policy = await context.policies.of(where)
    if principal is not EVERYBODY and not principal.may(scope, where, policy):
        if is_anonymous:
            raise _unauthenticated()
        if not principal.may_read(where, policy):
            raise absent(request) if absent is not None else _nothing_there()
        raise _forbidden(principal, scope, where, policy)
    return principal, where, policy


async def authenticated(request: Request) -> Principal:
    """Whoever asks, when it is known who they are.

    Raises:
        ServerError: 401 or 503.
    """
    principal = await _principal(request)
    if principal.kind is AccessKind.ANONYMOUS:
        raise _unauthenticated()
    return principal


async def administrator(request: Request) -> Principal:
    """Whoever asks, when they administer the server.

    Raises:
        ServerError: 401, 403 or 503.
    """
    ask_again_after(request, _administrator)
    return await _administrator(request)


async def _administrator(request: Request) -> Principal:
    principal = await authenticated(request)
    if not principal.is_administrator:
        raise ServerError(
            ErrorCode.FORBIDDEN,
            f"{principal.name} does not administer this server: that needs a token with the grant "
            "admin:*",
        )
    return principal


def actor_of(request: Request, principal: Principal) -> Actor:
    """The caller, as the audit log names them."""
    return Actor(principal.name, request.scope["state"]["request_id"])


def access_refusals(*codes: ErrorCode) -> dict[int | str, dict[str, Any]]:
    """How OpenAPI lists the refusals of a call in a namespace: the call's own, and those of
    `authorized`.
    """
    return refusals(
        *codes,
        *(
            code
            for code in (
                ErrorCode.UNAUTHENTICATED,
                ErrorCode.FORBIDDEN,
                ErrorCode.NOT_FOUND,
                ErrorCode.RATE_LIMITED,
                ErrorCode.UNAVAILABLE,
            )
            if code not in codes
        ),
    )


async def _principal(request: Request) -> Principal:
    context: ProcessContext = request.app.state.context
    if context.access.is_open:
        return EVERYBODY
    headers = request.scope["headers"]
    shown = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
    if len(shown) > 1:  # a proxy in between might go by the other one
        raise ServerError(
            ErrorCode.UNAUTHENTICATED, "the request has two Authorization headers: send one"
        )
    return await context.access.principal_of(shown[0] if shown else None)


def _unauthenticated() -> ServerError:
    return ServerError(
        ErrorCode.UNAUTHENTICATED,
        "this server lets in whoever shows a token: set GRAPHSTASH_TOKEN, an administrator of the "
        "server makes one with `graphstash token create`",
    )


def _nothing_there() -> ServerError:
    return ServerError(
        ErrorCode.NOT_FOUND,
        "there is no such namespace, or the caller may not read it: an administrator of the server "
        "makes tokens that may",
    )


def _forbidden(
    principal: Principal, scope: Scope, namespace: Namespace, policy: NamespacePolicy
) -> ServerError:
    way_out = f"that needs a token with a grant like {scope}:{namespace}"
    if scope is Scope.WRITE and policy.trusted and principal.allows(scope, namespace):
        way_out = (
            "it is a trusted namespace, which needs a grant that names it without `*`, "
            f"{scope}:{namespace}"
        )
    return ServerError(
        ErrorCode.FORBIDDEN,
        f"{principal.name} may read the namespace {namespace} and not {_WAYS[scope]} it: {way_out}",
    )
