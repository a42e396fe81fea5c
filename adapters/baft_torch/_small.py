"""Values of torch (and of the collections it uses) to and from the typed tree of small state.

The tree holds plain data. What it has no type for is wrapped in a dict with one reserved key, "baft.kind": an element
type, a device, a tensor that was not on the CPU, a Counter, an OrderedDict, a deque, the state of a Generator. A
value that is none of these goes through unchanged, and `baftd.checkpoint.state_tree` refuses it with its path if it
is not data.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

from baft_torch._dtypes import dtype_of, tag_of
from baft_torch._tensors import plain
from baftd.checkpoint.state_tree import TreeTensor
from baftd.errors import FormatError, StateTreeError

__all__ = ["KIND", "from_tree", "tensor_from_tree", "tensor_to_tree", "to_tree"]

KIND = "baft.kind"
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, complex})


def to_tree(value: object, path: str = "") -> object:
    """Plain data for `value`, sharing nothing with it. Raises StateTreeError or UnsupportedTensor naming `path`."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: to_tree(item, f"{path}.{key}") for key, item in value.items()}  # type: ignore[attr-defined]
    if kind is list:
        return [to_tree(item, f"{path}[{i}]") for i, item in enumerate(value)]  # type: ignore[arg-type,var-annotated]
    if kind is tuple:
        return tuple(to_tree(item, f"{path}[{i}]") for i, item in enumerate(value))  # type: ignore[arg-type,var-annotated]
    if isinstance(value, torch.Tensor):
        tree = tensor_to_tree(value, path)
        if value.device.type == "cpu":
            return tree
        return {KIND: "tensor_on", "device": str(value.device), "value": tree}
    return _rare_to_tree(value, path)


def _rare_to_tree(value: object, path: str) -> object:
    if isinstance(value, torch.Size):
        return {KIND: "size", "value": tuple(value)}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {KIND: "device", "value": str(value)}
    if isinstance(value, torch.Generator):
        return {KIND: "generator", "value": tensor_to_tree(value.get_state(), path)}
    if type(value) is Counter:
        return {KIND: "counter", "value": [[to_tree(k, path), n] for k, n in value.items()]}
    if type(value) is OrderedDict:
        return {KIND: "ordered", "value": [[k, to_tree(v, f"{path}.{k}")] for k, v in value.items()]}
    if type(value) is defaultdict:
        # The factory is code and stays with the live object; load_state_dict of its owner brings its own.
        return {key: to_tree(item, f"{path}.{key}") for key, item in value.items()}
    if type(value) is deque:
        items = [to_tree(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return {KIND: "deque", "maxlen": value.maxlen, "value": items}
    if type(value) is np.ndarray:
        return value.copy()
    if callable(getattr(value, "state_dict", None)):
        raise StateTreeError(
            f"{path or 'the value'} is a {type(value).__name__}, not data.",
            hint="Give attach() the object itself in extra=, or its state_dict().",
        )
    return value  # enums, sets, numpy scalars: the tree knows them; all else it refuses by path


def from_tree(value: object) -> Any:
    """The value that `to_tree` was given: same types, same elements, fresh memory."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, TreeTensor):
        return tensor_from_tree(value)
    if isinstance(value, dict):
        return _unwrap(value) if KIND in value else {key: from_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_tree(item) for item in value]
    if isinstance(value, tuple):
        return tuple(from_tree(item) for item in value)
    return value


def _unwrap(value: dict[Any, Any]) -> object:
    kind, inner = value[KIND], value.get("value")
    if kind == "size":
        return torch.Size(inner or ())
    if kind == "dtype":
        found = getattr(torch, str(inner), None)
        if isinstance(found, torch.dtype):
            return found
    if kind == "device":
        return torch.device(str(inner))
    if kind == "tensor_on" and isinstance(inner, TreeTensor):
        device = torch.device(value["device"])
        tensor = tensor_from_tree(inner)
        return tensor.to(device) if device.type == "cpu" or torch.cuda.is_available() else tensor
    if kind == "generator" and isinstance(inner, TreeTensor):
        return tensor_from_tree(inner)
    if kind == "counter" and inner is not None:
        return Counter({from_tree(k): n for k, n in inner})
    if kind == "ordered" and inner is not None:
        return OrderedDict((k, from_tree(v)) for k, v in inner)
    if kind == "deque" and inner is not None:
        return deque((from_tree(v) for v in inner), maxlen=value["maxlen"])
    raise FormatError(f"small state holds a value of kind {kind!r}, which this version of baft_torch does not know.")


def tensor_to_tree(tensor: torch.Tensor, path: str) -> TreeTensor:
    """Copy a tensor into a tree value, row-major. UnsupportedTensor names `path`."""
    local = plain(tensor, path)
    tag = tag_of(local.dtype)
    assert tag is not None, path  # plain() refused it
    row_major = local.resolve_conj().resolve_neg().cpu().contiguous()
    data = row_major.reshape(-1).view(torch.uint8).numpy().tobytes() if row_major.numel() else b""
    return TreeTensor(tag, tuple(local.shape), data)


def tensor_from_tree(value: TreeTensor) -> torch.Tensor:
    """A fresh CPU tensor. FormatError for an element type that this torch does not know."""
    dtype = dtype_of(value.dtype)
    if dtype is None:
        raise FormatError(f"small state holds a tensor of type {value.dtype}, which torch {torch.__version__} lacks.")
    tensor = torch.empty(value.shape, dtype=dtype)
    if tensor.numel():
        raw = np.frombuffer(value.data, dtype=np.uint8)
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = raw
    return tensor
