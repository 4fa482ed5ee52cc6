"""Values, and the ways in which a function can get a value. Every way ends in a function `read`."""

__all__ = ["HOLDERS", "VALUES"]

VALUES = {
    value: value
    for value in (
        *("True", "False", "None", "...", "0", "1", "-1", "2", "256", "10**30"),
        *("0.0", "-0.0", "1.0", "2.0", "float('inf')", "-float('inf')", "1e-320", "0.1"),
        *("1j", "1.0 + 0j", "complex(-0.0, 0.0)", "''", "'1'", "'one'", "'None'", "b''", "b'1'"),
        *("()", "(1,)", "((1,),)", "[1]", "[[1]]", "[1, 1]", "{}", "{1}", "frozenset({1})"),
        *("{1: 2}", "{2: 1}", "{'1': 2}", "{1: 2, 3: 4}", "{3: 4, 1: 2}", "range", "len", "int"),
        *("(1, '1')", "('1', 1)", "[None]", "[()]", "['#1']", "[[], []]", "[[], '#2']"),
    )
}

HOLDERS = {
    "closure": """
def make_reader(by):
    def read(*_):
        return by
    return read
read = make_reader(VALUE)
""",
    "global": """
BY = VALUE
def read(*_):
    return BY
""",
    "global in a comprehension": """
BY_EACH = VALUE
def read(*_):
    return [BY_EACH for _ in range(2)]
""",
    "global behind a condition": """
BY_LATE = VALUE
def read(*_):
    if len(_) > 100:
        return None
    try:
        return [lambda: BY_LATE][0]()
    finally:
        pass
""",
    "default": """
def read(*_, by=VALUE):
    return by
""",
    "positional default": """
def read(one=None, other=None, by=VALUE, *_):
    return by
""",
    "default of an inner function": """
def read(*_):
    def inner(by=VALUE):
        return by
    return inner()
""",
    "constant": """
def read(*_):
    return VALUE
""",
    "partial": """
import functools
def take(by, *_):
    return by
read = functools.partial(take, VALUE)
""",
    "keyword of a partial": """
import functools
def take_named(*_, by):
    return by
read = functools.partial(functools.partial(take_named, by=0), by=VALUE)
""",
    "list": """
HELD_IN_LIST = [None, VALUE]
def read(*_):
    return HELD_IN_LIST[1]
""",
    "dictionary": """
HELD_IN_DICTIONARY = {"k": {"by": VALUE}}
def read(*_):
    return HELD_IN_DICTIONARY["k"]["by"]
""",
    "namespace": """
import types
HELD_IN_NAMESPACE = types.SimpleNamespace(inner=types.SimpleNamespace(by=VALUE))
def read(*_):
    return HELD_IN_NAMESPACE.inner.by
""",
    "dataclass": """
import dataclasses
@dataclasses.dataclass
class OfDataclass:
    by: object = dataclasses.field(default_factory=lambda: VALUE)
of_dataclass = OfDataclass()
def read(*_):
    return of_dataclass.by
""",
    "frozen dataclass": """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Frozen:
    by: object
    other: int = 1
frozen = Frozen(VALUE)
def read(*_):
    return frozen.by
""",
    "named tuple": """
import collections
Pair = collections.namedtuple("Pair", "one by")
held_pair = Pair(1, VALUE)
def read(*_):
    return held_pair.by
""",
    "enumeration": """
import enum
class Kinds(enum.Enum):
    BY = [VALUE]
def read(*_):
    return Kinds.BY.value
""",
    "attribute of a function": """
def read(*_):
    return read.by
read.by = VALUE
""",
    "attribute of a class": """
class OfClass:
    by = VALUE
def read(*_):
    return OfClass.by
""",
    "attribute of a base": """
class Base:
    by = VALUE
class Derived(Base):
    pass
def read(*_):
    return Derived().by
""",
    "attribute that is set later": """
class Later:
    pass
Later.by = VALUE
def read(*_):
    return getattr(Later, "by")
""",
    "property": """
class WithProperty:
    @property
    def by(self):
        return VALUE
with_property = WithProperty()
def read(*_):
    return with_property.by
""",
    "setter of a property": """
class WithSetter:
    @property
    def by(self):
        return self._by
    @by.setter
    def by(self, _):
        self._by = VALUE
def read(*_):
    held = WithSetter()
    held.by = None
    return held.by
""",
    "deleter of a property": """
class WithDeleter:
    @property
    def by(self):
        return self._by
    @by.deleter
    def by(self):
        self._by = VALUE
def read(*_):
    held = WithDeleter()
    del held.by
    return held.by
""",
    "class method": """
class WithClassMethod:
    @classmethod
    def by(cls):
        return VALUE
def read(*_):
    return WithClassMethod.by()
""",
    "static method": """
class WithStaticMethod:
    @staticmethod
    def by():
        return VALUE
read = lambda *_: WithStaticMethod.by()
""",
    "method": """
class WithMethod:
    def __init__(self, by):
        self._by = by
    def read(self, *_):
        return self._by
read = WithMethod(VALUE).read
""",
    "object that is called": """
class Called:
    def __init__(self, by):
        self._by = by
    def __call__(self, *_):
        return self._by
called = Called(VALUE)
def read(*_):
    return called()
""",
    "attribute that is computed": """
class Computed:
    def __getattr__(self, name):
        return VALUE
computed = Computed()
def read(*_):
    return computed.by
""",
    "descriptor": """
class Described:
    def __init__(self, by):
        self._by = by
    def __get__(self, *_):
        return self._by
class Owner:
    by = Described(VALUE)
def read(*_):
    return Owner().by
""",
    "super class": """
class Parent:
    def by(self):
        return VALUE
class Child(Parent):
    def by(self):
        return super().by()
def read(*_):
    return Child().by()
""",
    "class in a function": """
def make_with_class(by):
    def read(*_):
        class Inner:
            held = by
        return Inner.held
    return read
read = make_with_class(VALUE)
""",
    "two calls away": """
def innermost(*_):
    return VALUE
def between(*_):
    return innermost()
def read(*_):
    return between()
""",
    "wrapped function": """
import functools
def inside(*_):
    return VALUE
@functools.wraps(inside)
def read(*_):
    return read.__wrapped__()
""",
    "closure of a wrapper": """
import functools
def wrapping(inner):
    @functools.wraps(inner)
    def outer(*_):
        return inner()
    return outer
@wrapping
def read(*_):
    return VALUE
""",
    "recursion": """
def read(*_, depth=0):
    return VALUE if depth else read(depth=1)
""",
    "generator": """
def yields():
    yield VALUE
def read(*_):
    return next(yields())
""",
    "imported function": """
def read(*_):
    from functools import reduce as fold
    return fold(lambda _, by: by, [0, VALUE])
""",
    "nonlocal": """
def make_counter(by):
    def count(*_):
        nonlocal by
        by, before = None, by
        return before
    return count
read = make_counter(VALUE)
""",
}
