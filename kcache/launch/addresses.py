"""Addresses: finds the device memory of a value."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kcache.errors import ConfigError

__all__ = ["address_of"]

# DLDeviceType of dlpack.h.
_CUDA, _CUDA_HOST, _CUDA_MANAGED = 2, 3, 13
#: The meaning of the stream numbers 1 and 2 from a producer (CUDA Array Interface, version 3).
_DEFAULT_STREAMS = (1, 2)


def address_of(value: object, where: int, device: int, stream: Any) -> int | None:  # noqa: ANN401
    """Return the address of device memory, or None if `value` shows none and is no array.

    It knows cuda.core's buffers, `__cuda_array_interface__` and DLPack, in this order. It makes
    `stream`, of cuda.core, wait for the writes that the producer reports as pending.

    Raises:
        ConfigError: the memory is the host's or of another device, or the producer refuses.
    """
    kind = type(value)
    if kind.__module__.startswith("cuda.core"):
        found = _buffer(value, where, device)
        if found is not None:
            return found
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            return _array_interface(interface, stream)
        if hasattr(kind, "__dlpack_device__"):
            return _dlpack(value, where, device, stream)
    except ConfigError:
        raise
    except Exception as error:
        # The producer's own exception: for a tensor that needs a gradient, say.
        name = kind.__name__
        raise ConfigError(f"argument {where}: the {name} hides its memory: {error}") from error
    return None


def _buffer(value: Any, where: int, device: int) -> int | None:  # noqa: ANN401  cuda.core's
    if not isinstance(value, import_module("cuda.core").Buffer):
        return None
    if not value.is_device_accessible:
        raise ConfigError(f"argument {where}: the buffer is in host memory")
    if not value.is_host_accessible:
        _same_device(value.device_id, where, device)
    return int(value.handle)


def _array_interface(interface: Any, stream: Any) -> int:  # noqa: ANN401  a producer's mapping
    address = int(interface["data"][0] or 0)
    producer = interface.get("stream")
    if producer is not None and producer != int(stream.handle):
        core = import_module("cuda.core")
        if producer in _DEFAULT_STREAMS:
            source = core.LEGACY_DEFAULT_STREAM if producer == 1 else core.PER_THREAD_DEFAULT_STREAM
        else:
            source = core.Stream.from_handle(int(producer))
        stream.wait(source)
    return address


def _dlpack(value: Any, where: int, device: int, stream: Any) -> int:  # noqa: ANN401
    kind, number = (int(part) for part in value.__dlpack_device__())
    if kind not in (_CUDA, _CUDA_HOST, _CUDA_MANAGED):
        name = type(value).__name__
        raise ConfigError(
            f"argument {where}: the {name} is in host memory, which a kernel can't reach; copy it "
            "to the device first"
        )
    if kind == _CUDA:
        _same_device(number, where, device)
    view = import_module("cuda.core.utils").StridedMemoryView
    # The address of a tensor's first element, wherever it begins in its memory.
    return int(view.from_dlpack(value, stream_ptr=int(stream.handle)).ptr)


def _same_device(found: int, where: int, device: int) -> None:
    if found != device:
        raise ConfigError(f"argument {where}: it is on device {found}, the kernel on {device}")
