"""Names of torch's element types: safetensors' tags where it has one, else the type's own name in capitals."""

from __future__ import annotations

import torch

__all__ = ["dtype_of", "tag_of"]

_TAGS: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex32: "C32",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

for _name in dir(torch):
    _value = getattr(torch, _name)
    if isinstance(_value, torch.dtype) and _value not in _QUANTISED:
        # "float8_e4m3fnuz" -> "FLOAT8_E4M3FNUZ"; aliases such as torch.float are already in the table
        _TAGS.setdefault(_value, str(_value).removeprefix("torch.").upper())

_DTYPES = {tag: dtype for dtype, tag in _TAGS.items()}


def tag_of(dtype: torch.dtype) -> str | None:
    """The name under which `dtype` is saved; None for quantised types, which need more than their bytes."""
    return _TAGS.get(dtype)


def dtype_of(tag: str) -> torch.dtype | None:
    """The type that a tag stands for; None if this torch has no such type."""
    return _DTYPES.get(tag)
