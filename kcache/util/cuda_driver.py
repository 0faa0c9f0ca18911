"""CudaDriver: checks whether there is a CUDA driver, before other packages use it.

If there is no driver, the first call of cuda.core 1.2.2 raises SystemError, and the second call
hangs. The check in this module needs no other package and takes almost no time.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from contextlib import suppress

from kcache.errors import ConfigError, DeviceError

#: The major and the minor number of a CUDA version.
Version = tuple[int, int]

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# CUresult of cuda.h.
_NOT_INITIALIZED = 3
_NO_DEVICE = 100
#: The message for a forked child. The driver's state and device handles belong to the parent, so
#: the driver refuses every call of the child (CUDA C++ Best Practices, "Fork").
FORKED = (
    "this process was forked from one that used the CUDA driver, which a forked child can't use; "
    "start it with multiprocessing's 'spawn' or 'forkserver'"
)


def driver_version() -> Version | None:
    """Return the newest CUDA version that the driver supports, or None if there is no driver.

    This does not initialise the driver. `cuDriverGetVersion` returns 1000 * major + 10 * minor.
    """
    value = ctypes.c_int()
    try:
        if ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(value)) != 0:
            return None  # for example, if the library is the toolkit's stub of the driver
    except (OSError, AttributeError):
        return None
    return value.value // 1000, value.value % 1000 // 10


def open_library() -> ctypes.CDLL:
    """Load the driver's library, initialise the driver, and return the library.

    Raises:
        DeviceError: there is no driver, the driver finds no GPU, or this process was forked from a
            process that used the driver. The message has the reason.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"there is no CUDA driver: the library {LIBRARY} was not found. It comes with NVIDIA's "
            "GPU driver; in a container, the NVIDIA Container Toolkit provides it"
        ) from error
    code = library.cuInit(0)
    if code == _NOT_INITIALIZED:
        raise DeviceError(FORKED)
    if code == _NO_DEVICE:
        raise DeviceError("the CUDA driver finds no GPU (cuInit: CUDA_ERROR_NO_DEVICE)")
    if code:
        raise DeviceError(f"the CUDA driver can't be initialised (cuInit): {_name(library, code)}")
    return library


def _name(library: ctypes.CDLL, code: int) -> str:
    """Return the name of the CUresult `code`, such as `"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"`."""
    name = ctypes.c_char_p()
    with suppress(AttributeError):
        library.cuGetErrorName(code, ctypes.byref(name))
    return f"error {code}" if name.value is None else name.value.decode(errors="replace")


# -- the GPU's architecture ------------------------------------------------------------------------

# CUdevice_attribute of the driver API.
_MAJOR, _MINOR = 75, 76
_NONE = "no arch is given, and {}; expected CompileOptions(arch=...), such as arch='sm_90'"


def current_arch() -> str:
    """Return the architecture of the GPU of the current CUDA context, such as `"sm_90"`.

    If there is no current context, return the architecture of device 0.

    Raises:
        ConfigError: there is no driver or no GPU.
    """
    device = ctypes.c_int()
    try:
        code = _driver().cuCtxGetDevice(ctypes.byref(device))
    except DeviceError:
        raise ConfigError(_NONE.format("this process has no usable CUDA driver or GPU")) from None
    return _arch_of(0 if code else device.value)


@functools.cache
def _arch_of(device: int) -> str:
    version = ctypes.c_int(), ctypes.c_int()
    for value, attribute in zip(version, (_MAJOR, _MINOR), strict=True):
        if _driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            raise ConfigError(_NONE.format("the CUDA driver finds no GPU"))
    return f"sm_{version[0].value}{version[1].value}"


_driver = functools.cache(open_library)
