"""Actions of the dashboard: forms that withhold, delete, pin, limit, and manage tokens.

A form needs this server's Origin, a browser session, and a value that only pages of this session
contain, so that no other page can send it. An action needs the rights of the API's equivalent call,
and the audit log names the visitor.
"""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Final, NamedTuple

from pydantic import ByteSize, TypeAdapter, ValidationError

from graphstash_schema import (
    ErrorCode,
    Grant,
    ManifestName,
    Namespace,
    ReportReason,
    ReportRequest,
    Scope,
    TokenIssued,
    TokenRequest,
)
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.pages.sign_in import check_origin, read_form
from graphstash_server.pages.visitor import Visitor, unauthenticated, visitor_of
from graphstash_server.reading.representation import absent

__all__ = ["ACTIONS", "Done", "act"]

Form = Mapping[str, str]

_MAX_DAYS: Final = 3650
_SIZE: Final = TypeAdapter(ByteSize)


class Done(NamedTuple):
    """The result of an action: the path of the page to show, or a new token to show once."""

    path: str = "/"
    issued: TokenIssued | None = None


async def act(visitor: Visitor, action: str) -> tuple[Visitor, Done]:
    """Carry out a form's action. Return the visitor, authenticated again after the form arrived.

    Raises:
        InvalidValueError: a field is malformed.
        ServerError: 400 for an invalid field, 401 without a session, 403 for a form of another page
            or without the right, 404 for an absent object, 408, 413, 503, 507.
    """
    request = visitor.request
    check_origin(request)
    if visitor.session is None:
        raise unauthenticated()
    form = await read_form(visitor)
    visitor = await visitor_of(request)  # the session may have ended while the form arrived
    if visitor.session is None:
        raise unauthenticated()
    if not hmac.compare_digest(form.get("csrf", "").encode(), visitor.form_token.encode()):
        raise ServerError(
            ErrorCode.FORBIDDEN,
            "the form is not of a page of this browser session: open the page again",
        )
    if action in _BY_OWNER:
        visitor.context.ownership.require()
    return visitor, await ACTIONS[action](visitor, form)


async def _withhold(visitor: Visitor, form: Form) -> Done:
    key = await _key(visitor, form)
    try:
        report = ReportRequest(
            key=key.key,
            digest=form.get("digest", ""),
            reason=ReportReason(form.get("reason", "")),
        )
    except ValueError:
        raise _invalid("the digest or the reason is missing: open the artifact's page") from None
    reply = await visitor.context.quarantine.report(
        key,
        report,
        actor=visitor.actor,
        party=visitor.principal.party,
        may_withhold=True,
        may_decide=True,
    )
    if not reply.found:
        raise absent(key)
    return Done(f"/?namespace={key.namespace}#quarantine")


async def _release(visitor: Visitor, form: Form) -> Done:
    key = await _key(visitor, form)
    if not await visitor.context.quarantine.release(key, actor=visitor.actor):
        raise ServerError(ErrorCode.NOT_FOUND, f"artifact {key.key} is not withheld")
    return Done(f"/artifacts/{key.namespace}/{key.key}")


async def _delete(visitor: Visitor, form: Form) -> Done:
    key = await _key(visitor, form)
    digest = form.get("digest", "")
    if not digest:
        raise _invalid("the digest is missing: open the artifact's page")
    if not await visitor.context.artifacts.delete(key, actor=visitor.actor, digest=digest):
        raise ServerError(
            ErrorCode.NOT_FOUND,
            f"there is no artifact {key.key} with the digest {digest[:80]}: it was deleted or "
            "replaced after the page was shown",
        )
    return Done(f"/?namespace={key.namespace}#recent")


async def _pin(visitor: Visitor, form: Form) -> Done:
    namespace, job = await _administered(visitor, form), ManifestName(form.get("job", ""))
    days = _days(form, "a pin")
    begin = max(visitor.now, visitor.context.plausible_clock())
    count = await visitor.context.pins.pin(
        namespace,
        job,
        until=begin + days,
        actor=visitor.actor,
    )
    return _of_job(namespace, job, count)


async def _unpin(visitor: Visitor, form: Form) -> Done:
    namespace, job = await _administered(visitor, form), ManifestName(form.get("job", ""))
    return _of_job(
        namespace, job, await visitor.context.pins.unpin(namespace, job, actor=visitor.actor)
    )


def _of_job(namespace: Namespace, job: ManifestName, count: int) -> Done:
    if not count:
        raise ServerError(ErrorCode.NOT_FOUND, f"the job {job} has no manifest in {namespace}")
    return Done(f"/jobs/{namespace}/{job}")


async def _limit(visitor: Visitor, form: Form) -> Done:
    visitor.require_administrator()
    namespace, text = Namespace(form.get("namespace", "")), form.get("limit", "").strip()
    try:
        limit = int(_SIZE.validate_python(text)) if text else None
        await visitor.context.policies.change(namespace, {"limit_bytes": limit}, visitor.actor)
    except ValidationError:
        raise _invalid(f"{text!r} is no size above 0: write 10GiB, or nothing for none") from None
    return Done(f"/?namespace={namespace}#store")


async def _create_token(visitor: Visitor, form: Form) -> Done:
    """Create a token that does not outlive the visitor's.

    The visitor must enter it again: a stolen cookie is valid for an hour, a token for years.
    """
    visitor.require_administrator()
    session = visitor.session
    if session is None or not await visitor.context.sessions.is_token_of(
        session, form.get("token", "").strip()
    ):
        raise ServerError(
            ErrorCode.FORBIDDEN, "a new token needs the token with which you signed in: paste it"
        )
    ends = [visitor.now + _days(form, "a token of this page")]
    if session.principal.expires_at is not None:
        ends.append(session.principal.expires_at)
    try:
        request = TokenRequest(
            description=form.get("description", ""),
            grants=tuple(map(Grant.parse, form.get("grants", "").replace(",", " ").split())),
            expires_at=min(ends),
        )
    except ValidationError:
        raise _invalid("a token needs a description of one line, and grants") from None
    issued = await visitor.context.tokens.create(
        request, actor=visitor.actor, token_id=form.get("id", "")
    )
    return Done("/tokens", issued)


async def _revoke_token(visitor: Visitor, form: Form) -> Done:
    visitor.require_administrator()
    token_id = form.get("id", "")
    if await visitor.context.tokens.revoke(token_id, actor=visitor.actor) is None:
        raise ServerError(ErrorCode.NOT_FOUND, "there is no token of that id")
    visitor.context.access.forget_token(token_id)
    return Done("/tokens")


ACTIONS: Final[dict[str, Callable[[Visitor, Form], Awaitable[Done]]]] = {
    "withhold": _withhold,
    "release": _release,
    "delete": _delete,
    "pin": _pin,
    "unpin": _unpin,
    "limit": _limit,
    "create-token": _create_token,
    "revoke-token": _revoke_token,
}
"""Actions by the end of their path."""

_BY_OWNER: Final = frozenset({"delete", "limit", "create-token"})
"""Actions that a region leaves to its upstream."""


async def _administered(visitor: Visitor, form: Form) -> Namespace:
    """Return the form's namespace, if the visitor may administer it."""
    namespace = await visitor.enter(form.get("namespace", ""))
    if not await visitor.may(Scope.ADMIN, namespace):
        raise ServerError(
            ErrorCode.FORBIDDEN,
            f"{visitor.principal.name} may not administer namespace {namespace}: sign in with a "
            f"token with a grant such as admin:{namespace}",
        )
    return namespace


async def _key(visitor: Visitor, form: Form) -> StoredKey:
    namespace = await _administered(visitor, form)
    return StoredKey.parse_path(f"{namespace}/{form.get('key', '')}")


def _days(form: Form, what: str) -> timedelta:
    days = form.get("days", "")
    if not (days.isascii() and days.isdecimal() and len(days) <= 8 and 1 <= int(days) <= _MAX_DAYS):
        raise _invalid(f"{what} lasts from 1 to {_MAX_DAYS} days")
    return timedelta(days=int(days))


def _invalid(detail: str) -> ServerError:
    return ServerError(ErrorCode.INVALID_REQUEST, detail)
