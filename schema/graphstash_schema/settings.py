"""Derive options, help, the reference and error messages from the declarations of settings.

A setting is a field of a dataclass (client) or of a pydantic model (server). The docstring below
the field describes it. An `Option` in its metadata makes it an option of a command.
"""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from graphstash_schema.option import Option

__all__ = ["Declaration", "annotated_option", "declarations", "why_refused", "with_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_GENERAL: Final = re.compile(
    "byte_size.*|(int|float|bool)_.*|(greater|less)_than.*|finite_number|enum|literal_error"
    "|string_pattern_mismatch"
)
"""Types of pydantic's errors that `why_refused` rewords. It keeps all other messages."""


class Declaration(NamedTuple):
    """A setting.

    Attributes:
        meaning: the docstring below the field, as one line.
        kind: type of the values.
        words: all valid values, if they are words such as `true`. Otherwise empty.
        limits: limits of a number, a size or a list, such as `above 0 to 60`, or "".
        option: the setting's option, if it has one.
        find_default: returns the default value.
    """

    meaning: str
    kind: Any
    words: tuple[str, ...]
    limits: str
    option: Option | None
    find_default: Callable[[], Any]

    @property
    def default(self) -> str:
        """Default value as text, or "" for none. Reading it may import packages of an extra."""
        return _text(self.find_default())


def declarations(model: type[Any]) -> Mapping[str, Declaration]:
    """Return the settings that a class declares, by name."""
    own: dict[str, Any]
    if issubclass(model, BaseModel):
        own = {name: _of_model(field) for name, field in model.model_fields.items()}
    else:
        own = {each.name: _of_dataclass(each) for each in fields(model) if "rule" in each.metadata}
    meanings = _meanings(model.__module__)
    return {
        name: Declaration(meaning, *own[name]) for name, meaning in meanings.items() if name in own
    }


def annotated_option(model: type[Any], name: str) -> Any:
    """Return the annotation of a command's parameter for one setting of a class."""
    import typer  # slow to import, and only commands need it

    declared = declarations(model)[name]
    option = declared.option or Option()
    help_ = option.help or declared.meaning
    if not option.flags:
        if declared.words:
            help_ += f" Values: {', '.join(declared.words)}."
        if "Default:" not in help_ and (default := declared.default):
            help_ += f" [default: {default}]"
        kind: Any = Path if Path in (declared.kind, *get_args(declared.kind)) else str
        return Annotated[kind | None, typer.Option(option.spelled(name), help=help_)]
    on, off = option.flags_for(value=True), option.flags_for(value=False)
    flags = ["/".join(pair) for pair in zip(on, off, strict=True)] if on and off else on or off
    callback = None if on else _negated
    return Annotated[bool | None, typer.Option(*flags, help=help_, callback=callback)]


def with_options(model: type[Any]) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command all options of a class, as keyword arguments.

    An option that the command line does not contain is None.
    """

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=annotated_option(model, name),
            )
            for name, declared in declarations(model).items()
            if declared.option is not None
        ]
        vars(command)["__signature__"] = signature.replace(parameters=[*own, *options])
        return command

    return decorate


def _negated(value: Any) -> bool | None:
    return None if value is None else not value


def _of_model(field: FieldInfo) -> tuple[Any, ...]:
    option = next((each for each in field.metadata if isinstance(each, Option)), None)
    default = partial(field.get_default, call_default_factory=True)
    return field.annotation, _words(field), _limits(field), option, default


def _of_dataclass(field: Field[Any]) -> tuple[Any, ...]:
    rule, option = field.metadata["rule"], field.metadata["option"]

    def default() -> Any:
        usual: Any = field.default if field.default_factory is MISSING else field.default_factory()
        return ByteSize(usual) if rule.is_size else usual

    return field.type, rule.words, rule.limits, option, default


@cache
def _meanings(module: str) -> dict[str, str]:
    """Return the docstring below each field of a module's classes, by name of the field.

    pydantic's `use_attribute_docstrings` would parse the module once per class, at each start.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        field.target.id: inspect.cleandoc(str(text.value.value)).replace("\n", " ")
        for group in tree.body
        if isinstance(group, ast.ClassDef)
        for field, text in itertools.pairwise(group.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _text(value: Any) -> str:
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace(str(Path.home()), "~")


def _limits(field: FieldInfo) -> str:
    bounds = {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in ("gt", "ge", "le", "max_length")
        if getattr(rule, name, None) is not None
    }
    if "max_length" in bounds:
        return f"at most {bounds['max_length']}"
    least = f"above {bounds['gt']:,.9g}" if "gt" in bounds else f"{bounds.get('ge', 0):,.9g}"
    if "le" in bounds:
        return f"{least} to {bounds['le']:,.9g}"
    if "gt" in bounds:
        return least
    return f"{least} or more" if "ge" in bounds else ""


def why_refused(problem: Any, field: FieldInfo | None) -> str:
    """Return a sentence that says which values are valid.

    Args:
        problem: one of pydantic's error details.
        field: the setting, or None if it does not exist.
    """
    said = str(problem["msg"]).removeprefix("Value error, ")
    if field is None or _GENERAL.fullmatch(problem["type"]) is None:
        return said
    if words := _words(field):
        return f"it takes {' or '.join([', '.join(words[:-1]), words[-1]])}"
    types = {get_origin(field.annotation) or field.annotation, *get_args(field.annotation)}
    kinds = {
        ByteSize: "a size such as 500MB or 10GiB",
        int: "a whole number",
        float: "a number",
    }
    kind = next((text for kind, text in kinds.items() if kind in types), "")
    if not kind:
        return said
    limits = _limits(field)
    return f"it takes {kind}" + (f" ({limits})" if limits else "")


def _words(field: FieldInfo) -> tuple[str, ...]:
    return tuple(_each_word(field))


def _each_word(field: FieldInfo) -> Iterator[str]:
    kind: Any = field.annotation
    kinds = [each for each in get_args(kind) if each is not type(None)]
    if kinds and get_origin(kind) not in (Literal, tuple, dict):
        kind = kinds[0]  # of `X | None`
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif kind is bool:
        yield from ("true", "false")
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        yield from kind
    for rule in field.metadata:
        if words := re.fullmatch(r"\^\(([\w|]+)\)\$", getattr(rule, "pattern", None) or ""):
            yield from words[1].split("|")
