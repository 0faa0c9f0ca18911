"""Modules: the modules of one context. Each is loaded once, and their bytes are bounded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kcache.errors import ConfigError, DeviceError
from kcache.launch.code import Code, Parameter, choose, kernels_of, parameters_of
from kcache.util.cuda_driver import DriverError
from kcache.util.memory_tier import MemoryTier

if TYPE_CHECKING:
    from kcache.launch.contexts import Context
    from kcache.util.cuda_driver import Driver

__all__ = ["MAX_SIZE", "Function", "Module", "Modules", "load_module"]

#: How many bytes of code one context keeps loaded. Code on a device takes about as much as in the
#: CUBIN. So this is 800 CUTLASS GEMMs of 318 kB or 20,000 small kernels, and 1/300 of the memory of
#: a large GPU. The limit is in bytes because the sizes of modules differ by a factor of 100.
MAX_SIZE = 256 << 20

# CUresult: the code is for another architecture, or is no code that the driver knows.
_OTHER_ARCH = (200, 209)
# CUfunction_attribute of cuda.h.
_MAX_THREADS, _STATIC_SHARED, _LOCAL, _REGISTERS, _MAX_DYNAMIC = 0, 1, 3, 4, 8


class Function:
    """One kernel of a loaded module.

    Threads: safe to share.

    Attributes:
        kernel: cuda.core's.
        name: the kernel's name in the module.
        parameters: what it takes, or None if neither PTX nor the driver tells.
        max_threads, registers, static_shared, local: see `LoadedKernel`.
        most_shared: bytes of dynamic shared memory that a launch can ask for.
    """

    def __init__(self, module: Module, name: str) -> None:
        context = module.context
        driver, device = context.driver, context.device
        address = driver.kernel(module.library, name)
        # Not `ObjectCode`: cuda.core 1.2.2 never unloads a library.
        self.kernel = import_module("cuda.core").Kernel.from_handle(address)
        self.name = name
        self.parameters = _parameters(module, name, driver, address)
        attributes = (
            driver.kernel_attribute(attribute, address, device)
            for attribute in (_MAX_THREADS, _STATIC_SHARED, _LOCAL, _REGISTERS, _MAX_DYNAMIC)
        )
        self.max_threads, self.static_shared, self.local, self.registers, reserved = attributes
        self.most_shared = max(0, context.shared_memory - self.static_shared)
        self._address = address
        self._context = context
        self._reserved = reserved
        self._lock = Lock()

    def reserve(self, size: int) -> None:
        """Allow launches with `size` bytes of dynamic shared memory; CUDA requires it above 48 KiB.

        The limit only grows, because a smaller launch loses nothing by it.

        Raises:
            ConfigError: the driver does not allow so much.
        """
        if size <= self._reserved:
            return
        with self._lock:
            if size > self._reserved:
                context = self._context
                try:
                    context.driver.set_kernel_attribute(
                        _MAX_DYNAMIC, size, self._address, context.device
                    )
                except DriverError as error:
                    raise ConfigError(
                        f"shared_memory={size} is not allowed; allowed for this kernel on this "
                        f"device: 0 to {self.most_shared} bytes ({error})"
                    ) from error
                self._reserved = size


def _parameters(
    module: Module, name: str, driver: Driver, address: int
) -> tuple[Parameter, ...] | None:
    """Return the parameters in the PTX; without it, the driver's sizes, of unknown kinds."""
    if module.ptx is not None:
        found = parameters_of(module.ptx, name)
        if found is not None:
            return found
    sizes = driver.parameter_sizes(address)
    return None if sizes is None else tuple(Parameter(size, "unknown") for size in sizes)


class Module:
    """Code that stays loaded in a context as long as something refers to it.

    Threads: safe to share.

    Attributes:
        source: what it was loaded from.
        size: bytes of the code that was loaded.
        ptx: PTX of the same kernels, or None if there is none.
    """

    def __init__(
        self, context: Context, source: Code, library: int, size: int, ptx: bytes | None
    ) -> None:
        self.context = context
        self.source = source
        self.library = library
        self.size = size
        self.ptx = ptx
        self._functions: dict[str, Function] = {}
        self._lock = Lock()
        unload = weakref.finalize(self, _unload, context, library)
        unload.atexit = False  # the driver may be gone by then, and every module with it

    def made_of(self, source: Code) -> bool:
        """Tell whether it was loaded from the same bytes."""
        own = self.source
        return own.cubin == source.cubin and own.ptx == source.ptx and own.ltoir == source.ltoir

    def kernels(self) -> list[str]:
        """Return the names of its kernels."""
        return kernels_of(self.ptx, self.source.cubin)

    def function(self, name: str) -> Function:
        """Return the kernel of this name.

        Raises:
            ConfigError: the module has none; the message lists what it has.
        """
        found = self._functions.get(name)
        if found is not None:
            return found
        with self._lock:
            if name not in self._functions:
                kernels = self.kernels()
                if kernels and name not in kernels:
                    listed = ", ".join(kernels) or "none"
                    raise ConfigError(f"name={name!r} is not a kernel here; allowed: {listed}")
                with self.context.current():
                    self._functions[name] = Function(self, name)
            return self._functions[name]


def _unload(context: Context, library: int) -> None:
    """Unload a module without references, if its context still exists."""
    with suppress(DeviceError):  # a kernel has failed, and since then the driver refuses every call
        if context.alive():
            context.driver.unload(library)


def load_module(context: Context, source: Code) -> Module:
    """Load the CUBIN if it is for the device; otherwise compile PTX in the driver, or link LTOIR.

    Raises:
        DeviceError: nothing of it is for this device, or the driver refuses it.
    """
    codes = choose(source, context.capability)
    ptx = source.ptx
    if not codes and source.ltoir is not None:
        # PTX as well, because LTOIR does not show the types of the parameters.
        codes = [_link(source.ltoir, context.capability, "cubin")]
        ptx = _link(source.ltoir, context.capability, "ptx")
    with context.current():
        for code in codes[:-1]:
            module = _try(context, source, code)
            if module is not None:
                return module
        return Module(context, source, context.driver.load(codes[-1]), len(codes[-1]), ptx)


def _try(context: Context, source: Code, code: bytes) -> Module | None:
    """Load `code`; return None if the driver finds that it is not for this device after all.

    The rule of `Arch.runs_on` has exceptions, such as the GPUs of Jetson.
    """
    try:
        module = Module(context, source, context.driver.load(code), len(code), source.ptx)
        for name in module.kernels()[:1]:  # loaded at its first use; one stands for all
            context.driver.kernel(module.library, name)
    except DriverError as error:
        if error.code not in _OTHER_ARCH:
            raise
        return None
    return module


def _link(ltoir: bytes, capability: int, target: str) -> bytes:
    core: Any = import_module("cuda.core")
    arch = f"sm_{capability}"
    as_ptx = target == "ptx"
    try:
        options = core.LinkerOptions(arch=arch, link_time_optimization=True, ptx=as_ptx)
        linker = core.Linker(core.ObjectCode.from_ltoir(ltoir), options=options)
        return bytes(linker.link(target).code)
    except Exception as error:
        # Of cuda.core, of the bindings, or a RuntimeError, depending on what is missing.
        raise DeviceError(
            f"the kernel's LTOIR can't be linked for {arch} (with the package nvidia-nvjitlink, of "
            f"the driver's CUDA major version): {error}"
        ) from error


class Loaded(Protocol):
    """The methods of a module that Modules uses."""

    @property
    def size(self) -> int:
        """Bytes of its code."""
        ...

    @property
    def source(self) -> Code:
        """What it was loaded from."""
        ...

    def made_of(self, source: Code) -> bool:
        """Tell whether it was loaded from the same bytes."""
        ...


M = TypeVar("M", bound=Loaded)


class Modules(Generic[M]):
    """The modules of one context: a map from keys that evicts the least recently used.

    An evicted module stays loaded as long as a handle refers to it.

    Threads: safe to share; threads that ask for one key at once load it once. If that fails, each
    of them tries by itself.

    Args:
        load: loads a module.
        max_size: bound of the modules' code in bytes, `ITEM_OVERHEAD` for each included.
    """

    def __init__(self, load: Callable[[Code], M], max_size: int = MAX_SIZE) -> None:
        self._load = load
        self._tier: MemoryTier[str, M] = MemoryTier(max_size)
        self._lock = Lock()
        self._loading: dict[str, tuple[Lock, list[None]]] = {}

    def get(self, key: str, source: Code) -> M:
        """Return the module under `key`, loaded now unless it is there and made of `source`."""
        module = self._tier.get(key)
        if module is not None and (module.source is source or module.made_of(source)):
            return module
        with self._alone(key):
            module = self._tier.get(key)
            if module is None or not module.made_of(source):
                module = self._load(source)
                self._tier.put(key, module, module.size)
            return module

    @contextmanager
    def _alone(self, key: str) -> Generator[None]:
        """Hold the lock of a key. The lock exists as long as a thread holds it or waits for it."""
        with self._lock:
            lock, users = self._loading.setdefault(key, (Lock(), []))
            users.append(None)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users.pop()
                if not users:
                    del self._loading[key]

    def clear(self) -> None:
        """Forget every module."""
        self._tier.clear()

    def __len__(self) -> int:
        return len(self._tier)
