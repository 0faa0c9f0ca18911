"""Context: the CUDA context that a kernel is loaded into, and the generation of its device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from kcache.errors import ArgumentTypeError, ConfigError, DeviceError, StaleKernelError
from kcache.util.cuda_driver import FORKED, open_library

#: By device: how often its contexts were reset.
generations: Counter[int] = Counter()


@cache
def core() -> Any:  # noqa: ANN401  optional, and typed by its own stubs
    """Return cuda.core.

    Raises:
        DeviceError: there is no driver or no GPU, or cuda.core is not installed.
    """
    open_library()
    try:
        return import_module("cuda.core")
    except ImportError as error:
        from kcache.util.hints import how_to_install

        raise DeviceError(
            "the package cuda-core is missing, which loads and launches kernels: "
            f"{how_to_install('cu13,launch')} (CUDA 12: cu12,launch); {error}"
        ) from error


def driver() -> Any:  # noqa: ANN401  as above
    """Return the driver's functions, by the bindings that cuda.core uses; errors as of `core`."""
    core()
    return import_module("cuda.bindings.driver")


class Context(NamedTuple):
    """A context of a device, as it was when a kernel was loaded.

    Attributes:
        device: the device's number.
        number: the driver's number of the context, which no other context gets in this process.
        active: whether the device's primary context existed.
        generation: the device's generation.
    """

    device: int
    number: int | None
    active: bool
    generation: int

    @classmethod
    def of(cls, device: int) -> Context:
        """Return the calling thread's current context, which is of `device`."""
        return cls(device, _number(), _is_active(device), generations[device])

    @contextmanager
    def current(self) -> Generator[None]:
        """Make sure that it is the calling thread's current context during the block.

        Raises:
            StaleKernelError: the device was reset, or the context is not there.
            DeviceError: this process is a forked child of the one that made it.
        """
        gone = self.active and not _is_active(self.device)
        if gone or self.generation != generations[self.device]:
            raise self._stale("was reset or destroyed")
        with on(self.device):
            if _number() != self.number:
                raise self._stale("is not the current one")
            yield

    def _stale(self, why: str) -> StaleKernelError:
        return StaleKernelError(
            f"the kernel was loaded into a context of device {self.device} that {why} "
            f"(generation {self.generation}, now {generations[self.device]}); load it again"
        )


@contextmanager
def on(device: int | None) -> Generator[int]:
    """Make a context of a device current during the block; yields the device's number.

    That is the calling thread's context, if it is of `device` or `device` is None. Otherwise it is
    the primary context of `device`, or of device 0. It is created if necessary, and kept until the
    process ends, as cuda.core and CUDA's runtime keep it.

    Raises:
        ConfigError: the device does not exist.
        DeviceError: the driver can't make a context, or this process is a forked child.
    """
    if device is not None and type(device) is not int:
        raise ArgumentTypeError(f"device: expected None or an integer, got {device!r}")
    cuda = driver()
    error, current = cuda.cuCtxGetDevice()  # an error: there is no current context
    _require_not_forked(error)
    if not error and device in (None, int(current)):
        yield int(current)
        return
    number = device or 0
    error, primary = cuda.cuDevicePrimaryCtxRetain(number)
    if error == cuda.CUresult.CUDA_ERROR_INVALID_DEVICE:
        last = int(cuda.cuDeviceGetCount()[1]) - 1
        raise ConfigError(f"device: expected None or 0 to {last}, got {device!r}")
    error = error or cuda.cuCtxPushCurrent(primary)[0]
    if error:
        raise DeviceError(f"the CUDA driver can't use device {number}: {error.name}")
    try:
        yield number
    finally:
        cuda.cuCtxPopCurrent()


def _number() -> int | None:
    error, number = driver().cuCtxGetId(None)
    return None if error else int(number)


def _is_active(device: int) -> bool:
    error, _, active = driver().cuDevicePrimaryCtxGetState(device)
    _require_not_forked(error)
    return not error and bool(active)


def _require_not_forked(error: Any) -> None:  # noqa: ANN401  a CUresult of the bindings
    if error.name == "CUDA_ERROR_NOT_INITIALIZED":
        raise DeviceError(FORKED)
