"""What a region asks this server for."""

from fastapi import Response

from graphstash_schema.protocol import ADMIN_PREFIX
from graphstash_schema.region import UpstreamState
from graphstash_server.api.calls import KNOWN, Call, Calls, json_answer

__all__ = ["router"]

router = Calls(prefix=ADMIN_PREFIX, tags=["administration"])


@router.call("GET", "/upstream", needs=KNOWN, answers={200: {"model": UpstreamState}})
async def get_state(call: Call) -> Response:
    """Return the server's identifier, and the withdrawals and policies of the namespaces that the
    caller may read. Regions ask for it every few seconds.
    """
    return json_answer(await call.context.ownership.read(may_read=call.may_read))
