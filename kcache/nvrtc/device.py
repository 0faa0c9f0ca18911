"""Device: asks the driver for the architecture of the current GPU."""

from __future__ import annotations

import ctypes
import functools

from kcache.errors import ConfigError, DeviceError
from kcache.util.cuda_driver import open_library

__all__ = ["current_arch"]

# CUdevice_attribute of the driver API.
_MAJOR, _MINOR = 75, 76
_NONE = "no arch is given, and {}; allowed: CompileOptions(arch=...), such as arch='sm_90'"


def current_arch() -> str:
    """Return the architecture of the current context's GPU, otherwise of device 0: `"sm_90"`.

    Raises:
        ConfigError: there is no driver or no GPU.
    """
    driver = _driver()
    if driver is None:
        raise ConfigError(_NONE.format("there is no CUDA driver to ask for the GPU's"))
    device = ctypes.c_int(0)
    if driver.cuCtxGetDevice(ctypes.byref(device)) != 0:
        device.value = 0
    return _arch_of(device.value)


@functools.cache
def _arch_of(device: int) -> str:
    driver = _driver()
    values: list[int] = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        if driver is None or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            raise ConfigError(_NONE.format("the CUDA driver finds no GPU"))
        values.append(value.value)
    return f"sm_{values[0]}{values[1]}"


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """Return the driver library, initialised, or None."""
    try:
        return open_library()
    except DeviceError:
        return None
