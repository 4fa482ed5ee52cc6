"""Calls: declare API calls, and who may make them.

A declaration names the path, the required right and the responses. It implies the authorization,
which precedes everything else, and the OpenAPI description. If the caller may not read some data,
the response is the same as if the data did not exist.

A handler gets a `Call` and reads path, headers and body itself: FastAPI's parameters and
dependencies would take a third of the time of a small hit. Types such as `Namespace` validate the
segments of the path. A body may take hours to arrive, and a lease a minute to be granted. Meanwhile
the token may be revoked. So a handler calls `Call.reauthorize` after such a wait, or uses
`bodies.read_model`, which does.
"""

import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, TypeAdapter

from graphstash_schema import (
    AccessKind,
    ArtifactKind,
    DeviceType,
    ErrorCode,
    Fingerprint,
    ManifestName,
    Namespace,
    NamespacePolicy,
    Scope,
    Word,
)
from graphstash_schema.protocol import API_PREFIX
from graphstash_schema.run import RunName
from graphstash_server.actor import Actor
from graphstash_server.api.problems import refusals
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.identity.authentication import bearer_in
from graphstash_server.services.identity.principals import ANONYMOUS, OPEN_ACCESS, OWNER, Principal

__all__ = [
    "ADMINISTRATOR",
    "ANONYMOUS_RIGHT",
    "BYTES",
    "KEY",
    "KEY_ERRORS",
    "KNOWN",
    "NO_STORE",
    "OPEN_PATHS",
    "SECURITY_SCHEMES",
    "Call",
    "Calls",
    "NamespaceCall",
    "Right",
    "actor_of",
    "credentials_of",
    "hidden_namespace",
    "in_namespace",
    "json_answer",
    "key_of",
    "manifest_of",
    "principal_of",
]

KEY: Final = "{kind}/{device_type}/{fingerprint}"
"""Path segments of an artifact key."""

KEY_ERRORS: Final = (
    ErrorCode.INVALID_KIND,
    ErrorCode.INVALID_DEVICE_TYPE,
    ErrorCode.INVALID_FINGERPRINT,
)
"""Error codes of a body with a malformed artifact key."""

NO_STORE: Final = {"Cache-Control": "no-store"}

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Paths that need no authentication, because they reveal nothing about stored data."""

SECURITY_SCHEMES: Final[dict[str, Any]] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of `graphstash token create`, a JWT of an identity provider that "
        "the server trusts, or the token that such a JWT was exchanged for.",
    }
}
"""OpenAPI: how a caller authenticates."""

_VERBS: Final = {Scope.READ: "read", Scope.WRITE: "write to", Scope.ADMIN: "administer"}


@dataclass(slots=True)
class Call:
    """A request whose caller is authorized."""

    request: Request
    context: ProcessContext
    principal: Principal
    _check: Callable[[Request], Awaitable["Call"]]

    @property
    def actor(self) -> Actor:
        """The caller, for the audit log."""
        return actor_of(self.request, self.principal)

    async def may_read(self, namespace: Namespace) -> bool:
        """Return whether the caller may read a namespace."""
        return self.principal.may_read(namespace, await self.context.policies.of(namespace))

    async def reauthorize(self) -> None:
        """Check again that the caller may make the call, without counting against the rate.

        Raises:
            ServerError: as at the start of the call, except 429.
        """
        await self._check(self.request)


@dataclass(slots=True)
class NamespaceCall(Call):
    """A call in a namespace, with the policy that the caller was last checked against."""

    namespace: Namespace
    policy: NamespacePolicy

    async def reauthorize(self) -> None:
        """Check the caller as in `Call.reauthorize`, and refresh `policy`. If the caller's grants
        and the policy are still the same objects, the last decision holds.
        """
        principal = await principal_of(self.request, self.context)
        policy = await self.context.policies.of(self.namespace)
        if principal is self.principal and policy is self.policy:
            return
        checked = await self._check(self.request)
        assert isinstance(checked, NamespaceCall)  # noqa: S101 - `in_namespace` made the check
        self.policy = checked.policy


C = TypeVar("C", bound=Call)
C_co = TypeVar("C_co", bound=Call, covariant=True)


@dataclass(frozen=True, slots=True)
class Right(Generic[C_co]):
    """The right that a caller needs to make a call.

    Attributes:
        admit: returns the call, or raises ServerError if the caller may not make it.
        refusals: error codes that `admit` raises.
    """

    admit: Callable[[Request], Awaitable[C_co]]
    refusals: tuple[ErrorCode, ...]


def in_namespace(
    scope: Scope,
    *,
    absent: Callable[[Request], ServerError] | None = None,
    named: Callable[[Request], str] = lambda request: str(request.path_params["namespace"]),
    counts: Callable[[Request, Principal], bool] = lambda *_: True,
) -> Right[NamespaceCall]:
    """Return the right to act in a namespace.

    Args:
        scope: scope that the call needs.
        absent: error for a caller without read access, as the call raises it if the requested
            object does not exist. Default: `hidden_namespace`.
        named: returns the namespace that a request names, not yet validated. Default: in the path.
        counts: whether a caller's call counts against the namespace's rate. Default: each does.
    """

    async def check(request: Request) -> NamespaceCall:
        context: ProcessContext = request.app.state.context
        principal = await principal_of(request, context)
        is_anonymous = principal.kind is AccessKind.ANONYMOUS
        name = named(request)
        if is_anonymous and Namespace.form.fullmatch(name) is None:
            raise _unauthenticated()
        where = Namespace(name)
        policy = await context.policies.of(where)
        if not principal.may(scope, where, policy):
            if is_anonymous:
                raise _unauthenticated()
            if not principal.may_read(where, policy):
                raise absent(request) if absent is not None else hidden_namespace(where)
            raise _forbidden(principal, scope, where, policy)
        return NamespaceCall(request, context, principal, check, where, policy)

    async def admit(request: Request) -> NamespaceCall:
        call = await check(request)
        if counts(request, call.principal):
            call.context.policies.admit(call.namespace, call.policy)
        return call

    return Right(
        admit,
        (
            ErrorCode.INVALID_NAMESPACE,
            ErrorCode.UNAUTHENTICATED,
            ErrorCode.FORBIDDEN,
            ErrorCode.NOT_FOUND,
            ErrorCode.RATE_LIMITED,
            ErrorCode.UNAVAILABLE,
        ),
    )


async def _anonymous(request: Request) -> Call:
    return Call(request, request.app.state.context, ANONYMOUS, _anonymous)


async def _known(request: Request) -> Call:
    context: ProcessContext = request.app.state.context
    principal = await principal_of(request, context)
    if principal.kind is AccessKind.ANONYMOUS:
        raise _unauthenticated()
    return Call(request, context, principal, _known)


async def _administrator(request: Request) -> Call:
    call = await _known(request)
    if not call.principal.is_administrator:
        raise ServerError(
            ErrorCode.FORBIDDEN,
            f"{call.principal.name} does not administer this server: use a token with the grant "
            "admin:*",
        )
    return Call(request, call.context, call.principal, _administrator)


ANONYMOUS_RIGHT: Final = Right(_anonymous, ())
"""Any caller, without authentication."""

KNOWN: Final = Right(_known, (ErrorCode.UNAUTHENTICATED, ErrorCode.UNAVAILABLE))
"""Any authenticated caller, even without a grant."""

ADMINISTRATOR: Final = Right(_administrator, (*KNOWN.refusals, ErrorCode.FORBIDDEN))
"""An administrator of the server."""


async def principal_of(request: Request, context: ProcessContext) -> Principal:
    """Return the caller of a request, by its Authorization header or the owner's socket.

    Raises:
        ServerError: 401 if the token is invalid or the header occurs twice, 503 if the token cannot
            be checked. An open server checks neither.
    """
    if context.access.is_open:
        return OPEN_ACCESS
    headers = request.scope["headers"]
    credentials = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
    if len(credentials) > 1:  # a proxy might have checked the other header
        raise ServerError(
            ErrorCode.UNAUTHENTICATED, "the request has two Authorization headers: send one"
        )
    if not credentials and request.scope["state"].get("is_owner"):
        return OWNER
    return await context.access.principal_of(credentials[0] if credentials else None)


def credentials_of(request: Request) -> str | None:
    """Return the bearer token or JWT of a request."""
    return bearer_in(request.headers.get("authorization", ""))


def actor_of(request: Request, principal: Principal) -> Actor:
    """Return the caller of a request, for the audit log."""
    state = request.scope["state"]
    return Actor(principal.name, state["request_id"], state["server_request_id"], _address(request))


def _address(request: Request) -> str:
    """Return the address of a request's sender for the audit log.

    A proxy, such as docker/nginx, adds its client's address to X-Forwarded-For. Any caller can send
    that header, so the result includes the peer's address.
    """
    peer = request.client.host if request.client else "own socket"
    client = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    if not client:
        return peer
    try:  # cut the IPv6 zone, which may be any text
        return f"{ipaddress.ip_address(client.partition('%')[0])} via {peer}"
    except ValueError:
        return peer


def _unauthenticated() -> ServerError:
    return ServerError(
        ErrorCode.UNAUTHENTICATED,
        "authentication required: set GRAPHSTASH_TOKEN; an administrator creates tokens with "
        "`graphstash token create`",
    )


def hidden_namespace(where: Namespace) -> ServerError:
    """Return one error for both cases: no such namespace, or one that the caller may not read."""
    return ServerError(
        ErrorCode.NOT_FOUND,
        f"the namespace {where} does not exist, or the caller may not read it: set "
        "GRAPHSTASH_NAMESPACE to one that the token covers, or use a token with a grant such as "
        f"read:{where}",
    )


def _forbidden(
    principal: Principal, scope: Scope, namespace: Namespace, policy: NamespacePolicy
) -> ServerError:
    advice = f"use a token with a grant such as {scope}:{namespace}"
    if policy.trusted and principal.allows(scope, namespace):
        advice = (
            "it is a trusted namespace; use a token with a grant that names it without `*`, "
            f"{scope}:{namespace}"
        )
    return ServerError(
        ErrorCode.FORBIDDEN,
        f"{principal.name} may not {_VERBS[scope]} namespace {namespace}: {advice}",
    )


BYTES: Final[dict[str, Any]] = {"content": {"application/octet-stream": {}}}
"""OpenAPI: a body that is an artifact."""

_BODY_ERRORS: Final = (ErrorCode.LENGTH_MISMATCH, ErrorCode.UPLOAD_TIMEOUT, ErrorCode.TOO_LARGE)


def _schema_of(word: type[Word]) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{word.form.pattern}$"}


_PATH_PARAMETERS: Final[dict[str, tuple[dict[str, Any], ErrorCode | None]]] = {
    "namespace": (_schema_of(Namespace), ErrorCode.INVALID_NAMESPACE),
    "kind": (
        {"type": "string", "enum": [kind.value for kind in ArtifactKind]},
        ErrorCode.INVALID_KIND,
    ),
    "device_type": (_schema_of(DeviceType), ErrorCode.INVALID_DEVICE_TYPE),
    "fingerprint": (_schema_of(Fingerprint), ErrorCode.INVALID_FINGERPRINT),
    "name": (_schema_of(ManifestName), ErrorCode.INVALID_NAME),
    "run": (_schema_of(RunName), ErrorCode.INVALID_NAME),
    "process": (_schema_of(RunName), ErrorCode.INVALID_NAME),
    "id": ({"type": "string"}, None),
}
"""Schema of each path parameter, and the error code if it is malformed."""


class Calls(APIRouter):
    """The calls of one resource."""

    def call(
        self,
        method: str,
        path: str,
        *,
        needs: Right[C],
        answers: dict[int | str, dict[str, Any]],
        refuses: Sequence[ErrorCode] = (),
        body: type[object] | None = None,
        takes_bytes: bool = False,
        query: Sequence[dict[str, Any]] = (),
        tags: Sequence[str] = (),
    ) -> Callable[[Callable[[C], Awaitable[Response]]], Callable[[C], Awaitable[Response]]]:
        """Return a decorator that declares a handler as a call.

        Args:
            method: HTTP method.
            path: path after the router's prefix.
            needs: right that the caller needs.
            answers: OpenAPI description of the responses by status, except errors.
            refuses: error codes of the handler. Codes of `needs`, of path parameters and of reading
                a body are added.
            body: model of a JSON body, which the handler reads with `read_model`.
            takes_bytes: whether the body is an artifact.
            query: OpenAPI description of the query parameters.
            tags: tags in addition to the router's.
        """
        names = re.findall(r"{(\w+)}", path)
        codes = {*refuses, *needs.refusals}
        codes.update(code for name in names if (code := _PATH_PARAMETERS[name][1]) is not None)
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS[name][0]}
            for name in names
        ]
        extra: dict[str, Any] = {"parameters": [*parameters, *query]} if names or query else {}
        if body is not None or takes_bytes:
            codes.update(_BODY_ERRORS)
        if takes_bytes:
            extra["requestBody"] = {"required": True, **BYTES}
        if body is not None:
            codes.add(ErrorCode.INVALID_REQUEST)
            schema = TypeAdapter(body).json_schema(ref_template="#/components/schemas/{model}")
            schema.pop("$defs", None)
            extra["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        if (self.prefix + path).startswith(API_PREFIX):
            codes.add(ErrorCode.UNSUPPORTED_PROTOCOL)

        def declare(
            handler: Callable[[C], Awaitable[Response]],
        ) -> Callable[[C], Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                return await handler(await needs.admit(request))

            endpoint.__doc__ = handler.__doc__
            self.add_api_route(
                path,
                endpoint,
                methods=[method],
                name=getattr(handler, "__name__", None),
                tags=list(tags),
                response_class=Response,
                status_code=min(int(status) for status in answers),
                responses={**answers, **refusals(*sorted(codes, key=list(ErrorCode).index))},
                openapi_extra=extra,
            )
            return handler

        return declare


def key_of(request: Request) -> StoredKey:
    """Return the artifact key in the path, with its namespace.

    Raises:
        InvalidValueError: a segment is malformed.
    """
    return StoredKey.parse(**request.path_params)


def manifest_of(request: Request) -> ManifestName:
    """Return the manifest name in the path.

    Raises:
        InvalidValueError: the name is malformed.
    """
    return ManifestName(request.path_params["name"])


def json_answer(
    model: BaseModel,
    status_code: int = 200,
    *,
    headers: Mapping[str, str] = NO_STORE,
    exclude_none: bool = False,
) -> Response:
    """Return a response with a model as its body. By default, caches must not store it."""
    return Response(
        model.model_dump_json(exclude_none=exclude_none),
        status_code=status_code,
        headers=headers,
        media_type="application/json",
    )
