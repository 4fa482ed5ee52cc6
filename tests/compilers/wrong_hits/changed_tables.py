"""Change each table of torch that keys cover, and compare the keys before and after.

The hook reads a table again only if the version of its dictionary has changed. With the argument
`members`, the hook compares the members instead, as it does on a Python without versions.

    python -m compilers.wrong_hits.changed_tables versions|members

Prints the number of kinds of changes. A change that does not change the key ends the program with
an error.
"""

import copy
import sys
from collections import ChainMap, UserDict
from types import MappingProxyType

from graphstash.hooks.inductor import versions

if sys.argv[1] == "members":
    versions.HAS_VERSIONS = False
else:
    assert (sys.version_info < (3, 14)) == versions.HAS_VERSIONS, sys.version_info

import torch
import torch._inductor.compile_fx
from torch._decomp import global_decomposition_table
from torch._decomp.decompositions_for_rng import extra_random_decomps
from torch._inductor import decomposition, lowering
from torch._inductor.fx_passes import joint_graph, post_grad, split_cat
from torch._inductor.graph import GraphLowering
from torch._inductor.pattern_matcher import (
    Arg,
    CallFunction,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch._inductor.sizevars import SizeVarAllocator
from torch._library import simple_registry
from torch._library.fake_impl import Kernel
from torch._subclasses import FakeTensorMode

from graphstash.hooks.code import UndescribableError
from graphstash.hooks.inductor.kernels import _definitions
from graphstash.hooks.inductor.replaced import _numbers_of_changed
from graphstash.hooks.inductor.user_code import user_code_of

aten = torch.ops.aten
graph = torch.fx.symbolic_trace(lambda x: x.sin())
pattern = CallFunction(aten.sin.default, Arg())


def one(x):
    return x


def other(x):
    return x + 1


def third_one(x):
    return x + 2


def add_entry(patterns, handler):
    register_graph_pattern(pattern, pass_dict=patterns)(handler)
    entries = patterns.patterns["call_function", aten.sin.default]
    return entries, entries[-1]


def in_table(table, place):
    before = table.get(place)
    for value in (one, other):
        table[place] = value
        yield
    if before is None:
        del table[place]
    else:
        table[place] = before
    yield "as before"


def in_patterns():
    entries, first = add_entry(joint_graph.patterns, one)
    yield
    _, second = add_entry(joint_graph.patterns, other)
    entries.remove(first)
    yield
    _, third = add_entry(joint_graph.patterns, third_one)
    entries.remove(third)
    entries[entries.index(second)] = third
    yield
    entries.remove(third)
    yield "as before"


def in_a_new_pass():
    added = PatternMatcherPass()
    post_grad.pass_patterns.append(added)
    yield "as before"
    add_entry(added, one)
    yield
    post_grad.pass_patterns.pop()
    yield "as before"
    post_grad.of_program = added
    yield
    del post_grad.of_program
    yield "as before"
    split_cat.PRE_GRAD_PATTERNS["of program"] = added
    yield
    del split_cat.PRE_GRAD_PATTERNS["of program"]
    yield "as before"


def in_a_library_of_the_program():
    for operation in ("special_bessel_j0", "special_bessel_j1"):
        added = torch.library.Library("aten", "IMPL")
        yield "as before"
        added.impl(operation, one, "PrivateUse1")
        yield
        added._destroy()
        yield "as before"


def in_methods_of_torch():
    for owner in (GraphLowering, FakeTensorMode, SizeVarAllocator):
        before = owner.__init__
        for value in (one, other):
            owner.__init__ = value
            yield
        owner.__init__ = before
        yield "as before"


def in_fakes():
    found = simple_registry.singleton.find("aten::sin")
    yield "as before"
    if (kernels := getattr(found.fake_impl, "kernels", None)) is None:
        found.fake_impl.kernel = Kernel(one, "here")
    else:
        kernels.append(Kernel(one, "here"))
    yield
    if kernels is None:
        found.fake_impl.kernel = Kernel(other, "here")
    else:
        kernels[0] = Kernel(other, "here")
    yield
    if kernels is None:
        found.fake_impl.kernel = None
    else:
        kernels.clear()
    yield "as before"


def in_rules_that_were_replaced():
    found = simple_registry.singleton.find("aten::tan")
    rules = found.torch_dispatch_rules
    found.torch_dispatch_rules = copy.copy(rules)
    yield "as before"
    found.torch_dispatch_rules._data = {}
    yield "as before"
    yield from in_table(found.torch_dispatch_rules._data, int)
    found.torch_dispatch_rules = rules
    yield "as before"


def in_a_definition():
    definition = _definitions()[0]
    definition._backend_fns = {**definition._backend_fns}
    yield "as before"
    yield from in_table(definition._backend_fns, "one")
    definition._disabled_kernel.add("cpu")
    yield
    definition._disabled_kernel.clear()
    yield "as before"


def in_an_operation_that_is_first_used_now():
    """Change an operation that only torch's own tests use."""
    assert "_test_optional_floatlist" not in vars(aten)
    operation = aten._test_optional_floatlist
    yield from in_table(operation.default.py_kernels, torch._C.DispatchKey.CPU)
    assert "out" not in vars(operation)
    yield from in_table(operation.out.py_kernels, torch._C.DispatchKey.CPU)


def described():
    try:
        return user_code_of(graph, [])
    except UndescribableError as error:
        return str(error)


CHANGES = (
    in_table(lowering.lowerings, aten.sin.default),
    in_table(decomposition.decompositions, aten.sinc.default),
    in_table(extra_random_decomps, aten.sinc.default),
    *(in_table(each, aten.sinc.default) for each in global_decomposition_table.values()),
    in_table(aten.silu.default.py_kernels, torch._C.DispatchKey.CPU),
    in_an_operation_that_is_first_used_now(),
    in_table(simple_registry.singleton.find("aten::cos").torch_dispatch_rules._data, int),
    in_patterns(),
    in_a_new_pass(),
    in_fakes(),
    in_rules_that_were_replaced(),
    in_a_definition(),
    in_a_library_of_the_program(),
    in_methods_of_torch(),
)
for number in range(200):
    changed = bytearray(8 * 200)
    changed[8 * number] = 1
    assert [*_numbers_of_changed(bytes(8 * 200), bytes(changed))] == [number]
held = {}
for table in (held, UserDict(held), ChainMap(held), MappingProxyType(held)):
    compared = versions.Versions()
    before = compared.state([table])
    assert compared.state([table]) == before, type(table)
    (table if isinstance(table, UserDict) else held)[type(table)] = one
    assert compared.state([table]) != before, type(table)
for number, changes in enumerate(CHANGES):
    before = described()
    seen = {before}
    for is_as_before in changes:
        now = described()
        assert (now == before) == (is_as_before is not None), f"change {number}: {now}"
        assert is_as_before is not None or now not in seen, f"change {number}: {now}"
        assert described() == now
        seen.add(now)
print(len(CHANGES))
