"""Describe Python code and the values that it reads, in text that is equal in every process.

The description of a function consists of its bytecode, its defaults, and every global and closure
variable that the bytecode reads, transitively. A value without a description raises
`UndescribableError`: if it were omitted, jobs with different values could compute the same key.
"""

import abc
import ast
import cmath
import dataclasses
import dis
import enum
import hashlib
import inspect
import linecache
import platform
import struct
import sys
import threading
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import _lru_cache_wrapper, partial
from importlib.util import resolve_name
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Final, cast

__all__ = ["CodeDescriber", "UndescribableError", "content_of", "package_of"]

_PLAIN: Final = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
)

_PURE: Final = frozenset(
    {
        *("abc", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum"),
        *("fractions", "functools", "itertools", "math", "numbers", "operator", "types"),
        *("typing", "warnings"),
    }
)
"""Modules of the standard library whose functions depend on their arguments alone."""

_IMPURE: Final = frozenset(
    {
        *("__import__", "breakpoint", "compile", "dir", "eval", "exec", "globals", "hash", "id"),
        *("input", "locals", "open", "vars"),
        *("dataclasses.fields", "typing.get_type_hints"),  # annotations
    }
)
"""Functions whose results depend on more than the descriptions of their arguments."""

_REFLECTION: Final = frozenset(
    {
        *("__builtins__", "__globals__", "__loader__", "__subclasses__", "_getframe"),
        *("currentframe", "f_back", "f_builtins", "f_globals", "f_locals", "gi_frame", "tb_frame"),
    }
)
"""Names through which code reads values that its description lacks."""

_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELLS: Final = frozenset(
    {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE", "LOAD_FROM_DICT_OR_DEREF"}
)
_OF_SCOPES: Final = _CELLS | (_GLOBALS - {"LOAD_GLOBAL"})
_REFUSED: Final = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_SKIPPED: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})
_IMPORTED: Final = "import "
"""Prefix of the first name of a chain, if the function imports it."""

_OMITTED_ATTRIBUTES: Final = frozenset(
    {
        *("__dict__", "__doc__", "__firstlineno__", "__module__", "__static_attributes__"),
        *("__weakref__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
        *("_abc_impl", "__dataclass_fields__", "__dataclass_params__"),
    }
)
"""Class attributes that a description omits. Code that reads one of them is refused, except for
`__dict__` and `__weakref__`. `_class` describes the fields of dataclasses, but not their types."""

_UNDESCRIBED: Final = frozenset(
    {
        *(_OMITTED_ATTRIBUTES - {"__dict__", "__weakref__"}),
        *("co_filename", "co_firstlineno", "co_lines", "co_linetable", "co_lnotab", "co_positions"),
    }
)
"""Omitted attributes of classes and functions, which described code must not read."""

_OF_MEMBER: Final = frozenset({"__objclass__", "_name_", "_sort_order_", "_value_"})
"""Attributes of an enum member that follow from its name, value and class."""

_MAX_ARRAY: Final = 4096
"""Maximum number of elements of a NumPy array."""

_DESCRIPTORS: Final = (WrapperDescriptorType, MethodDescriptorType)
"""Types of the methods of classes in C."""

_CALLABLES: Final = (FunctionType, BuiltinFunctionType, type, *_DESCRIPTORS)

_OF_PYBIND11: Final = ("PyCapsule", "pybind11_detail_function_record_")
"""Beginnings of the names of pybind11's classes for records of functions, before 3.0 and since."""

_OPTIONS: Final = ("noinline", "debug", "do_not_specialize", "do_not_specialize_on_alignment")
"""Arguments of `triton.jit` that a kernel's `cache_key` omits."""

_TUNERS: Final = "triton.runtime.autotuner"

_MEASURED: Final = frozenset(
    {
        *("bench_time", "best_config", "cache", "configs_timings", "do_bench", "nargs"),
        "restore_copies",
    }
)
"""Attributes that a tuner of Triton assigns when it runs, or uses only then."""

_MAX_OBJECTS: Final = 20_000
"""Maximum number of objects in one description. Code with more probably refers to a library."""

_ABSENT: Final = object()


class UndescribableError(ValueError):
    """A value has no description that is equal in every process. The message names the value."""


class CodeDescriber:
    """Describes values; a repeated object by its number. The compiler's own key covers the root
    packages `known`.
    """

    def __init__(self, *known: str) -> None:
        self._known = frozenset({"builtins", *known})
        # Numbers and objects by ID. Python cannot reuse the ID of an object that is kept alive.
        self._seen: dict[int, tuple[int, Any]] = {}
        self._names: dict[str, int] = {}  # of Triton's functions

    def describe(self, value: Any) -> str:
        """Describe a value. Raises `UndescribableError` if it refers to an indescribable value."""
        if value is _ABSENT:
            return "absent"
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}{_bits_of_nan(value)}"
        if (special := self.special(value)) is not None:
            return special
        if type(value) is tuple:  # not numbered: whether equal constants are one object varies
            return f"({', '.join(map(self.describe, value))})"
        number = len(self._seen)
        if (before := self._seen.setdefault(id(value), (number, value)))[0] != number:
            return f"#{before[0]}"
        if number >= _MAX_OBJECTS:
            raise UndescribableError("the code refers to too many objects")
        return f"#{number}={self._object(value)}"

    def special(self, value: Any) -> str | None:  # noqa: ARG002 - for subclasses
        """Return the description of a value of the compiler, or None for any other value."""
        return None

    def registered(self, function: Any) -> str:
        """Describe a function that the user registered with the compiler, like `describe`. Refuse a
        function without readable source.
        """
        inner = inspect.unwrap(function.func if isinstance(function, partial) else function)
        if isinstance(inner, FunctionType) and not self.is_known(str(inner.__module__)):
            file = inner.__code__.co_filename
            if not linecache.getline(file, inner.__code__.co_firstlineno):
                raise UndescribableError(f"{inner.__qualname__} has no readable source")
        return self.describe(function)

    def reads_state(self, function: Any) -> str:  # noqa: ARG002 - for subclasses
        """Return why a known function depends on more than its arguments, or ""."""
        return ""

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a function that reads undescribed values by the name of a global or attribute."""
        if found := _REFLECTION.intersection(names):
            raise UndescribableError(f"code reads {min(found)}")

    def is_known(self, module: str) -> bool:
        """Return whether the compiler's key or Python's version covers a module."""
        root = _root(module)
        return root in self._known or root.removeprefix("_") in _PURE

    def _object(self, value: Any) -> str:
        if type(value) in (list, dict, set, frozenset):
            return self._container(value)
        if type(value) in (staticmethod, classmethod):
            return f"{type(value).__name__}({self.describe(value.__func__)})"
        if type(value) is property:
            return f"property{self.describe((value.fget, value.fset, value.fdel))}"
        if isinstance(value, ModuleType):
            # Code may read any name of a module that it passes on, for example with `getattr`. A
            # program can add names to every module.
            raise UndescribableError(f"the module {value.__name__} is read as a whole")
        if type(value).__module__.partition(".")[0] == "numpy":
            return _array(value)
        if isinstance(value, _lru_cache_wrapper) and self.is_known(_module_of(value.__wrapped__)):
            value = value.__wrapped__
        if isinstance(value, _CALLABLES) or _is_kernel(value):
            return self._callable(value)
        return self._instance(value)

    def _container(self, value: Any) -> str:
        if type(value) is list:
            return f"list({', '.join(map(self.describe, value))})"
        if type(value) is dict:  # in order: code may iterate over it
            pairs = (f"{self.describe(k)}: {self.describe(v)}" for k, v in value.items())
            return f"dict({', '.join(pairs)})"
        if any(type(each) not in _PLAIN for each in value):
            raise UndescribableError("a set of other than plain values")
        return f"{type(value).__name__}({', '.join(sorted(map(self.describe, value)))})"

    def _callable(self, value: Any) -> str:
        if isinstance(value, _DESCRIPTORS):
            owner = value.__objclass__
            if not self.is_known(owner.__module__):
                raise UndescribableError(f"the class {owner.__qualname__} is in C")
            return f"{self.describe(owner)}.{value.__name__}"
        if isinstance(value, BuiltinFunctionType):
            return self._builtin(value)
        if _is_kernel(value):
            return self._kernel(value)
        code = getattr(value, "__code__", None)
        qualified = value.__qualname__ if code is None else code.co_qualname  # may be replaced
        name = f"{value.__module__}.{qualified}"
        if name.removeprefix("builtins.") in _IMPURE:
            raise UndescribableError(f"{name} reads more than its arguments")
        if self.is_known(_module_of(value)):
            if why := self.reads_state(value):
                raise UndescribableError(f"{name} {why}")
            closure = getattr(value, "__closure__", None) or ()
            cells = [content_of(cell, default=_ABSENT) for cell in closure]
            held = tuple(each for each in cells if not isinstance(each, ModuleType))
            own = vars(value) if isinstance(value, FunctionType) else {}
            added = {k: v for k, v in own.items() if not k.startswith("_") and self._is_added(v)}
            return f"{name} {platform.python_version()} {self.describe((held, added))}"
        return self._class(value) if isinstance(value, type) else self._function(value)

    def _builtin(self, value: BuiltinFunctionType) -> str:
        owner = value.__self__
        # The owner of pybind11's functions is a record that belongs to the compiled module.
        is_free = owner is None or isinstance(owner, ModuleType)
        if not is_free and not type(owner).__qualname__.startswith(_OF_PYBIND11):
            return f"method({self.describe(owner)}, {value.__name__})"
        module = value.__module__ or ""
        known = self.is_known(module)
        if value.__name__ in _IMPURE or (not known and _root(module) in sys.stdlib_module_names):
            raise UndescribableError(f"{module}.{value.__name__} reads more than its arguments")
        version = platform.python_version() if known else _file_of(module)
        return f"builtin {module}.{value.__name__} {version}"

    def _class(self, cls: type) -> str:
        kind = type(cls)
        if kind.__basicsize__ != type.__basicsize__ and not self.is_known(kind.__module__):
            raise UndescribableError(f"the class {cls.__qualname__} has a metaclass with C fields")
        if isinstance(cls, abc.ABCMeta) and vars(abc)["_get_dump"](cls)[0]:
            raise UndescribableError(f"the class {cls.__qualname__} has registered subclasses")
        bases = ", ".join(map(self.describe, cls.__bases__))
        made_by = "" if kind in (type, abc.ABCMeta, enum.EnumType) else f" {self.describe(kind)}"
        fields = "".join(
            f"field {name}={self.describe((each.default, each.default_factory))}"
            f"{self.describe(dict(each.metadata))} {each.init} {each.kw_only}; "
            for name, each in vars(cls).get("__dataclass_fields__", {}).items()
        )
        members = (
            f"{name}={self.describe(value)}"
            for name, value in vars(cls).items()
            if name not in _OMITTED_ATTRIBUTES and not _is_hash_of_dataclass(cls, name)
        )
        name = f"class {cls.__name__} {cls.__qualname__}"
        return f"{name}({bases}){made_by} {fields}{'; '.join(members)}"

    def _instance(self, value: Any) -> str:
        cls = type(value)
        if value is dataclasses.MISSING or cls.__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
            return "missing" if value is dataclasses.MISSING else "made by the factory"
        if cls.__name__ == "_tuplegetter":  # an attribute of a named tuple
            return f"element {value.__reduce__()[1][0]}"
        if _is_named_tuple(cls):
            return f"instance({self.describe(cls)}, {self.describe(tuple(value))})"
        if isinstance(value, MethodType) or cls.__name__ == "BoundConstexprFunction":
            return f"method({self.describe(value.__self__)}, {self.describe(value.__func__)})"
        if cls is partial:
            parts = (value.func, value.args, value.keywords, vars(value))
            return f"partial({self.describe(parts)})"
        if isinstance(value, enum.Enum):
            own = {k: v for k, v in vars(value).items() if k not in _OF_MEMBER}
            content = f"{value.name}, {self.describe(value.value)}, {self.describe(own)}"
        elif tuner := [each for each in cls.__mro__ if each.__module__ == _TUNERS]:
            # torch compiles its kernel with its configurations. It calls no method of a subclass.
            own = {k: v for k, v in vars(value).items() if k not in _MEASURED}
            cls, content = tuner[0], self.describe(own)
        elif not _is_all_in_dict(cls) or not hasattr(value, "__dict__"):
            raise UndescribableError(f"a {cls.__module__}.{cls.__qualname__}")
        else:
            content = self.describe(vars(value))
        return f"instance({self.describe(cls)}, {content})"

    def _function(self, function: FunctionType) -> str:
        context = self._context(function, self._chains(function))
        own = dict(vars(function))
        given = f"; {self.describe(own)}" if own else ""
        names = f"{function.__name__} {function.__qualname__}"
        return f"function({names}; {self._code(function.__code__)}; {context}{given})"

    def _kernel(self, kernel: Any) -> str:
        """Describe a Triton function by its text and by the outer values that Triton reads."""
        kind = type(kernel).__qualname__
        if not self.is_known(type(kernel).__module__):
            kind = self.describe(type(kernel))
        name = f"{kernel.__module__}.{getattr(kernel, '__qualname__', kernel.__name__)}"
        text = hashlib.sha256(str(getattr(kernel, "src", "")).encode()).hexdigest()
        if kind == "ConstexprFunction" and not self.is_known(str(kernel.__module__)):
            return f"{kind} {self.describe(kernel.fn)}"  # Python runs it
        # Triton compiles only the first of two functions with one name that a kernel calls.
        names = dict.fromkeys((name, kernel.__name__, repr(kernel)))
        numbers = [self._names.setdefault(each, len(self._names)) for each in names]
        options = [f"{each}={getattr(kernel, each, None)!r}" for each in _OPTIONS]
        own = f"{text} {numbers} {' '.join(options)}"
        if self.is_known(str(kernel.__module__)):
            return f"{kind} {name} {platform.python_version()} {own}"
        try:
            key, tree, scope = kernel.cache_key, kernel.parse(), _scope_of(kernel)
        except Exception as error:
            raise UndescribableError(f"{name}: {error!r}") from error
        given = [
            self.describe(each.default)
            for each in kernel.signature.parameters.values()
            if each.default is not each.empty
        ]
        context = self._context(kernel.fn, _chains_of_text(scope, tree), scope)
        return f"{kind}({key} {own} {given}; {context})"

    def _context(
        self,
        function: FunctionType,
        chains: Iterable[tuple[str, ...]],
        scope: Mapping[str, Any] | None = None,
    ) -> str:
        """Describe the defaults of a function and the outer values that it reads by `chains`. With
        a scope, Triton compiles the function, and reads these values by name.
        """
        defaults = [self.describe(function.__defaults__), self.describe(function.__kwdefaults__)]
        read = [
            f"{'.'.join(chain)}={self._read(function, chain, scope)}"
            for chain in dict.fromkeys(chains)
        ]
        return f"{', '.join(defaults)}; {'; '.join(read)}"

    def _read(
        self, function: FunctionType, chain: tuple[str, ...], scope: Mapping[str, Any] | None
    ) -> str:
        value = _look_up(function, chain[0], scope)
        if value is hash and chain == ("hash",) and function.__code__.co_name == "__hash__":
            return "hash"  # its number only places an object in a table, as that of a dataclass
        if value is _ABSENT and chain[0].startswith(_IMPORTED):
            raise UndescribableError(f"{function.__qualname__}: {chain[0]} was not imported yet")
        added: Any = None
        for name in chain[1:]:
            # Python may read any attribute of an object, so describe the whole object. A kernel
            # reads only these attributes.
            is_path = isinstance(value, ModuleType) or _is_kernel(value) or self.is_path(value)
            if scope is None and not is_path:
                added = self._added(value, name)
                break
            try:
                value = getattr(value, name, _ABSENT)
            except Exception as error:
                raise UndescribableError(f"{'.'.join(chain)}: {error!r}") from error
        module = chain[0].removeprefix(_IMPORTED)
        if value is _ABSENT and module != chain[0] and not self.is_known(module):
            raise UndescribableError(f"{function.__qualname__}: {'.'.join(chain)} does not exist")
        try:
            return self.describe(value) + ("" if added is None else self.describe(added))
        except UndescribableError as error:
            raise UndescribableError(
                f"{'.'.join(chain)} of {function.__qualname__}: {error}"
            ) from error

    def _added(self, owner: Any, name: str) -> Any:
        """Return an attribute of a known class if a program may have set it, or None."""
        if not (isinstance(owner, type) and self.is_known(owner.__module__)):
            return None
        value = inspect.getattr_static(owner, name, None)
        value = getattr(value, "__func__", value)  # static and class methods
        return value if self._is_added(value) else None

    def _is_added(self, value: Any) -> bool:
        """Return whether a program may have set this attribute of a known class or function."""
        if isinstance(value, (*_PLAIN, FunctionType, list, tuple, dict, SimpleNamespace)):
            return True
        module = type(value).__module__
        return not self.is_known(module) and _root(module) not in sys.stdlib_module_names

    def is_path(self, value: Any) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether a value is only a step in a chain, like a module."""
        return False

    def _chains(self, function: FunctionType) -> Iterator[tuple[str, ...]]:
        """Yield the outer names that a function reads, each with the attributes that follow it."""
        free = function.__code__.co_freevars
        imported: dict[str, dict[tuple[str, ...], None]] = {}
        steps: list[list[dis.Instruction]] = []
        for each in _codes(function.__code__):
            self.check_names(each.co_names)
            instructions = [s for s in dis.get_instructions(each) if s.opname not in _SKIPPED]
            self.check_attributes(each, instructions)
            steps.append(instructions)
            for name, source in self._imported(function, instructions):
                imported.setdefault(name, {})[source] = None
        for instructions in steps:
            chain: tuple[str, ...] = ()
            for step in instructions:
                if chain and step.opname in _ATTRIBUTES:
                    chain += (str(step.argval),)
                    continue
                if chain and not _is_left_for_thread(function, chain, step):
                    yield chain
                chain = ()
                if step.opname in _REFUSED:
                    raise UndescribableError(f"{function.__qualname__} assigns to a global")
                may_be_local = "LOAD_FAST" in step.opname or step.opname in _OF_SCOPES
                names = step.argval if type(step.argval) is tuple else (step.argval,)
                # Since 3.13, one instruction may load two names, or store one and load another.
                for name in names[step.opname == "STORE_FAST_LOAD_FAST" :]:
                    # A name may be bound in several places, also in different scopes.
                    sources = [*imported.get(name, ())] if may_be_local else []
                    if step.opname in _GLOBALS or (step.opname in _CELLS and name in free):
                        sources.append((name,))
                    yield from filter(None, (chain, *sources[:-1]))
                    chain = sources[-1] if sources else ()

    def check_attributes(self, code: CodeType, instructions: list[dis.Instruction]) -> None:
        """Refuse code that reads omitted attributes, also by `getattr` with a constant name."""
        strings = {each for each in code.co_consts if type(each) is str}
        loaded = {step.argval for step in instructions if step.opname in _ATTRIBUTES}
        found = (strings & (_REFLECTION | _UNDESCRIBED)) | (loaded & _UNDESCRIBED)
        if code.co_name != "__hash__":  # others would read a number that differs in each process
            found |= (strings | loaded) & {"__hash__"}
        if found:
            raise UndescribableError(f"code reads {min(found)}")

    def _imported(
        self, function: FunctionType, instructions: list[dis.Instruction]
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the names that a function imports, each with its chain."""
        base: tuple[str, ...] = ()
        chain: tuple[str, ...] = ()
        for at, step in enumerate(instructions):
            if step.opname == "IMPORT_NAME":
                level, names = instructions[at - 2].argval, instructions[at - 1].argval
                name = _absolute(function, level, step.argval)
                if not (self.is_known(name) or name in sys.modules):
                    raise UndescribableError(f"{function.__qualname__} imports {name}")
                module = name if names else _root(name)
                base, chain = (f"{_IMPORTED}{module}",) if names else (), (f"{_IMPORTED}{module}",)
            elif step.opname == "IMPORT_FROM":
                chain = (*(base or chain), step.argval)
            elif step.opname.startswith("STORE_") and chain:
                yield step.argval[0] if type(step.argval) is tuple else step.argval, chain
                chain = base
            elif step.opname not in {"SWAP", "POP_TOP"}:
                base = chain = ()

    def _code(self, code: CodeType) -> str:
        consts = [
            self._code(each) if isinstance(each, CodeType) else self.describe(each)
            for each in code.co_consts
        ]
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        places = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        table = getattr(code, "co_exceptiontable", b"")
        return f"{code.co_code.hex()} {table.hex()} {consts} {names} {places}"


class _Empty:
    """An instance has the minimum size: no slots and no C fields."""


def _is_all_in_dict(cls: type) -> bool:
    """Return whether `__dict__` holds an instance's whole state: no slots and no C fields."""
    if cls is SimpleNamespace:
        return True
    python = sys.stdlib_module_names
    return cls.__basicsize__ == _Empty.__basicsize__ and all(
        "__slots__" not in vars(each) and _root(each.__module__) not in python
        for each in cls.__mro__
        if each not in (object, abc.ABC, typing.Generic)
    )


def _root(module: str) -> str:
    return module.partition(".")[0]


def _absolute(function: FunctionType, level: int, name: str) -> str:
    """Return the name of a module that a function imports, relative to its package if level > 0."""
    if not level:
        return name
    package = str(function.__globals__.get("__package__") or "")
    try:
        return resolve_name("." * level + name, package)
    except ImportError as error:
        raise UndescribableError(f"{function.__qualname__}: {error}") from error


def _is_kernel(value: Any) -> bool:
    # Check the class first: objects with `__getattr__` may have any attribute.
    is_tritons = any(_root(each.__module__) == "triton" for each in type(value).__mro__)
    return is_tritons and isinstance(getattr(value, "fn", None), FunctionType)


def _module_of(value: Any) -> str:
    """Return the module that contains the code of a value, even if `__module__` was replaced."""
    return str(getattr(value, "__globals__", {}).get("__name__") or value.__module__)


def content_of(cell: CellType, *, default: Any = None) -> Any:
    """Return the content of a closure's cell, or `default` if nothing is assigned to it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def package_of(function: FunctionType) -> str:
    """Return the package in which a function runs, even if `__module__` was replaced. Empty for a
    function that was generated in a module without a name.
    """
    return _root(str(function.__globals__.get("__name__", "")))


def _file_of(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        raise UndescribableError(f"the module {module} has no file")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _is_hash_of_dataclass(cls: type, name: str) -> bool:
    """Return whether a member is the `__hash__` that `dataclass` generated."""
    code = getattr(vars(cls)[name], "__code__", None)
    is_generated = code is not None and code.co_filename == "<string>"
    return name == "__hash__" and is_generated and dataclasses.is_dataclass(cls)


def _is_named_tuple(cls: type) -> bool:
    return cls.__bases__ == (tuple,) and hasattr(cls, "_fields")


def _array(value: Any) -> str:
    """Describe a plain NumPy array, scalar or dtype. Refuse other objects and large arrays."""
    plain = getattr(getattr(value, "dtype", None), "kind", "") in "biufcSU"
    plain = plain and type(value).__module__ == "numpy"  # masks and records hold more
    if type(value).__name__ == "dtype":
        return f"{value!r}"
    if not plain or not hasattr(value, "tolist") or value.size > _MAX_ARRAY:
        raise UndescribableError(f"a {type(value).__module__}.{type(value).__qualname__}")
    layout = f"{value.dtype} {value.shape} {value.strides}"
    return f"{type(value).__name__} {layout} {value.tobytes().hex()}"


def _bits_of_nan(value: Any) -> str:
    """Return the bits of a NaN, which its text omits, or an empty string for any other value."""
    if type(value) not in (float, complex) or not cmath.isnan(value):
        return ""
    return struct.pack("<2d", value.real, value.imag).hex()


def _look_up(function: FunctionType, name: str, scope: Mapping[str, Any] | None = None) -> Any:
    if name.startswith(_IMPORTED):
        return sys.modules.get(name.removeprefix(_IMPORTED), _ABSENT)
    if scope is not None and name in scope:
        return scope[name]
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        return content_of(cells[name], default=_ABSENT)
    untyped: Any = function  # typeshed has no `__builtins__`
    return function.__globals__.get(name, untyped.__builtins__.get(name, _ABSENT))


def _is_left_for_thread(
    function: FunctionType, chain: tuple[str, ...], step: dis.Instruction
) -> bool:
    """Return whether a step assigns a value for this thread, which reads none."""
    is_only = len(chain) == 1 and step.opname == "STORE_ATTR"
    return is_only and type(_look_up(function, chain[0])) is threading.local


def _scope_of(kernel: Any) -> Mapping[str, Any]:
    """Return the outer values that Triton reads. In 3.3, they do not include closures."""
    if hasattr(kernel, "get_capture_scope"):
        return cast("Mapping[str, Any]", kernel.get_capture_scope())
    return cast("Mapping[str, Any]", kernel.__globals__)


def _chains_of_text(scope: Mapping[str, Any], tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """Yield the outer names that the text of a kernel reads, each with its attributes. Triton
    compiles the text, not the bytecode, and reads the global until a local name is assigned.
    """
    definition: Any = tree.body[0]  # the bytecode may be that of a wrapper
    arguments = {each.arg for each in ast.walk(definition.args) if isinstance(each, ast.arg)}
    local = {
        each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and _is_assigned(each)
    }
    for chain in _Chains().of(tree):
        if chain[0] not in arguments and (chain[0] in scope or chain[0] not in local):
            yield chain


def _is_assigned(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


class _Chains(ast.NodeVisitor):
    """Collect the names in a tree, each with the attributes that follow it."""

    def of(self, tree: ast.AST) -> list[tuple[str, ...]]:
        """Return the names, in the order of the text."""
        self._found: list[tuple[str, ...]] = []
        self.visit(tree)
        return self._found

    def visit_Name(self, node: ast.Name) -> None:
        self._found.append((node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self._found.append((inner.id, *reversed(names)))
        else:
            self.visit(inner)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
