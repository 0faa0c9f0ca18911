"""The CUDA driver, called through ctypes: nothing of CUDA's Python packages is imported."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from kcache.errors import DeviceError
from kcache.util.forks import at_fork

__all__ = ["Driver", "DriverError", "Version", "driver_version", "open_driver", "open_library"]

#: Major and minor.
Version = tuple[int, int]

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# CUresult of cuda.h.
_INVALID_VALUE = 1
_NOT_INITIALIZED = 3
_NO_DEVICE = 100
#: The driver's errors for a context that no longer exists: invalid value, not initialised,
#: deinitialised, invalid context, invalid handle, context is destroyed.
_DEAD = (1, 3, 4, 201, 400, 709)
#: The message for a child of fork. The driver's state is in the parent's memory, and its device
#: handles belong to the parent. So the driver refuses every call (CUDA C++ Best Practices, "Fork").
FORKED = (
    "this process was forked from one that used the CUDA driver, which a forked child can't use; "
    "start it with multiprocessing's 'spawn' or 'forkserver'"
)

# A pointer's type, by what it points to.
_OUT_INT = POINTER(c_int)
_INT = ctypes.sizeof(c_int)
_OUT_POINTER = POINTER(c_void_p)
_OUT_SIZE = POINTER(c_size_t)
#: The functions that kcache calls, with the types of their arguments. The macros of cuda.h turn the
#: plain name into the one with `_v2`.
_FUNCTIONS: dict[str, tuple[type[Any], ...]] = {
    "cuCtxGetCurrent": (_OUT_POINTER,),
    "cuCtxGetDevice": (_OUT_INT,),
    "cuCtxPopCurrent_v2": (_OUT_POINTER,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuDeviceGetAttribute": (_OUT_INT, c_int, c_int),
    "cuDeviceGetCount": (_OUT_INT,),
    "cuDevicePrimaryCtxGetState": (c_int, c_void_p, c_void_p),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuDevicePrimaryCtxRetain": (_OUT_POINTER, c_int),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuStreamGetCtx": (c_void_p, _OUT_POINTER),
}
#: Further functions, of CUDA 12: a driver for CUDA 11 lacks them.
_FUNCTIONS_12: dict[str, tuple[type[Any], ...]] = {
    "cuCtxGetId": (c_void_p, POINTER(c_ulonglong)),
    "cuKernelGetAttribute": (_OUT_INT, c_int, c_void_p, c_int),
    "cuKernelGetFunction": (_OUT_POINTER, c_void_p),
    "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
    "cuLibraryGetKernel": (_OUT_POINTER, c_void_p, c_char_p),
    "cuLibraryLoadData": (_OUT_POINTER, c_char_p, *(c_void_p, c_void_p, c_uint) * 2),
    "cuLibraryUnload": (c_void_p,),
}
#: Further functions, of CUDA 12.4.
_PARAMETER_INFO = "cuKernelGetParamInfo"


class DriverError(DeviceError):
    """The driver refused a call.

    Attributes:
        code: its CUresult, a number of cuda.h.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """The functions of an initialised driver. Contexts, kernels and streams are addresses: ints.

    Threads: safe to share; the current context is the calling thread's. Fork: a child can't use it.

    Attributes:
        forked: whether this is a forked child of the process that opened it.

    Raises:
        DeviceError: it is older than CUDA 12.
    """

    __slots__ = ("_has_parameters", "_library", "forked")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.forked = False
        for name, types in {**_FUNCTIONS, **_FUNCTIONS_12}.items():
            try:
                getattr(library, name).argtypes = types
            except AttributeError:
                raise DeviceError(
                    f"the CUDA driver has no {name}: loading kernels needs a driver for CUDA 12 "
                    "or newer"
                ) from None
        self._has_parameters = hasattr(library, _PARAMETER_INFO)
        if self._has_parameters:
            getattr(library, _PARAMETER_INFO).argtypes = (c_void_p, c_size_t, _OUT_SIZE, _OUT_SIZE)

    def _check(self, code: int, doing: str) -> None:
        if code:
            raise self._error(code, doing)

    def _error(self, code: int, doing: str) -> DriverError:
        why = describe(self._library, code)
        return DriverError(f"the CUDA driver could not {doing}: {why}", code)

    # -- devices and contexts ------------------------------------------------------------------

    def device_count(self) -> int:
        """Return how many devices there are."""
        count = c_int()
        self._check(self._library.cuDeviceGetCount(byref(count)), "count its devices")
        return count.value

    def attribute(self, attribute: int, device: int) -> int:
        """Return an attribute (CUdevice_attribute) of a device."""
        value = c_int()
        code = self._library.cuDeviceGetAttribute(byref(value), attribute, device)
        self._check(code, f"read attribute {attribute} of device {device}")
        return value.value

    def current(self) -> int:
        """Return the calling thread's current context, or 0."""
        context = c_void_p()
        self._library.cuCtxGetCurrent(byref(context))
        return context.value or 0

    def current_device(self) -> int:
        """Return the device of the current context."""
        device = c_int()
        self._check(self._library.cuCtxGetDevice(byref(device)), "find the current device")
        return device.value

    def current_id(self) -> int | None:
        """Return a number that only the current context has in this process; None without one."""
        number = c_ulonglong()
        code = self._library.cuCtxGetId(None, byref(number))
        return self._no_id(code) if code else number.value

    def context_id(self, context: int) -> int | None:
        """Return a number that only this context has in this process; None if it is dead."""
        return self.watch(context)()

    def watch(self, context: int) -> Callable[[], int | None]:
        """Return a quick `context_id` of one context, for every launch to call."""
        get, number = self._library.cuCtxGetId, c_ulonglong()
        address, out = c_void_p(context), byref(number)

        def ask() -> int | None:  # safe in any thread: only one value is ever written to `number`
            code = get(address, out)
            return self._no_id(code) if code else number.value

        return ask

    def _no_id(self, code: int) -> int | None:
        if code in _DEAD:
            return None
        raise self._error(code, "use a context")

    def push(self, context: int) -> None:
        """Make a context current until `pop`."""
        self._check(self._library.cuCtxPushCurrent_v2(context), "make a context current")

    def pop(self) -> None:
        """Restore the context that was current before `push`."""
        self._library.cuCtxPopCurrent_v2(byref(c_void_p()))

    def retain_primary(self, device: int) -> int:
        """Return the device's primary context, created if necessary; until `release_primary`."""
        context = c_void_p()
        code = self._library.cuDevicePrimaryCtxRetain(byref(context), device)
        self._check(code, f"make the context of device {device}")
        return context.value or 0

    def release_primary(self, device: int) -> None:
        """Release what `retain_primary` returned; the last release destroys the context."""
        self._library.cuDevicePrimaryCtxRelease_v2(device)

    def primary_is_active(self, device: int) -> bool:
        """Tell whether the device's primary context exists at present."""
        state = (c_int * 2)()  # the flags, and whether it is active
        code = self._library.cuDevicePrimaryCtxGetState(device, state, byref(state, _INT))
        return code == 0 and state[1] != 0

    def context_of_stream(self, stream: int) -> int:
        """Return the context that a stream was made in."""
        context = c_void_p()
        code = self._library.cuStreamGetCtx(stream, byref(context))
        self._check(code, "find the stream's context")
        return context.value or 0

    # -- modules and kernels -------------------------------------------------------------------

    def load(self, code: bytes) -> int:
        """Return a CUlibrary made of a CUBIN or PTX; the driver compiles PTX."""
        library = c_void_p()
        nothing = (None, None, 0, None, None, 0)
        error = self._library.cuLibraryLoadData(byref(library), code, *nothing)
        self._check(error, "load a module")
        return library.value or 0

    def unload(self, library: int) -> None:
        """Free what `load` returned."""
        self._library.cuLibraryUnload(library)

    def kernel(self, library: int, name: str) -> int:
        """Return a CUkernel of a module, loaded into the current context."""
        kernel = c_void_p()
        code = self._library.cuLibraryGetKernel(byref(kernel), library, name.encode())
        self._check(code, f"find the kernel {name!r}")
        # Since CUDA 12, a module is loaded when a kernel is first used (lazy loading). kcache uses
        # it now, so that errors appear here, and the first launch takes no longer than others.
        code = self._library.cuKernelGetFunction(byref(c_void_p()), kernel)
        self._check(code, f"load the kernel {name!r}")
        return kernel.value or 0

    def kernel_attribute(self, attribute: int, kernel: int, device: int) -> int:
        """Return an attribute (CUfunction_attribute) of a kernel."""
        value = c_int()
        code = self._library.cuKernelGetAttribute(byref(value), attribute, kernel, device)
        self._check(code, f"read attribute {attribute} of a kernel")
        return value.value

    def set_kernel_attribute(self, attribute: int, value: int, kernel: int, device: int) -> None:
        """Set an attribute (CUfunction_attribute) of a kernel."""
        code = self._library.cuKernelSetAttribute(attribute, value, kernel, device)
        self._check(code, f"set attribute {attribute} of a kernel to {value}")

    def parameter_sizes(self, kernel: int) -> tuple[int, ...] | None:
        """Return the sizes of a kernel's parameters in bytes; None if the driver can't tell.

        Drivers for CUDA 12.4 and newer can.
        """
        if not self._has_parameters:
            return None
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        get = getattr(self._library, _PARAMETER_INFO)
        while not (code := get(kernel, len(sizes), byref(offset), byref(size))):
            sizes.append(size.value)
        # This error means that the kernel has no parameter of this number.
        if code != _INVALID_VALUE:
            self._check(code, "read the parameters of a kernel")
        return tuple(sizes)


# -- opening it ----------------------------------------------------------------------------------

_driver: Driver | None = None
_inherited = False


def open_driver() -> Driver:
    """Return the driver, initialised.

    Raises:
        DeviceError: there is none, it finds no GPU, or this process is a forked child of one that
            used it; the message says which.
    """
    global _driver  # noqa: PLW0603  one driver for each process
    if _driver is None:
        if _inherited:
            raise DeviceError(FORKED)
        _driver = Driver(open_library())
    return _driver


def driver_version() -> Version | None:
    """Return the newest CUDA version that the driver supports, without initialising it; or None.

    `cuDriverGetVersion` returns 1000 * major + 10 * minor.
    """
    value = ctypes.c_int()
    try:
        if ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(value)) != 0:
            return None  # the toolkit's stub of the driver, say
    except (OSError, AttributeError):
        return None
    return value.value // 1000, value.value % 1000 // 10


def open_library() -> ctypes.CDLL:
    """Return the driver's library, initialised.

    Raises:
        DeviceError: as `open_driver`.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"there is no CUDA driver: the library {LIBRARY} is not found. It comes with NVIDIA's "
            "GPU driver; in a container it is mounted by the NVIDIA Container Toolkit"
        ) from error
    code = library.cuInit(0)
    if code == _NOT_INITIALIZED:
        raise DeviceError(FORKED)
    if code == _NO_DEVICE:
        raise DeviceError("the CUDA driver finds no GPU (cuInit: CUDA_ERROR_NO_DEVICE)")
    if code:
        raise DeviceError(
            f"the CUDA driver can't be initialised (cuInit): {describe(library, code)}"
        )
    return library


def describe(library: ctypes.CDLL, code: int) -> str:
    """Return what a CUresult means, such as `"no kernel image (CUDA_ERROR_NO_BINARY_FOR_GPU)"`."""
    name, text = c_char_p(), c_char_p()
    with suppress(AttributeError):
        library.cuGetErrorName(code, byref(name))
        library.cuGetErrorString(code, byref(text))
    if name.value is None or text.value is None:
        return f"error {code}"
    return f"{text.value.decode(errors='replace')} ({name.value.decode(errors='replace')})"


def _forget() -> None:
    """Forget the driver in a forked child."""
    global _driver, _inherited  # noqa: PLW0603  as above
    if _driver is not None:
        _driver.forked = True
        _inherited = True
    _driver = None


at_fork(in_child=_forget)
