"""A routed request and its response."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from graphstash.testing.failures import ServerCall
from graphstash_schema import (
    ArtifactKey,
    Digest,
    ErrorCode,
    InvalidValueError,
    LookupRequest,
    ManifestUpdate,
    Namespace,
    Problem,
)

__all__ = ["Answer", "RefusalError", "Request", "Where", "problem_answer"]

_Model = TypeVar("_Model", bound=BaseModel)

Where: TypeAlias = tuple[Namespace, ArtifactKey]


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose path matched a route. Parts that its path and body do not name are empty."""

    operation: ServerCall
    where: Where
    words: Mapping[str, str]
    query: str
    headers: Mapping[str, str]
    body: bytes
    is_gone: Callable[[], bool]

    def parse(self, model: type[_Model]) -> _Model:
        """Parse the body as a model, or raise `RefusalError`."""
        try:
            return model.model_validate_json(self.body or b"{}")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, InvalidValueError):
                raise cause from None
            where = ".".join(map(str, first["loc"])) or "body"
            raise RefusalError(ErrorCode.INVALID_REQUEST, f"{where}: {first['msg']}") from None

    def keys(self, model: type[LookupRequest | ManifestUpdate], limit: int) -> list[ArtifactKey]:
        """Return the distinct keys in the body; raise `RefusalError` for more than `limit`."""
        if (count := self.body.count(b"{") - 1) > limit:
            raise RefusalError(ErrorCode.TOO_MANY_KEYS, f"{count} keys: at most {limit}")
        return list(dict.fromkeys(self.parse(model).keys))


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: status, headers, and a body as bytes or as a model to serialize."""

    status: int
    body: bytes | BaseModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class RefusalError(Exception):
    """The server refuses a request."""

    def __init__(self, code: ErrorCode, detail: str, **digests: Digest) -> None:
        super().__init__(detail)
        self.code = code
        self.digests = {name: str(digest) for name, digest in digests.items()}


def problem_answer(error: RefusalError | InvalidValueError) -> Answer:
    """Return the problem document for a refusal."""
    problem = Problem.of(error.code, str(error), request_id="fake")
    if isinstance(error, RefusalError):
        problem = problem.model_copy(update=error.digests)
    is_unauthenticated = error.code is ErrorCode.UNAUTHENTICATED
    headers = {"WWW-Authenticate": 'Bearer realm="graphstash"'} if is_unauthenticated else {}
    return Answer(problem.status, problem, headers)
