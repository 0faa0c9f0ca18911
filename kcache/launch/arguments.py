"""Arguments: turns Python values into the bytes that a kernel's parameters take.

It is pure, except that `Addresses` looks up the addresses of device memory. It refuses a value that
may not reach the kernel as the caller meant it. cuda.core alone would pass every Python int as 8
bytes and every float as a double, whatever the kernel expects.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.launch.code import Kind, Parameter

__all__ = ["dimensions", "pack", "shared_bytes"]

#: Returns the device address of a value, or None if it is not device memory; raises ConfigError.
Address = Callable[[object, int], int | None]

#: cuda.core passes a number of one of these sizes by value.
_RAW: dict[int, type[ctypes.c_uint8 | ctypes.c_uint16 | ctypes.c_uint32 | ctypes.c_uint64]] = {
    1: ctypes.c_uint8,
    2: ctypes.c_uint16,
    4: ctypes.c_uint32,
    8: ctypes.c_uint64,
}
_POINTER = 8
_COMPLEX128 = 16
#: The values of numpy's `dtype.kind`. Complex numbers are structs to a kernel. Types that other
#: packages add, such as bfloat16, are `V`.
_NUMPY_KINDS: dict[str, Kind] = {
    **dict.fromkeys("biu", "integer"),
    "f": "float",
    **dict.fromkeys("cV", "struct"),
}
#: The values of ctypes' `_type_`. `P` is `c_void_p`; `z` and `Z` are texts of the host.
_CTYPES_KINDS: dict[str, Kind] = {
    **dict.fromkeys("?cbBhHiIlLqQP", "integer"),
    **dict.fromkeys("fd", "float"),
}
_ALLOWED = "numbers, numpy and ctypes scalars, None, arrays and buffers in device memory"

#: Limits of a launch on every GPU of compute capability 3.0 and newer (CUDA C++ Programming
#: Guide, "Technical Specifications per Compute Capability").
_GRID = (2**31 - 1, 65535, 65535)
_BLOCK = (1024, 1024, 64)


def pack(
    parameters: Sequence[Parameter] | None, values: Sequence[object], address: Address
) -> list[object]:
    """Return the ctypes numbers, of the parameters' sizes, that cuda.core passes for `values`.

    None for `parameters` means that they are unknown. Then only values with a size of their own are
    accepted.

    Raises:
        ConfigError: too many or too few values, or one that does not fit; it names the position,
            counted from 1.
    """
    count = len(values)
    if parameters is None:
        parameters = [Parameter(0, "unknown")] * count
    elif len(parameters) != count:
        raise ConfigError(f"{count} arguments for a kernel that takes {len(parameters)}")
    return [
        _one(value, parameter, where, address)
        for where, (parameter, value) in enumerate(zip(parameters, values, strict=True), 1)
    ]


def _one(value: object, parameter: Parameter, where: int, address: Address) -> object:
    kind = type(value)
    # Before numpy's float64, which is a subclass of float.
    if kind is int or kind is bool or kind is float:
        return _number(value, parameter, where)  # type: ignore[arg-type]  # the three kinds
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _numpy_scalar(value, parameter, where)
    if isinstance(value, ctypes._SimpleCData):  # pyright: ignore[reportUnknownVariableType]
        return _ctypes_scalar(value, parameter, where)
    if isinstance(value, (ctypes.Structure, ctypes.Union, ctypes.Array)):
        whole = cast("ctypes.Structure", value)
        return _raw(bytes(whole), "struct", parameter, where, whole)
    if value is None:
        return _pointer(0, parameter, where, value)
    found = address(value, where)
    if found is not None:
        return _pointer(found, parameter, where, value)
    if isinstance(value, (int, float)):  # subclasses, such as members of an IntEnum
        return _number(value, parameter, where)
    if kind.__module__.startswith("cuda."):
        return value  # a tensor map, say: cuda.core supports its own types
    raise ArgumentTypeError(f"argument {where} is a {kind.__name__}; allowed: {_ALLOWED}")


# -- plain numbers -------------------------------------------------------------------------------


def _number(value: float, parameter: Parameter, where: int) -> object:
    size, kind = parameter
    if size == 0:
        _refuse(value, where, "its size is not known here; pass a numpy or ctypes scalar")
    if size not in _RAW or kind == "struct":
        _refuse(value, where, f"the kernel takes a struct of {size} bytes there; pass a numpy or "
                "ctypes scalar, or a ctypes Structure, of that size")  # fmt: skip
    if kind == "float" or isinstance(value, float):
        return _float(value, parameter, where)
    bits = 8 * size
    if not -(1 << bits - 1) <= value < 1 << bits:
        _refuse(value, where, f"it does not fit into the integer of {size} bytes there")
    return _RAW[size](int(value) & (1 << bits) - 1)


def _float(value: float, parameter: Parameter, where: int) -> object:
    size, kind = parameter
    if kind == "integer":
        _refuse(value, where, f"the kernel takes an integer of {size} bytes there")
    if size not in (4, 8):
        _refuse(value, where, f"a float of {size} bytes has several formats; pass a numpy scalar")
    try:
        made = struct.pack("<f" if size == 4 else "<d", float(value))
    except OverflowError:
        _refuse(value, where, f"it does not fit into the float of {size} bytes there")
    return _RAW[size].from_buffer_copy(made)


def _refuse(value: object, where: int, why: str) -> NoReturn:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    raise ConfigError(f"argument {where}: {text} is not allowed: {why}")


# -- values that have a size of their own --------------------------------------------------------


def _numpy_scalar(value: Any, parameter: Parameter, where: int) -> object:  # noqa: ANN401
    kind = _NUMPY_KINDS.get(value.dtype.kind)
    if kind is None:
        _refuse(value, where, f"it is no number; allowed: {_ALLOWED}")
    return _raw(value.tobytes(), kind, parameter, where, value)


def _ctypes_scalar(value: Any, parameter: Parameter, where: int) -> object:  # noqa: ANN401
    kind = _CTYPES_KINDS.get(value._type_)
    if kind is None:
        _refuse(value, where, f"it is no number; allowed: {_ALLOWED}")
    return _raw(bytes(value), kind, parameter, where, value)


def _raw(data: bytes, kind: Kind, parameter: Parameter, where: int, value: object) -> object:
    size = len(data)
    if parameter.size not in (0, size):
        _refuse(value, where, f"it has {size} bytes, the kernel takes {parameter.size} there")
    # A struct takes any bytes of its size: `half` is one, and so is `float2`.
    known = parameter.kind in ("float", "integer")
    if known and kind != parameter.kind:
        expected = "a float" if parameter.kind == "float" else "an integer or a pointer"
        _refuse(value, where, f"the kernel takes {expected} of {size} bytes there")
    if size in _RAW:
        return _RAW[size].from_buffer_copy(data)
    if size == _COMPLEX128 and type(value).__name__ == "complex128":
        return value
    _refuse(value, where, "structs of 1, 2, 4 and 8 bytes can be passed; pass others by address")


def _pointer(address: int, parameter: Parameter, where: int, value: object) -> object:
    if parameter.size not in (0, _POINTER) or parameter.kind in ("float", "struct"):
        what = "a float" if parameter.kind == "float" else f"{parameter.size} bytes"
        what = "a struct" if parameter.kind == "struct" else what
        name = type(value).__name__
        raise ConfigError(
            f"argument {where} is an address ({name}), but the kernel takes {what} there"
        )
    return ctypes.c_uint64(address)


# -- the configuration ---------------------------------------------------------------------------


def dimensions(name: str, value: object) -> tuple[int, int, int]:
    """Return `value`, the `grid` or `block` of a launch, as (x, y, z).

    Raises:
        ConfigError: it is not one to three whole numbers from 1 to the limit of every GPU.
    """
    limits = _GRID if name == "grid" else _BLOCK
    if type(value) is int and 1 <= value <= limits[0]:
        return value, 1, 1
    given = cast("tuple[object, ...]", value if isinstance(value, (tuple, list)) else (value,))
    sizes = [_whole(size) for size in given]
    fits = 1 <= len(sizes) <= 3 and all(
        size is not None and 1 <= size <= limit for size, limit in zip(sizes, limits, strict=False)
    )
    if not fits:
        most = " x ".join(map(str, limits))
        raise ConfigError(f"{name}={value!r} is not allowed; allowed: 1 to 3 integers, 1 to {most}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x or 1, y or 1, z or 1


def shared_bytes(value: object, most: int) -> int:
    """Return `value`, the dynamic shared memory of a launch in bytes.

    Raises:
        ConfigError: it is not a whole number from 0 to `most`.
    """
    size = _whole(value)
    if size is None or not 0 <= size <= most:
        raise ConfigError(
            f"shared_memory={value!r} is not allowed; allowed on this device: 0 to {most} bytes"
        )
    return size


def threads_in(block: tuple[int, int, int]) -> int:
    """Return how many threads a block has."""
    return math.prod(block)


def _whole(value: object) -> int | None:
    """Return a whole number, numpy's included, as an int; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return int(value.__index__())  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return None
