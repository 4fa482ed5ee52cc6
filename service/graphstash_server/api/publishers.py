"""Publishers: whose rights an upstream checks beside those of the region that sends an artifact."""

from pydantic import ValidationError

from graphstash_schema import AccessKind, ErrorCode, Scope
from graphstash_schema.protocol import HEADER_PUBLISHER
from graphstash_schema.region import MAX_PUBLISHER_GRANTS, Publisher
from graphstash_server.api.calls import NamespaceCall
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.principals import Principal

__all__ = ["check_publisher", "publisher_of"]


def publisher_of(call: NamespaceCall) -> Publisher:
    """Return the caller as the upstream has to judge it. Other grants than on this namespace stay
    in the region.
    """
    allowing = [each for each in call.principal.grants if each.allows(Scope.WRITE, call.namespace)]
    allowing.sort(key=lambda each: not each.namespaces.is_exact)
    return Publisher(token=call.principal.token, grants=tuple(allowing[:MAX_PUBLISHER_GRANTS]))


async def check_publisher(call: NamespaceCall) -> None:
    """Refuse an artifact that a region sends for a publisher who may not write here, or whose token
    was revoked since. An expired token is accepted: it was valid when the region checked it.

    Raises:
        ServerError: 403.
    """
    header = call.request.headers.get(HEADER_PUBLISHER)
    if header is None:
        return
    try:
        publisher = Publisher.model_validate_json(header)
    except ValidationError as error:
        raise _refused(f"{HEADER_PUBLISHER} is malformed: {error.errors()[0]['msg']}") from None
    stated = Principal(kind=AccessKind.TOKEN, name="publisher", grants=publisher.grants)
    if not stated.may(Scope.WRITE, call.namespace, call.policy):
        raise _refused(f"the publisher may not write to {call.namespace}")
    if (
        publisher.token is not None
        and await call.context.access.tokens.find(publisher.token) is None
    ):
        raise _refused(f"the publisher's token {publisher.token} is unknown or revoked")


def _refused(why: str) -> ServerError:
    return ServerError(ErrorCode.PUBLISHER_REFUSED, why)
