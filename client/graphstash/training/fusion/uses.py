"""Objects that notice when other code uses a parameter, a gradient or an optimizer's state.

    Tripwire        calls a function before torch uses the values of a parameter or a gradient
    StandIn         takes the place of a freed gradient, without memory, and refuses its use
    WaitingState    takes the place of an optimizer's state, and makes waiting updates first

Without fusion, gradients stay until zero_grad(): a loop may clip them, log their norm, remove them
before the step, or add to them in the next backward. With fusion, they are freed. If code, even
torch's own, uses the values of a freed gradient, its stand-in raises an error.

An armed tensor gets a class whose `__torch_function__` torch calls before each operation on it.
Torch changes classes likewise when it materializes a lazy module's parameters. Code that reaches
the memory through another object or an address does not trip; `is_held` finds such objects.
"""

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves

from graphstash.training.sharding import is_sharded

__all__ = [
    "StandIn",
    "Tripwire",
    "WaitingState",
    "is_held",
    "is_in_mode",
    "is_named",
    "is_shard_held",
    "references_of_ddp",
    "stand_in_for",
]

_PROPERTIES: Final = (
    *("grad", "requires_grad", "is_leaf", "grad_fn", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "shape", "device", "dtype", "layout", "ndim", "is_cpu"),
    *("is_cuda", "is_meta", "is_sparse", "itemsize", "nbytes", "names", "output_nr"),
)
"""Properties of a tensor; torch 2.15 has no `names`."""
_GRAD: Final[Any] = Tensor.grad
_PASSIVE: Final = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
        *(_GRAD.__set__, _GRAD.__delete__),
        *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement),
        *(Tensor.element_size, Tensor.is_floating_point, Tensor.requires_grad_, Tensor.ndimension),
        *(Tensor.is_contiguous, Tensor.is_complex, Tensor.is_signed, Tensor.storage_offset),
        *(Tensor.get_device, Tensor.__len__, Tensor.is_inference, Tensor._is_view),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    )
)
"""Operations of torch that neither read nor write a tensor's values."""
_HARMLESS: Final = _PASSIVE | frozenset(
    (
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like),
        *(torch.rand_like, torch.randn_like, Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones),
    )
)
"""`_PASSIVE`, and operations that create a tensor and use only the properties of their argument."""


class Tripwire:
    """Calls `on_use` before torch reads or writes the values of an armed tensor.

    Args:
        on_use: bound method, called with the tensor. Must disarm it or raise. Held weakly.
        size_is_use: whether `size(dim)` is a use. It is all that torch announces of torch.vmap.
    """

    def __init__(self, on_use: Callable[[Tensor], None], *, size_is_use: bool) -> None:
        self._size_is_use = size_is_use
        self._on_use = weakref.WeakMethod(on_use)
        self._armed: dict[type, type | None] = {}
        """By class: its armed subclass, or None if its tensors cannot be armed."""
        self._bases: dict[type, type] = {}

    def arm(self, tensor: Tensor) -> None:
        """Arm a tensor, if `can_arm` returns True for it."""
        if self.can_arm(tensor) and (armed := self._armed.get(type(tensor))) is not None:
            tensor.__class__ = armed

    def can_arm(self, tensor: Tensor) -> bool:
        """Return whether the tensor is armed or can be armed."""
        kind = type(tensor)
        if kind not in self._armed and kind not in self._bases:
            self._armed[kind] = armed = _armed(tensor, self._on_use, size_is_use=self._size_is_use)
            if armed is not None:
                self._bases[armed] = kind
        return kind in self._bases or self._armed[kind] is not None

    def disarm(self, tensor: Tensor) -> None:
        """Restore the tensor's own class."""
        if (kind := self._bases.get(type(tensor))) is not None:
            tensor.__class__ = kind


def _uses_of_storage(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors, and how many Python objects, refer to a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_UNHELD: Final = _uses_of_storage(torch.zeros(1, device="cpu"))
"""Uses of a new tensor's storage. Since 2.11, torch keeps the storage's Python object."""


_REFERENCES_TO_SHARD: Final = 2
"""References to a shard's Python object: one of its DTensor, and one of `sys.getrefcount`."""


def is_held(tensor: Tensor, references: int | None = 1) -> bool:
    """Return whether another object shares memory with this unsharded tensor.

    Examples: a view, `detach()`, `.data`, a storage, an array of NumPy, a DLPack capsule, and a
    graph that backward has not freed yet. Bare addresses, such as `data_ptr()` or the dictionary
    of `__array_interface__`, hold nothing.

    Args:
        tensor: The tensor. Its memory counts as held if it is sparse, because its parts may be.
        references: References to the tensor that torch itself has: 1 for its Python object, and
            others for its owners, such as a parameter whose gradient it is. None if it is unknown:
            since torch 2.9, `torch.utils.dlpack.to_dlpack(parameter)` then goes unnoticed.
    """
    if tensor.layout is not torch.strided:
        return True
    tensors, objects = _uses_of_storage(tensor)
    if tensors > _UNHELD[0] or objects > _UNHELD[1]:
        return True
    return references is not None and _references_to(tensor) > references


def is_shard_held(tensor: Any, *, by_fsdp: bool) -> bool:
    """Return whether other code has a DTensor's shard, or shares its memory as FSDP itself does."""
    return (
        sys.getrefcount(tensor._local_tensor) > _REFERENCES_TO_SHARD
        or _uses_of_storage(tensor._local_tensor)[0] > _UNHELD[0] + by_fsdp
    )


def is_in_mode() -> bool:
    """Return whether a TorchDispatchMode or TorchFunctionMode is active in this thread. It must see
    the same updates as without fusion. `torch.device` only chooses where new tensors are.
    """
    return bool(torch._C._len_torch_dispatch_stack()) or (
        bool(torch._C._len_torch_function_stack())
        and any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    )


def _references_to(tensor: Tensor) -> int:
    """Return how many references torch has to a tensor, without that of a graph that is done.

    Since 2.9, a DLPack capsule of a parameter refers to the parameter, and not to its storage.
    """
    tensor_of_torch: Any = tensor  # `_use_count` is not annotated
    count: int = tensor_of_torch._use_count()
    if count > 1 and tensor.requires_grad and tensor.is_leaf:
        # A loss that the loop keeps refers to the node that accumulates the parameter's gradient.
        edge = get_gradient_edge(tensor)
        count = tensor_of_torch._use_count() - 1
        del edge
    return count


_SAMPLE: Final = 8
"""Parameters of DistributedDataParallel whose references are counted."""


def references_of_ddp(parameters: Iterable[Tensor]) -> int:
    """Return the references that DistributedDataParallel and torch have to each of its parameters.

    They depend on the version and on whether DDP has rebuilt its buckets, but are the same for all
    parameters. Capsules of the first parameters therefore hide those of all others.
    """
    return min(map(_references_to, islice(parameters, _SAMPLE)), default=1)


def is_named(gradient_of: Tensor) -> bool:
    """Return whether Python code refers to a parameter's gradient. Call it while backward runs."""
    return sys.getrefcount(gradient_of.grad) > _unnamed()


@cache
def _unnamed() -> int:
    """Return the references to the Python object of a gradient that only its parameter has."""
    counts = []
    parameter = nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.register_post_accumulate_grad_hook(
        lambda each: counts.append(sys.getrefcount(each.grad))
    )
    with torch.enable_grad():
        parameter.sum().backward()
    return counts[0]


def _armed(
    of: Tensor, on_use: "weakref.WeakMethod[Callable[[Tensor], None]]", *, size_is_use: bool
) -> type[Tensor] | None:
    """Return the armed subclass of a tensor's class, or None if the class cannot have one."""
    kind = type(of)
    is_shard = is_sharded(of)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_shard:
        return None  # the methods of a wrapper may read its parts without an operation of torch
    armed = _armed_subclass(kind, on_use, is_shard=is_shard, size_is_use=size_is_use)
    try:
        of.__class__ = armed
        of.__class__ = kind
    except TypeError:  # the class has another layout
        return None
    return armed


def _armed_subclass(
    kind: type[Tensor],
    on_use: "weakref.WeakMethod[Callable[[Tensor], None]]",
    *,
    is_shard: bool,
    size_is_use: bool,
) -> type[Tensor]:
    # A subclass may create new tensors in its own way.
    harmless = _HARMLESS if kind in {Tensor, nn.Parameter} else _PASSIVE

    def trip(tensor: Tensor) -> None:
        if (call := on_use()) is None:  # the owner of `on_use` no longer exists
            tensor.__class__ = kind
        else:
            call(tensor)

    class Armed(kind):  # type: ignore[misc,valid-type] # the base is a variable
        __slots__ = ()

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            kwargs = kwargs or {}
            if func in harmless and not (size_is_use and func is Tensor.size and args[1:]):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) is cls:
                    trip(leaf)
            return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            trip(self)
            return copy.deepcopy(self, memo)

    Armed.__name__, Armed.__qualname__ = kind.__name__, kind.__qualname__
    Armed.__module__ = kind.__module__
    for name in ("set_", "as_subclass"):  # torch announces neither
        setattr(Armed, name, _tripping_method(name, trip))
    if is_shard:
        Armed._local_tensor = _tripping("_local_tensor", trip)
    return Armed


def _tripping_method(name: str, trip: Callable[[Tensor], None]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        trip(tensor)
        return getattr(tensor, name)(*args, **kwargs)

    return call


def _tripping(name: str, trip: Callable[[Tensor], None]) -> property:
    """Return a property that calls `trip`, and then is the attribute of this name."""

    def get(tensor: Tensor) -> Any:
        trip(tensor)
        return getattr(tensor, name)

    def set_to(tensor: Tensor, value: Any) -> None:
        trip(tensor)
        setattr(tensor, name, value)

    return property(get, set_to)


_CONVERT: Final = torch.ops.aten._to_copy.default
"""The operation with which module.to() converts parameters and their gradients."""


class StandIn(Tensor):
    """A tensor without values; `stand_in_for` creates it."""

    refuse: Callable[[str], None]
    kind: type[Tensor]
    """Class that `isinstance` finds: FSDP asserts that a gradient is a DTensor."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # torch

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch has no type for it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Torch calls this in place of each operation that has a stand-in as an argument."""
        del types
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        for stand_in in given:
            stand_in.refuse(func.overloadpacket.__name__)
        if func is not _CONVERT:
            raise RuntimeError(f"{func} uses a gradient that optimizer fusion has freed")
        first, options = given[0], kwargs or {}
        zero = torch.zeros(
            (), dtype=options.get("dtype", first.dtype), device=options.get("device", first.device)
        )
        return zero.expand(first.shape)

    def __repr__(self) -> str:  # type: ignore[override] # without the values
        return f"StandIn(shape={tuple(self.shape)})"

    def _has_no_memory(self, name: str) -> NoReturn:
        self.refuse(name)
        raise RuntimeError(f"{name} uses a gradient that optimizer fusion has freed")

    # Torch's own methods would return null pointers here.

    @property  # type: ignore[misc] # torch reads it, none writes it
    def __class__(self) -> type[Tensor]:  # type: ignore[override] # a property
        """Return the class of the parameter's gradient."""
        return self.kind

    @property
    def _local_tensor(self) -> NoReturn:
        self._has_no_memory("_local_tensor")

    def to_local(self, **_: Any) -> NoReturn:
        """Refuse: a stand-in has no shard."""
        self._has_no_memory("to_local")

    def full_tensor(self, **_: Any) -> NoReturn:
        """Refuse: a stand-in has no shard."""
        self._has_no_memory("full_tensor")

    def untyped_storage(self) -> NoReturn:
        """Refuse: a stand-in has no memory."""
        self._has_no_memory("untyped_storage")

    def data_ptr(self) -> NoReturn:
        """Refuse: a stand-in has no memory."""
        self._has_no_memory("data_ptr")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: a stand-in has no memory."""
        del force
        self._has_no_memory("numpy")


def stand_in_for(parameter: Tensor, refuse: Callable[[str], None]) -> StandIn:
    """Return a stand-in with the shape, type and device of a parameter.

    Args:
        parameter: the parameter whose gradient was freed.
        refuse: called with the name of the operation that uses the gradient's values. Raises,
            except for a conversion after the step. Must not hold the parameter strongly.
    """
    stand_in: StandIn = StandIn._make_wrapper_subclass(  # type: ignore[attr-defined] # torch
        StandIn,
        parameter.shape,
        strides=parameter.stride(),
        dtype=parameter.dtype,
        device=parameter.device,
    )
    stand_in.refuse = refuse
    stand_in.kind = type(parameter) if is_sharded(parameter) else StandIn
    return stand_in


_METHODS: Final = (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__"),
    *("__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "__copy__"),
    *("__reduce__", "__missing__", "get", "keys", "values", "items", "pop", "popitem", "clear"),
    *("update", "setdefault", "copy"),
)


class WaitingState(defaultdict[Any, Any]):
    """A mapping whose every method first makes the waiting updates, then calls the state's method.

    `make_updates` is held weakly.
    """

    def __init__(self, state: defaultdict[Any, Any], make_updates: Callable[[], None]) -> None:
        super().__init__(state.default_factory)
        self.state = state
        self.make_updates = weakref.WeakMethod(make_updates)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the state itself."""
        return _delegate(self, "__reduce_ex__", protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _delegate(self, "__len__")
        return copy.deepcopy(self.state, memo)


def _delegate(this: WaitingState, name: str, *args: Any, **kwargs: Any) -> Any:
    if (make_updates := this.make_updates()) is not None:
        make_updates()
    return getattr(this.state, name)(*args, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    def call(this: WaitingState, *args: Any, **kwargs: Any) -> Any:
        return _delegate(this, name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in _METHODS:
    setattr(WaitingState, _name, _method(_name))
