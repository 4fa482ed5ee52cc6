"""Describe the user's operations: their kernels, fake kernel, backward pass, types of autocast,
`vmap`, lowerings and decompositions.
"""

import re
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Final

import torch
from torch import library
from torch._C import DispatchKey
from torch._higher_order_ops import effects
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor import lowering
from torch._library import custom_ops, simple_registry
from torch._library.custom_ops import CustomOpDef
from torch._library.utils import can_generate_trivial_fake_impl
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.node import _side_effectful_functions

from graphstash.hooks.code import UndescribableError
from graphstash.hooks.inductor.autocast import type_of_autocast
from graphstash.hooks.inductor.describer import Describer
from graphstash.hooks.inductor.kernels import fakes_of
from graphstash.hooks.inductor.libraries import libraries, needed_by
from graphstash.hooks.inductor.origins import is_torchs
from graphstash.hooks.inductor.recorded import Kernel, kernels_by_library
from graphstash.hooks.inductor.registries import OF_USER, kernels_of_operator, tables
from graphstash.hooks.inductor.tensor_class import members_of_program

__all__ = ["operation_lines"]

_BACK_REFERENCES: Final = frozenset({"_lib", "_opoverload", "_namespace", "_name"})
"""Attributes of a `CustomOpDef` that lead back to the operation."""

_TYPES_OF_AUTOCAST: Final = {"_autocast_cpu_dtype": "cpu", "_autocast_cuda_dtype": "cuda"}
"""Attributes of a `CustomOpDef` of torch 2.7, and their devices."""

_OF_OPERATORS: Final = frozenset(vars(triton_kernel_wrapper_mutation))
"""Attributes that torch gives every higher-order operator."""


_DEVICES: Final = frozenset({"CPU", "CUDA", "HPU", "MPS", "MTIA", "PrivateUse1", "XPU"})
"""Dispatch keys of kernels that compute on one kind of device."""


def operation_lines(describer: Describer) -> Iterator[str]:
    """Describe the recorded operations and, recursively, the code that they read from arguments."""
    described: set[str] = set()
    while True:
        operations = sorted(set(describer.operations) - described)
        read = () if describer.names is None else members_of_program(describer.names)
        members = [(place, value) for place, value in read if place not in described]
        if not operations and not members:
            kernels = {
                label: each for label, each in _needed_kernels(describer) if label not in described
            }
            described.update(kernels)
            for label, kernel in kernels.items():
                text = describer.registered(kernel.function)
                yield f"{label}={text} {kernel.with_keyset}"
            if not kernels:
                break
        described.update(operations, (place for place, _ in members))
        for name in operations:
            yield _describe_operation(describer, describer.operations[name], name)
        for place, value in sorted(members, key=itemgetter(0)):
            try:
                yield f"{place}={describer.describe(value)}"
            except UndescribableError as error:
                raise UndescribableError(f"{place}: {error}") from error


def _needed_kernels(describer: Describer) -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels on which a compilation depends, of the operations recorded so far."""
    for name, operation in describer.operations.items():
        if isinstance(operation, OpOverloadPacket):
            is_executed = describer.executes_all or name in describer.executed
            yield from _kernels(operation, is_executed=is_executed)


def _describe_operation(describer: Describer, packet: Any, name: str) -> str:
    """Describe all registrations for one of the user's operations."""
    if isinstance(packet, HigherOrderOperator):
        called = describer.describe(type(packet))
        own = {key: each for key, each in vars(packet).items() if key not in _OF_OPERATORS}
        kernels = [
            f"{getattr(key, '__qualname__', key)}={describer.registered(kernel)}"
            for key, kernel in kernels_of_operator(packet)
        ]
        return "\n".join([name, called, describer.describe(own), *kernels])
    overloads = [getattr(packet, each) for each in packet.overloads()]
    found = [f"operation {name}", *(f"{each._schema} {each.tags}" for each in overloads)]
    found += [_describe_handling(describer, each) for each in overloads]
    definition = custom_ops.OPDEFS.get(name)
    if definition is not None:
        found += _describe_definition(describer, definition)
    for overload in overloads:
        if definition is None:
            found.append(_describe_fake(describer, overload))
        kernels = overload.py_kernels.items()
        found += [f"{key}={describer.registered(kernel)}" for key, kernel in kernels]
    for label, table in tables():
        given = [table[each] for each in (packet, *overloads) if each in table]
        found += [
            f"{label}={describer.registered(each)}"
            for each in given
            if label == OF_USER or not is_torchs(each)
        ]
    if definition is None:
        in_python = all(each.name() in library._defs for each in overloads)
        found += _libraries_with(name, is_required=not in_python)
    return "\n".join(found)


def _describe_handling(describer: Describer, operation: OpOverload) -> str:
    """Describe how graph passes and Inductor treat an operation.

    When Inductor compiles an operation without a layout constraint, it registers its default. A
    process with only hits never does. To get equal keys, describe the default like no constraint.
    """
    known = getattr(lowering, "_maybe_layout_constraints", {})
    constraint = known.get(operation)
    is_usual = constraint in (None, *_usual_constraints(operation))
    layout = "" if is_usual else describer.registered(constraint)
    read = getattr(effects, "_get_effect", None)
    effect = effects.SIDE_EFFECTS.get(operation) if read is None else read(operation)
    has_effect = operation in _side_effectful_functions
    return f"effect {effect} {has_effect} layout {layout}"


def _usual_constraints(operation: OpOverload) -> Iterator[Any]:
    """Yield Inductor's default layout constraint for an operation, by its tag."""
    tag = lowering.get_layout_constraint_tag(operation)
    chosen = getattr(lowering, "tag_to_layout_constraint", None)
    if chosen is not None:
        yield chosen(tag)
    elif tag is torch._C.Tag.needs_fixed_stride_order:  # 2.7
        yield lowering.constrain_to_fx_strides


def _describe_definition(describer: Describer, definition: CustomOpDef) -> Iterator[str]:
    for name, value in vars(definition).items():
        if name in _BACK_REFERENCES:
            continue
        if callable(value):
            yield f"{name}={describer.registered(value)}"
        elif value is not None and name in _TYPES_OF_AUTOCAST:
            yield f"{name}={type_of_autocast(definition, _TYPES_OF_AUTOCAST[name])}"
        elif isinstance(value, dict):
            for key, each in value.items():
                text = describer.registered(each) if callable(each) else describer.describe(each)
                yield f"{name}.{getattr(key, '__qualname__', key)}={text}"
        else:
            yield f"{name}={describer.describe(value)}"


def _kernels(packet: OpOverloadPacket, *, is_executed: bool) -> Iterator[tuple[str, Kernel]]:
    """Yield the labeled Python kernels of an operation that torch has no means to look up.

    torch gives back only the kernels of a `CustomOpDef` and fake kernels. `recorded` has others, if
    their number is what the dispatcher lists. Since 2.8, a library may replace kernels. The
    dispatcher then lists the replaced kernel as inactive. It also does if a `CustomOpDef` replaces
    its own kernel, which is allowed: both come from one place in torch.

    An executable calls an operation's kernel for one device, or for all, by the operation's name. A
    compilation does not depend on it if there is a fake kernel and it does not execute it:
    it executes pointwise operations on constants, and any operation while it freezes a graph, or in
    a pass of the user that folds constants or calls the target of a node.

    Raises:
        UndescribableError: the operation has such a kernel, which was not recorded.
    """
    definition = custom_ops.OPDEFS.get(str(packet._qualified_op_name))
    for each in packet.overloads():
        overload = getattr(packet, each)
        keys = _unknown_kernels(overload, definition)
        has_fake = definition is not None or _has_fake(overload)
        may_run = is_executed or torch.Tag.pointwise in overload.tags
        # Whether torch takes it apart before it computes gradients depends on the other kernels.
        may_run |= overload.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        if not may_run and (has_fake or can_generate_trivial_fake_impl(overload)):
            # torch first tries the kernel for all devices before it makes a trivial fake one.
            unused = _DEVICES | {"CompositeExplicitAutograd"} if has_fake else _DEVICES
            keys = [key for key in keys if key not in unused]
        for key in sorted(set(keys)):
            name = overload.name()
            kernels = kernels_by_library(name, key)
            listed = torch._C._dispatch_dump(name).splitlines()
            count = sum(re.match(rf"{key}\b", line) is not None for line in listed)
            if len(kernels) != count or (key == "Meta" and fakes_of(name)):
                raise UndescribableError(f"torch does not give back the {key} kernel of {name}")
            for number, kernel in enumerate(kernels):
                yield f"{name} {key} {number}", kernel


def _unknown_kernels(operation: OpOverload, definition: CustomOpDef | None) -> list[str]:
    """Return the dispatch keys of an operation's Python kernels that torch cannot look up."""
    name = operation.name()
    fakes = len(fakes_of(name)) if definition is None else 1
    place = name.replace("::", "/") + "/"
    known = set() if definition is None else {*definition._lib._op_impls}
    listed = torch._C._dispatch_dump(name).splitlines()
    known.discard(f"{place}Meta")
    if fakes == sum(line.startswith("Meta") for line in listed):
        known.add(f"{place}Meta")
    keys = [
        each.removeprefix(place) or "CompositeImplicitAutograd"
        for each in library._impls - known
        if each.startswith(place)
    ]
    found = [line.partition(" :: ")[0].partition(": ") for line in listed]
    places = {label: where for label, _, where in found}
    for label, _, where in found:
        key, _, rest = label.partition(" ")
        is_own = definition is not None and where == places.get(key) == places.get("debug")
        if rest == "(inactive)" and not is_own and (key != "Meta" or f"{place}Meta" not in known):
            keys.append(key.removesuffix("[alias]"))
    return keys


def _has_fake(operation: OpOverload) -> bool:
    """Return whether a program registered a fake kernel for an operation."""
    name = operation.name()
    return bool(fakes_of(name) or kernels_by_library(name, "Meta"))


def _describe_fake(describer: Describer, operation: OpOverload) -> str:
    described = [describer.registered(each) for each in fakes_of(operation.name())]
    entry = simple_registry.singleton._data.get(operation.name())
    rules = {} if entry is None else vars(entry.torch_dispatch_rules).get("_data", {})
    described += [f"{cls.__qualname__}={describer.registered(rule)}" for cls, rule in rules.items()]
    return f"fake={described}"


def _libraries_with(name: str, *, is_required: bool) -> list[str]:
    """Describe the loaded libraries that mention an operation, and their dependencies.

    Raises:
        UndescribableError: `is_required`, and no library mentions it.
    """
    found = {
        f"library {digest}"
        for each in libraries()
        if each.mentions(name)
        for digest in needed_by(each)
    }
    if is_required and not found:
        raise UndescribableError(f"{name} is defined in C++, by a library without a file")
    return sorted(found)
