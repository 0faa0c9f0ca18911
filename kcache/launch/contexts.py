"""Context: a CUDA context that kernels are loaded into, with its generation and its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

from kcache.errors import ArgumentTypeError, DeviceError, StaleKernelError
from kcache.launch.modules import Module, Modules, load_module
from kcache.util.cuda_driver import FORKED

if TYPE_CHECKING:
    from kcache.util.cuda_driver import Driver

__all__ = ["Context", "Contexts"]

# CUdevice_attribute of cuda.h.
_MAJOR, _MINOR = 75, 76
_SHARED_OPTIN = 97


class Context:
    """One context of one device, and the modules that are loaded into it.

    Threads: safe to share. Fork: a child can't use it, and `check` says so there.

    Attributes:
        device: the device's number.
        address: the CUcontext.
        generation: the device's generation when the context was first seen.
        capability: the device's compute capability, such as 90 for 9.0.
        shared_memory: bytes that a block can have at most.
        modules: the loaded modules; the least recently used ones are evicted.
    """

    def __init__(self, driver: Driver, address: int, device: int, generation: int) -> None:
        self.driver = driver
        self.address = address
        self.device = device
        self.generation = generation
        self.primary = False
        self.number = driver.context_id(address)
        major, minor = (driver.attribute(name, device) for name in (_MAJOR, _MINOR))
        self.capability = 10 * major + minor
        self.shared_memory = driver.attribute(_SHARED_OPTIN, device)
        self.modules: Modules[Module] = Modules(partial(load_module, self))
        self._end: str | None = None
        self._number_now = driver.watch(address)

    def alive(self) -> bool:
        """Tell whether the driver still has this context, as far as it can tell."""
        driver = self.driver
        if driver.forked or self._number_now() != self.number:
            return False
        return not self.primary or driver.primary_is_active(self.device)

    def check(self) -> None:
        """Do nothing, if kernels of this context can be launched.

        Raises:
            StaleKernelError: the context was reset, or the driver no longer has it.
            DeviceError: this process is a forked child of the one that made it.
        """
        if self._end is None and self.alive():
            return
        if self.driver.forked:
            raise DeviceError(FORKED)
        self.end("was destroyed")
        raise StaleKernelError(
            f"the kernel was loaded into a context of device {self.device} that {self._end} "
            f"(generation {self.generation}); load it again"
        )

    def end(self, how: str) -> None:
        """Make every kernel of this context stale, and forget its modules."""
        self._end = self._end or how
        self.modules.clear()

    @contextmanager
    def current(self) -> Generator[None]:
        """Make it the calling thread's current context during the block."""
        driver = self.driver
        if driver.current() == self.address:
            yield
            return
        driver.push(self.address)
        try:
            yield
        finally:
            driver.pop()


class Contexts:
    """The contexts of one process, and the generations of its devices.

    Threads: safe to share. Fork: a child makes one of its own.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = RLock()
        self._known: dict[int, Context] = {}  # by the driver's number of the context
        self._primary: dict[int, Context] = {}  # by device; each is retained once
        self._generations: Counter[int] = Counter()

    def get(self, device: int | None) -> Context:
        """Return the context that a kernel is loaded into.

        That is the current context, if it is of `device` or `device` is None. Otherwise it is the
        primary context of `device`, or of device 0.

        Raises:
            ConfigError: there is no such device.
            DeviceError: the driver can't make a context.
        """
        number = self._driver.current_id()
        if number is not None:
            context = self._known.get(number) or self._add_current()
            if device is None or device == context.device:
                return context
        return self._primary_of(0 if device is None else device)

    def device(self, device: int | None) -> int:
        """Return `device`; for None, the current context's, otherwise 0.

        Raises:
            ConfigError: there is no such device.
        """
        if device is None:
            return self._driver.current_device() if self._driver.current() else 0
        count = self._driver.device_count()
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < count:
            raise ArgumentTypeError(
                f"device={device!r} is not allowed; allowed: None, 0 to {count - 1}"
            )
        return device

    def generation(self, device: int) -> int:
        """Return how often the contexts of a device were reset or found replaced."""
        return self._generations[device]

    def reset(self, device: int) -> None:
        """Make every kernel that is loaded on a device stale, and forget its modules."""
        with self._lock:
            self._generations[device] += 1
            self._end_all(device, "was reset")
            primary = self._primary.pop(device, None)
        if primary is not None:
            self._driver.release_primary(device)

    def _end_all(self, device: int, how: str, *, dead_only: bool = False) -> bool:
        found = [
            (number, context)
            for number, context in self._known.items()
            if context.device == device and not (dead_only and context.alive())
        ]
        for number, context in found:
            context.end(how)
            del self._known[number]
        return bool(found)

    def _primary_of(self, device: int) -> Context:
        context = self._primary.get(device)
        if context is not None and context.alive():
            return context
        self.device(device)
        driver = self._driver
        with self._lock:
            # Retained again even if it was before: a reset left it without its resources.
            address = driver.retain_primary(device)
            if device in self._primary:
                driver.release_primary(device)
            made = self._primary[device] = self._add(address, device)
            return made

    def _add_current(self) -> Context:
        return self._add(self._driver.current(), self._driver.current_device())

    def _add(self, address: int, device: int) -> Context:
        with self._lock:
            number = self._driver.context_id(address)
            if number is None:
                raise DeviceError(f"the current context of device {device} no longer exists")
            known = self._known.get(number)
            if known is not None and known.alive():
                return known
            if self._end_all(device, "was replaced", dead_only=True):
                self._generations[device] += 1
            made = Context(self._driver, address, device, self._generations[device])
            made.primary = self._is_primary(address, device)
            self._known[number] = made
            return made

    def _is_primary(self, address: int, device: int) -> bool:
        if not self._driver.primary_is_active(device):
            return False
        primary = self._driver.retain_primary(device)
        self._driver.release_primary(device)
        return primary == address
