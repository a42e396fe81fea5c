"""From a tensor to the bytes it occupies: where they lie, how they are declared, and which tensors cannot be saved.

A tensor is copied by address, so it must occupy one dense range of memory: row-major, or dense in another order
(transposed, channels_last), which is saved in memory order with its strides. What does not (a slice with gaps,
lazy conjugation) is first brought into a staging tensor at the boundary, and is volatile for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from baft_torch._dtypes import tag_of
from baftd.errors import UnsupportedTensor

__all__ = ["Extent", "freeze_storage", "is_dense", "is_dtensor", "plain", "reduced"]


def _dtensor() -> type[torch.Tensor] | None:
    if not torch.distributed.is_available():
        return None
    from torch.distributed.tensor import DTensor

    return DTensor


_DTENSOR = _dtensor()


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether `value` is a DTensor (never in a torch that was built without torch.distributed)."""
    return _DTENSOR is not None and isinstance(value, _DTENSOR)


def plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The strided tensor whose memory holds the elements of `tensor` on this rank (a DTensor's local shard), detached.

    Raises UnsupportedTensor, naming `name`, for what is not elements in memory.
    """
    if is_lazy(tensor):
        raise _refused(name, "it has no shape yet (a lazy module)", "Run one forward pass before attach().")
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    if tensor.is_meta:
        raise _refused(name, "it is on the meta device and has no elements", "Materialise the model (to_empty) first.")
    if tensor.is_sparse or tensor.layout is not torch.strided:
        raise _refused(name, f"its layout is {str(tensor.layout).removeprefix('torch.')}, not strided")
    if tensor.is_nested:
        raise _refused(name, "it is a nested tensor")
    if tensor.is_quantized or tag_of(tensor.dtype) is None:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise _refused(name, f"its type {kind} is quantised: bytes alone do not hold it")
    if is_traceable_wrapper_subclass(tensor):
        raise _refused(name, f"it is a {type(tensor).__name__}, which wraps other tensors")
    if tensor.device.type not in ("cpu", "cuda"):
        raise _refused(name, f"it is on a {tensor.device.type} device")
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        raise _refused(
            name,
            "its storage was resized to nothing: somebody frees and refills it (FSDP1 does)",
            "Use fully_shard (FSDP2).",
        )
    return tensor.detach()


def _refused(name: str, why: str, hint: str = "") -> UnsupportedTensor:
    return UnsupportedTensor(
        f"tensor {name!r} cannot be saved byte by byte: {why}.",
        hint=hint or "Keep its parts as plain tensors, or leave it out of what attach() is given.",
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlap, in whatever order."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def reduced(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` with each expanded dimension (stride 0) cut to one element.

    Raises UnsupportedTensor if elements still overlap: writing them back would not be defined.
    """
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    if tensor.numel() and not is_dense(tensor):
        reach = 0  # elements reachable by the dimensions so far, in order of stride
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride <= reach:
                raise _refused(name, f"its elements overlap in memory (strides {tuple(tensor.stride())})")
            reach += stride * (size - 1)
    return tensor


@dataclass(frozen=True)
class Extent:
    """How a tensor's elements lie in memory."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None where row-major."""
    nbytes: int
    staged: bool
    """The elements have gaps or a lazy sign: they are copied from a row-major staging tensor."""

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> Extent:
        """Measure a plain tensor (see `plain`); UnsupportedTensor where its elements overlap."""
        tag = tag_of(tensor.dtype)
        assert tag is not None, name  # plain() refused it
        view = reduced(tensor, name)
        shape = tuple(view.shape)
        nbytes = prod(shape) * view.element_size()
        if view.is_conj() or view.is_neg() or not is_dense(view):
            return cls(tag, shape, None, nbytes, staged=True)
        return cls(tag, shape, None if view.is_contiguous() else tuple(view.stride()), nbytes, staged=False)


def freeze_storage(tensor: torch.Tensor) -> None:
    """Make the storage of a CPU tensor keep its memory: `resize_` on it raises RuntimeError from now on.

    A storage that is resized while the copy engine reads it by pointer would be a crash of the training process.
    torch marks a storage so when numpy shares its memory, and this is the only way to ask for it from Python.
    """
    if tensor.device.type == "cpu" and tensor.untyped_storage().resizable():
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
