"""Small state as bytes: a typed tree in MessagePack. What is encoded comes back with the same types and values.

    4 bytes "BST1", then one MessagePack value. Plain types are MessagePack's own (nil, bool, int of 64 bits, float64,
    str, bin, array = list, map = dict); the rest are extension types:

    code  type                      payload (MessagePack unless said otherwise)
    1     tuple                     array
    2     set                       array, sorted by encoded bytes
    3     frozenset                 array, sorted by encoded bytes
    4     int beyond 64 bits        two's complement, big-endian
    5     complex                   two float64, little-endian
    6     bytearray                 the bytes
    7     numpy array               [dtype, shape, "C" or "F", data]
    8     numpy scalar              [dtype, data]; dtype "str" or "bytes" for numpy.str_ and numpy.bytes_
    9     TreeTensor                [dtype, shape, data]
    10    enum member               ["module:Class", value]
    11    OrderedDict               map
    12    defaultdict               [name of the factory, or nil; map]

dtype of numpy is what `numpy.lib.format.dtype_to_descr` makes: a text, or for a structured type a list.

Not kept: which objects are one and the same, strides other than those of C and Fortran order, the write-protection of
an array, the insertion order of a set, the hidden bit of a signalling NaN on processors that drop it. An enum member
comes back as its value unless the caller names the class. Subclasses other than those above are refused, as is
everything that is not data: the message names the path (`extra.lr.lr_lambdas[0]: function`).

Nothing in the bytes is executed: no name in them is looked up anywhere but in tables of this file and of the caller.
"""

from __future__ import annotations

import enum
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack

from baftd.errors import FormatError, StateTreeError

if TYPE_CHECKING:
    from baftd.checkpoint.shard import BytesLike

__all__ = ["MAX_DEPTH", "MAX_TREE_BYTES", "TreeTensor", "decode", "encode", "validate"]

MAGIC: Final = b"BST1"
MAX_DEPTH: Final = 64
"""Containers within containers. A tree that is deeper holds itself, or is no training state."""
MAX_TREE_BYTES: Final = 1 << 30
MAX_ITEMS: Final = 1 << 24
"""Items in one container."""
MAX_DIMENSIONS: Final = 64

_TUPLE, _SET, _FROZENSET, _INT, _COMPLEX, _BYTEARRAY, _ARRAY, _SCALAR, _TENSOR, _ENUM, _ORDERED, _DEFAULT = range(1, 13)
_PLAIN = frozenset({NoneType, bool, float, str, bytes})
_PAIR = struct.Struct("<dd")
_LOW, _HIGH = -(1 << 63), (1 << 64) - 1
_FACTORIES: dict[str, type] = {
    factory.__name__: factory for factory in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
_ARRAY_KINDS = frozenset("biufcSUVmM")
_UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    SyntaxError,  # numpy's, for a dtype that is no dtype
    struct.error,
    msgpack.UnpackException,
)


@dataclass(frozen=True)
class TreeTensor:
    """A tensor of a framework, as its adapter took it apart: dtype (a safetensors tag or a foreign name), shape, and
    the bytes of its elements in row-major order. `data` may be any buffer; it comes back as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: BytesLike


class _Refused(Exception):
    """A value that is not data; never leaves this module. `steps` is the path to it, innermost first."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps: list[str] = []


# -------------------------------------------------------------------------------------------------- encoding


def encode(value: object, path: str = "") -> bytes:
    """`value` as bytes. `path` is what the caller calls it, for messages.

    Raises StateTreeError naming the path of a value that the tree cannot hold, or the size of one that is too large.
    """
    try:
        data = MAGIC + _pack(_to_wire(value, 0))
    except _Refused as refused:
        where = path + "".join(reversed(refused.steps))
        where = (where if path else where.removeprefix(".")) or "small state"
        if len(where) > 200:
            where = f"{where[:100]} ... {where[-80:]}"
        raise StateTreeError(
            f"{where}: {refused.problem}.",
            hint="Leave it out, or save what it is made of (numbers, text, lists, dicts, arrays).",
        ) from None
    except (ValueError, MemoryError) as error:
        raise StateTreeError(f"{path or 'small state'}: too large to encode ({error}).") from error
    if len(data) > MAX_TREE_BYTES:
        raise StateTreeError(f"{path or 'small state'}: {len(data)} bytes are more than {MAX_TREE_BYTES}.")
    return data


def validate(value: object, path: str = "") -> None:
    """Raise StateTreeError, as `encode` does, if the tree cannot hold `value`."""
    encode(value, path)


def _pack(value: object) -> bytes:
    return cast("bytes", msgpack.packb(value, use_bin_type=True, strict_types=True, unicode_errors="surrogatepass"))


def _ext(code: int, payload: bytes) -> msgpack.ExtType:
    return msgpack.ExtType(code, payload)


def _to_wire(value: object, depth: int) -> Any:
    """`value` with everything that MessagePack does not know replaced by an ExtType."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return _int_to_wire(cast("int", value))
    writer = _WRITERS.get(kind)
    if writer is not None:
        if depth >= MAX_DEPTH:
            raise _Refused(f"nested deeper than {MAX_DEPTH} containers (does it contain itself?)")
        return writer(value, depth + 1)
    if isinstance(value, enum.Enum):
        return _enum_to_wire(value, depth)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if kind is numpy.ndarray:
            return _array_to_wire(value, numpy)
        if isinstance(value, numpy.generic):
            return _scalar_to_wire(value, numpy)
    raise _Refused(_describe(value))


def _describe(value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ in ("builtins", None) else f"{kind.__module__}.{kind.__qualname__}"
    for base in (dict, list, tuple, set, frozenset, str, int, float, bytes):
        if isinstance(value, base):
            return f"{name} (a subclass of {base.__name__}, whose type could not be restored)"
    return name


def _int_to_wire(value: int) -> object:
    if _LOW <= value <= _HIGH:
        return value
    return _ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _items(values: Iterable[object], depth: int) -> list[Any]:
    """Items of a sequence. Python's RNG state is 625 numbers, so plain items are passed on without a look at each."""
    items = list(values)
    kinds = set(map(type, items))
    if kinds <= _PLAIN:
        return items
    if kinds == {int}:
        numbers = cast("list[int]", items)
        if min(numbers) >= _LOW and max(numbers) <= _HIGH:
            return items
    out = []
    for index, item in enumerate(items):
        try:
            out.append(_to_wire(item, depth))
        except _Refused as refused:
            refused.steps.append(f"[{index}]")
            raise
    return out


def _mapping(value: dict[Any, Any], depth: int) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    named = True
    for key, item in value.items():
        try:
            if type(key) is str:
                out[key] = item if type(item) in _PLAIN else _to_wire(item, depth)
            else:
                named = False
                out[_key(key, depth)] = _to_wire(item, depth)
        except _Refused as refused:
            refused.steps.append(f".{key}" if type(key) is str else f"[{key!r:.80}]")
            raise
    if not named and _collide(value):
        raise _Refused("dict with two keys that are equal once an enum member is replaced by its value")
    return out


def _key(key: object, depth: int) -> object:
    if not _hashable_when_read(key):
        raise _Refused(f"key of type {_describe(key)}")
    try:
        return _to_wire(key, depth)
    except _Refused as refused:
        raise _Refused(f"key of type {refused.problem}") from None


def _hashable_when_read(key: object) -> bool:
    """Enum members come back as their values, which need not be hashable; structured scalars come back writable."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(key, numpy.void):
        return False
    if isinstance(key, enum.Enum):
        return _hashable_when_read(key.value)
    if isinstance(key, (tuple, frozenset)):
        return all(_hashable_when_read(item) for item in key)
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _collide(keys: Collection[object]) -> bool:
    """Whether two keys would be equal where no enum class is known."""
    return any(map(_holds_enum, keys)) and len({_shown(key) for key in keys}) != len(keys)


def _holds_enum(key: object) -> bool:
    if isinstance(key, enum.Enum):
        return True
    return type(key) in (tuple, frozenset) and any(map(_holds_enum, cast("Iterable[object]", key)))


def _shown(key: object) -> object:
    """A key as it comes back where no enum class is known."""
    if isinstance(key, enum.Enum):
        return _shown(key.value)
    if type(key) is tuple:
        return tuple(_shown(item) for item in key)
    if type(key) is frozenset:
        return frozenset(_shown(item) for item in key)
    return key


def _members(value: Collection[object], depth: int) -> bytes:
    """Members of a set, in an order that does not depend on hashes."""
    members = sorted(_pack(_key(member, depth)) for member in value)
    if _collide(value):
        raise _Refused("set with two members that are equal once an enum member is replaced by its value")
    return cast("bytes", msgpack.Packer().pack_array_header(len(members))) + b"".join(members)


def _enum_to_wire(value: enum.Enum, depth: int) -> object:
    kind = type(value)
    try:
        inner = _to_wire(value.value, depth + 1)
    except _Refused as refused:
        refused.steps.append(".value")
        raise
    return _ext(_ENUM, _pack([f"{kind.__module__}:{kind.__qualname__}", inner]))


def _default_to_wire(value: defaultdict[Any, Any], depth: int) -> object:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise _Refused(f"defaultdict whose factory is {_describe(factory)}, not a built-in type")
    return _ext(_DEFAULT, _pack([name, _mapping(value, depth)]))


def _tensor_to_wire(value: TreeTensor, _: int) -> object:
    if type(value.dtype) is not str or not _is_shape(value.shape):
        raise _Refused(f"TreeTensor of dtype {value.dtype!r} and shape {value.shape!r}")
    data = value.data if type(value.data) is bytes else memoryview(value.data).tobytes()
    return _ext(_TENSOR, _pack([value.dtype, list(value.shape), data]))


_WRITERS: dict[type, Callable[[Any, int], Any]] = {
    list: _items,
    dict: _mapping,
    tuple: lambda value, depth: _ext(_TUPLE, _pack(_items(value, depth))),
    set: lambda value, depth: _ext(_SET, _members(value, depth)),
    frozenset: lambda value, depth: _ext(_FROZENSET, _members(value, depth)),
    complex: lambda value, _: _ext(_COMPLEX, _PAIR.pack(value.real, value.imag)),
    bytearray: lambda value, _: _ext(_BYTEARRAY, bytes(value)),
    OrderedDict: lambda value, depth: _ext(_ORDERED, _pack(_mapping(value, depth))),
    defaultdict: _default_to_wire,
    TreeTensor: _tensor_to_wire,
}


def _dtype_to_wire(dtype: Any, numpy: Any) -> object:
    """A numpy type as text or list; refused if it would not come back as it is."""
    if dtype.kind in "biuf" and numpy.dtype(dtype.str) is dtype:
        return dtype.str  # one of numpy's own, at every step in the state of a generator
    problem = f"numpy array of dtype {dtype!s}, which cannot be restored"
    if dtype.hasobject or dtype.kind not in _ARRAY_KINDS or _has_metadata(dtype):
        raise _Refused(problem)
    try:
        described = numpy.lib.format.dtype_to_descr(dtype)
        again = numpy.lib.format.descr_to_dtype(described)
        if again != dtype or again.type is not dtype.type:
            raise _Refused(problem)
    except (TypeError, ValueError) as error:
        raise _Refused(f"{problem} ({error})") from None
    return _plain_descr(described)


def _has_metadata(dtype: Any) -> bool:
    fields = dtype.fields or {}
    return bool(dtype.metadata or dtype.base.metadata or any(_has_metadata(field[0]) for field in fields.values()))


def _plain_descr(described: object) -> object:
    if isinstance(described, (list, tuple)):
        return [_plain_descr(item) for item in described]
    return described


def _array_to_wire(value: Any, numpy: Any) -> object:
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    dtype = _dtype_to_wire(value.dtype, numpy)
    return _ext(_ARRAY, _pack([dtype, list(value.shape), order, value.tobytes(order)]))


def _scalar_to_wire(value: Any, numpy: Any) -> object:
    if isinstance(value, numpy.str_):
        return _ext(_SCALAR, _pack(["str", str(value)]))
    if isinstance(value, numpy.bytes_):
        return _ext(_SCALAR, _pack(["bytes", bytes(value)]))
    return _ext(_SCALAR, _pack([_dtype_to_wire(value.dtype, numpy), value.tobytes()]))


# -------------------------------------------------------------------------------------------------- decoding


def decode(data: BytesLike, *, enums: Iterable[type[enum.Enum]] = ()) -> Any:
    """The value that was encoded. Members of the classes in `enums` come back as members, others as their values.

    Nothing in the result shares memory with `data`. Raises FormatError for bytes that `encode` cannot have made.
    """
    if len(data) > MAX_TREE_BYTES:
        raise FormatError(f"small state of {len(data)} bytes is larger than {MAX_TREE_BYTES} bytes.")
    if bytes(data[:4]) != MAGIC:
        raise FormatError(f"small state begins with {bytes(data[:4])!r}, not with {MAGIC!r}.")
    known = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in enums}
    try:
        return _Reader(known).read(memoryview(data)[4:])
    except FormatError:
        raise
    except _UNREADABLE as error:
        raise FormatError(f"small state cannot be read: {type(error).__name__}: {error}") from error


class _Reader:
    """Decoding, one nested payload within another."""

    def __init__(self, enums: dict[str, type[enum.Enum]]) -> None:
        self.enums = enums
        self.depth = 0

    def read(self, data: BytesLike) -> Any:
        """One MessagePack value that fills `data`."""
        self.depth += 1
        if self.depth > MAX_DEPTH + 4:
            raise FormatError(f"small state is nested deeper than {MAX_DEPTH} containers.")
        size = max(len(data), 1)
        value = msgpack.unpackb(
            data,
            use_list=True,
            raw=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            ext_hook=self.extension,
            list_hook=_checked_list,
            object_pairs_hook=_checked_map,
            max_str_len=size,
            max_bin_len=size,
            max_ext_len=size,
            max_array_len=min(size, MAX_ITEMS),
            max_map_len=min(size, MAX_ITEMS),
        )
        self.depth -= 1
        if type(value) is msgpack.Timestamp:
            raise FormatError("small state holds a timestamp, which is not among its types.")
        return value

    def extension(self, code: int, payload: bytes) -> Any:
        """The value of an extension type."""
        reader = _READERS.get(code)
        if reader is None:
            raise FormatError(f"small state holds extension type {code}, which this version does not know.")
        return reader(self, payload)

    def fields(self, payload: bytes, *kinds: type | tuple[type, ...]) -> list[Any]:
        """A list of values of these types."""
        value = self.read(payload)
        if type(value) is not list or len(value) != len(kinds) or not all(map(isinstance, value, kinds)):
            raise FormatError(f"small state holds {value!r:.80} where a list of {len(kinds)} fields is due.")
        return value

    def one(self, payload: bytes, kind: type) -> Any:
        """A value of this type."""
        value = self.read(payload)
        if type(value) is not kind:
            raise FormatError(f"small state holds {type(value).__name__} where {kind.__name__} is due.")
        return value

    def enum(self, payload: bytes) -> Any:
        """A member if its class is known, else its value."""
        name, value = self.fields(payload, str, object)
        kind = self.enums.get(name)
        return value if kind is None else kind(value)

    def default(self, payload: bytes) -> Any:
        """A defaultdict with a factory of the table."""
        name, items = self.fields(payload, (str, NoneType), dict)
        return defaultdict(None if name is None else _FACTORIES[name], items)

    def array(self, payload: bytes) -> Any:
        """A writable numpy array of its own memory."""
        import numpy as np  # late: most readers of a small state have no array in it

        descr, shape, order, data = self.fields(payload, (str, list), list, str, bytes)
        dtype = _dtype_from_wire(descr)
        if order not in ("C", "F") or not _is_shape(shape) or prod(shape) * dtype.itemsize != len(data):
            raise FormatError(f"small state holds an array {descr} {shape} {order} of {len(data)} bytes.")
        array = np.empty(tuple(shape), dtype=dtype, order=cast("Any", order))
        if len(data):
            flat = np.frombuffer(data, dtype=np.uint8)
            array.reshape(-1, order=cast("Any", order)).view(np.uint8)[:] = flat
        return array

    def scalar(self, payload: bytes) -> Any:
        """A numpy scalar."""
        import numpy as np

        descr, data = self.fields(payload, (str, list), (str, bytes))
        if descr == "str" and type(data) is str:
            return np.str_(data)
        if type(data) is not bytes:
            raise FormatError("small state holds a numpy scalar without bytes.")
        if descr == "bytes":
            return np.bytes_(data)
        dtype = _dtype_from_wire(descr)
        if dtype.itemsize != len(data):
            raise FormatError(f"small state holds a scalar {descr} of {len(data)} bytes.")
        return np.ndarray((), dtype=dtype, buffer=bytearray(data))[()] if data else np.zeros((), dtype=dtype)[()]

    def tensor(self, payload: bytes) -> TreeTensor:
        """A TreeTensor."""
        dtype, shape, data = self.fields(payload, str, list, bytes)
        if not _is_shape(shape):
            raise FormatError(f"small state holds a tensor of shape {shape!r:.80}.")
        return TreeTensor(dtype, tuple(shape), data)


_READERS: dict[int, Callable[[_Reader, bytes], Any]] = {
    _TUPLE: lambda reader, payload: tuple(reader.one(payload, list)),
    _SET: lambda reader, payload: _checked_set(set, reader.one(payload, list)),
    _FROZENSET: lambda reader, payload: _checked_set(frozenset, reader.one(payload, list)),
    _INT: lambda _, payload: int.from_bytes(payload, "big", signed=True),
    _COMPLEX: lambda _, payload: complex(*_PAIR.unpack(payload)),
    _BYTEARRAY: lambda _, payload: bytearray(payload),
    _ARRAY: _Reader.array,
    _SCALAR: _Reader.scalar,
    _TENSOR: _Reader.tensor,
    _ENUM: _Reader.enum,
    _ORDERED: lambda reader, payload: OrderedDict(reader.one(payload, dict)),
    _DEFAULT: _Reader.default,
}


def _checked_list(items: list[Any]) -> list[Any]:
    if msgpack.Timestamp in map(type, items):
        raise FormatError("small state holds a timestamp, which is not among its types.")
    return items


def _checked_map(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError("small state holds a dict with a key that stands there twice.")
    for pair in pairs:
        _checked_list(list(pair))
    return found


def _checked_set(kind: Callable[[list[Any]], Any], members: list[Any]) -> Any:
    found = kind(members)
    if len(found) != len(members):
        raise FormatError("small state holds a set with a member that stands there twice.")
    return found


def _is_shape(shape: Sequence[Any]) -> bool:
    return len(shape) <= MAX_DIMENSIONS and all(type(size) is int and size >= 0 for size in shape)


def _dtype_from_wire(described: object) -> Any:
    import numpy as np

    dtype = np.lib.format.descr_to_dtype(_descr_from_wire(described, 0))  # type: ignore[no-untyped-call]
    if dtype.hasobject or dtype.kind not in _ARRAY_KINDS:
        raise FormatError(f"small state holds an array of dtype {described!r:.80}, which is not data.")
    return dtype


def _descr_from_wire(described: object, depth: int) -> object:
    """A structured type is a list of (name, type) or (name, type, shape); a name may be a (title, name) pair."""
    if isinstance(described, str):
        return described
    if not isinstance(described, list) or depth > 8:
        raise FormatError(f"small state holds a numpy dtype {described!r:.80}.")
    fields = []
    for item in described:
        if not isinstance(item, list) or len(item) not in (2, 3):
            raise FormatError(f"small state holds a numpy field {item!r:.80}.")
        name = tuple(item[0]) if isinstance(item[0], list) else item[0]
        shape = [tuple(item[2])] if len(item) == 3 else []
        fields.append((name, _descr_from_wire(item[1], depth + 1), *shape))
    return fields
