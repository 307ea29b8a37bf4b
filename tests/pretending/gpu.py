"""GPUs that are none: tensors that say they lie on one, with their numbers on the CPU.

What CUDA refuses is refused: operations on tensors of two devices, tensors of the CPU that ones of
a GPU index, sums that are added to across devices, ``.numpy()``. They are registered for the whole
process, which has to be one of its own.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretended"
DEVICE = f"{NAME}:0"
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
"""The ways from one device to the other."""
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""What takes indices of the CPU on a GPU as well."""
STRICT = ("index_select", "gather", "scatter_add_", "take", "mm", "addmm")
"""What takes no scalar of the other device either."""


class Pretended(torch.Tensor):
    """A tensor on such a GPU; ``inner`` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(
        cls, inner: torch.Tensor, requires_grad: bool = False, index: int = 0
    ) -> "Pretended":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=f"{NAME}:{index}",
            requires_grad=requires_grad,
        )
        made.inner, made.index = inner, index
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = Pretended(self.inner.clone(), index=self.index)
        return copied

    def tolist(self) -> Any:
        return self.inner.tolist()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a GPU's tensor to numpy; use Tensor.cpu() first")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """Inside, tensors can be made on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, on the device where CUDA would leave it."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    here = [leaf for leaf in leaves if not isinstance(leaf, Pretended)]
    name = func._schema.name.partition("::")[2]
    is_inplace = name.endswith("_") and not name.endswith("__") and bool(leaves)
    if there and here and func not in COPIES:
        refuse(func, name, args, here, is_inplace=is_inplace)
    if len({leaf.index for leaf in there if leaf.dim()}) > 1 and func not in COPIES:
        raise RuntimeError(f"{func}: tensors are on several GPUs")
    asked = kwargs.get("device")
    kind = None if asked is None else torch.device(asked).type
    index = (torch.device(asked).index or 0) if kind == NAME else _index(there)
    moved = {**kwargs, "device": torch.device("cpu")} if kind == NAME else kwargs
    plain_args, plain_kwargs = tree_map(unwrapped, (args, moved))
    if func is aten.mm.dtype:  # CUDA's alone
        one, other, dtype = plain_args
        assert there
        return Pretended(one.to(dtype) @ other.to(dtype), index=index)
    if func is aten.histc.default and not plain_args[0].is_floating_point():  # CUDA takes them
        counted = func(plain_args[0].float(), *plain_args[1:]).to(plain_args[0].dtype)
        return Pretended(counted, index=index)
    out = func(*plain_args, **plain_kwargs)
    if is_inplace:
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    if not (kind == NAME if kind else there):
        return out
    return tree_map(partial(wrapped, index=index), out)


def _index(there: list[Pretended]) -> int:
    """The GPU that a result is left on: what a number of another one is added to decides."""
    return next((leaf.index for leaf in sorted(there, key=lambda leaf: not leaf.dim())), 0)


def refuse(func: Any, name: str, args: Any, here: Any, *, is_inplace: bool) -> None:
    """Raise where CUDA would."""
    on_gpu = isinstance(args[0], Pretended)
    if func in INDEXED:
        values = args[2] if len(args) > 2 else None
        is_here = isinstance(values, torch.Tensor) and not isinstance(values, Pretended)
        is_refused = not on_gpu or (is_here and values.dim() > 0)
    else:
        wide = any(tensor.dim() > 0 or name in STRICT for tensor in here)
        is_refused = wide or (is_inplace and not on_gpu)
    if is_refused:
        shapes = [tuple(tensor.shape) for tensor in here]
        raise RuntimeError(f"{func}: tensors {shapes} are on the CPU, others on the GPU")


def unwrapped(value: Any) -> Any:
    return value.inner if isinstance(value, Pretended) else value


def wrapped(value: Any, index: int) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, Pretended)
    return Pretended(value, index=index) if is_plain else value


class _Backend(registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def _is_in_bad_fork(self) -> bool:
        return False


@contextlib.contextmanager
def pretended_gpu() -> Iterator[str]:
    """The device's name, while there is one."""
    torch._C._set_only_lift_cpu_tensors(True)
    with Pretending():
        yield DEVICE


registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
# Its tensors are not torch's own, and inference mode's must be.
torch.inference_mode = lambda mode=True: torch.no_grad()
