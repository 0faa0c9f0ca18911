"""Arguments: converts Python values to the types with which cuda.core passes them to a kernel.

This is needed because cuda.core itself passes every Python int as 8 bytes, and every float as a
double, regardless of the parameter's size.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.util.units import counted

#: Called with an array and the position of the argument, which error messages name; returns the
#: array's device address.
Address = Callable[[object, int], int]

#: Size in bytes -> the type in which cuda.core accepts raw bytes of that size.
_RAW: dict[int, type[ctypes.c_uint8 | ctypes.c_uint16 | ctypes.c_uint32 | ctypes.c_uint64]] = {
    1: ctypes.c_uint8,
    2: ctypes.c_uint16,
    4: ctypes.c_uint32,
    8: ctypes.c_uint64,
}
_POINTER = 8
# DLDeviceType of dlpack.h.
_CUDA, _CUDA_HOST, _CUDA_MANAGED = 2, 3, 13
_FLOATS = {4: "<f", 8: "<d"}
_CTYPES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)  # pyright: ignore[reportUnknownVariableType]
_ALLOWED = "numbers, numpy and ctypes scalars, None, arrays and buffers in device memory"


def pack(sizes: Sequence[int], values: Sequence[object], address: Address) -> list[object]:
    """Return the arguments to pass to cuda.core instead of `values`.

    Args:
        sizes: the sizes of the kernel's parameters in bytes.
        values: the arguments that the caller passed.
        address: returns the device address of an array.

    Raises:
        ConfigError: either there are too many or too few values, or a value does not fit its
            parameter. In the second case, the message names the position, counted from 1.
    """
    if len(sizes) != len(values):
        raise ConfigError(f"expected {counted(len(sizes), 'argument')}, got {len(values)}")
    numbered = enumerate(zip(values, sizes, strict=True), 1)
    return [_one(value, size, where, address) for where, (value, size) in numbered]


def _one(value: object, size: int, where: int, address: Address) -> object:
    data = _bytes_of(value)
    if data is None and isinstance(value, (int, float)):
        data = _number(value, size, where)
    elif data is None and type(value).__module__.startswith("cuda."):
        return value  # a buffer or a tensor map: cuda.core knows its own types
    elif data is None:
        data = address(value, where).to_bytes(_POINTER, "little")
    if len(data) != size:
        raise _rejected(
            value, where, f"it has {counted(len(data), 'byte')}, but the kernel takes {size} there"
        )
    # The only value of another size that cuda.core accepts is a numpy.complex128.
    return _RAW[size].from_buffer_copy(data) if size in _RAW else value


def _bytes_of(value: Any) -> bytes | None:  # noqa: ANN401  numpy's scalars, which may be missing
    """Return the bytes of a value whose type has a fixed size, or None for other values."""
    if value is None:
        return bytes(_POINTER)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return bytes(value.tobytes())
    return bytes(value) if isinstance(value, _CTYPES) else None  # pyright: ignore[reportUnknownArgumentType]


def _number(value: float, size: int, where: int) -> bytes:
    """Return a Python number as `size` bytes, the parameter's size.

    An int becomes an integer. A float becomes a `float` or a `double`, depending on `size`.

    Raises:
        ConfigError: the number does not fit, or there is no such type of this size.
    """
    try:
        if isinstance(value, int) and size in _RAW:
            return int(value).to_bytes(size, "little", signed=value < 0)
        if size in _FLOATS:
            return struct.pack(_FLOATS[size], value)
    except OverflowError:
        raise _rejected(value, where, f"it does not fit into {counted(size, 'byte')}") from None
    what = f"the kernel takes {counted(size, 'byte')} there; pass a numpy or ctypes scalar"
    raise _rejected(value, where, f"{what} of that size")


def _rejected(value: object, where: int, why: str) -> ConfigError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return ConfigError(f"argument {where}: {text} is not allowed: {why}")


def address_of(value: Any, where: int, device: int, stream: int) -> int:  # noqa: ANN401
    """Return the address of an array's first element, by DLPack or `__cuda_array_interface__`.

    The stream is made to wait for pending writes to the array that its producer reports.

    Args:
        value: the array.
        where: the position of the argument, for messages.
        device: the number of the kernel's device.
        stream: the address of the stream in which the kernel will be launched.

    Raises:
        ConfigError: either the memory is on the host or on another device, or the array's producer
            raised an error.
        ArgumentTypeError: the value is not an array.
    """
    name = type(value).__name__
    if hasattr(value.__class__, "__dlpack_device__"):
        _check_device(name, value.__dlpack_device__(), where, device)
    elif not hasattr(value, "__cuda_array_interface__"):
        raise ArgumentTypeError(f"argument {where}: expected {_ALLOWED}, got {name}")
    view = import_module("cuda.core.utils").StridedMemoryView
    try:
        return int(view.from_any_interface(value, stream_ptr=stream).ptr)
    except Exception as error:  # the producer's own
        what = f"argument {where}: the {name} does not return the address of its memory: {error}"
        raise ConfigError(what) from error


def _check_device(name: str, found: tuple[int, int], where: int, device: int) -> None:
    kind, number = found
    if kind not in (_CUDA, _CUDA_HOST, _CUDA_MANAGED):
        raise ConfigError(
            f"argument {where}: the {name} is in host memory, which a kernel can't reach; copy it "
            "to the device first"
        )
    if kind == _CUDA and number != device:
        what = f"argument {where}: the {name} is on device {number}, but the kernel on {device}"
        raise ConfigError(what)
