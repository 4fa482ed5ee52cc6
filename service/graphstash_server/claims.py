"""ClaimRule: which claims of an identity provider's token give which grants."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from graphstash_schema import MAX_GRANTS, Grant

__all__ = ["ClaimRule"]


def _grant(value: Any) -> Any:
    return Grant.parse(value) if isinstance(value, str) else value


class ClaimRule(BaseModel):
    """Gives grants to whoever has all of some claims.

    Attributes:
        claims: claim -> what its value must be; `*` stands for any characters. One value of a list
            is enough. Not empty: a provider of the whole world signs tokens for everybody.
        grants: as `<scope>:<pattern>`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    claims: dict[str, str] = Field(min_length=1)
    grants: tuple[Annotated[Grant, BeforeValidator(_grant)], ...] = Field(
        min_length=1, max_length=MAX_GRANTS
    )

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if all(set(pattern) <= {"*"} for pattern in self.claims.values()):
            raise ValueError("a rule needs a claim with a value: `*` alone fits everybody")
        return self

    def fits(self, claims: Mapping[str, Any]) -> bool:
        """Whether verified claims are what the rule asks for."""
        return all(
            any(_matcher(pattern).fullmatch(text) for text in _texts(claims.get(name)))
            for name, pattern in self.claims.items()
        )


def _texts(value: Any) -> list[str]:
    """The values of a claim as texts; an absent claim and an object have none."""
    if isinstance(value, list):
        return [text for each in value if not isinstance(each, list) for text in _texts(each)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, str | int):
        return [str(value)]
    return []


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> re.Pattern[str]:
    # Not fnmatch: `[` and `?` are characters like others in a branch or a repository.
    # What stands between two stars is looked for once, where it comes first: going back to later
    # places finds nothing more, and a long claim would stop the server.
    first, *others = map(re.escape, re.split(r"\*+", pattern))
    if not others:
        return re.compile(first)
    *between, last = others
    found = "".join(f"(?>.*?{each})" for each in between)
    return re.compile(first + found + ".*" + last, re.DOTALL)
