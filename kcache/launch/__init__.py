"""Loads kernels onto a GPU, each module once for each context.

This package imports nothing of CUDA by itself. `CompiledKernel.load` first looks for the driver,
through ctypes. Without a driver, cuda.core 1.2.2 raises SystemError at its first call and hangs at
the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.launch.code import Kernel
from kcache.launch.contexts import Contexts
from kcache.launch.handle import LoadedKernel, core
from kcache.launch.modules import Module
from kcache.util.cuda_driver import open_driver
from kcache.util.forks import at_fork

__all__ = ["LoadedKernel", "generation", "load", "reset"]

_contexts: Contexts | None = None
_lock = Lock()


def load(kernel: Kernel, device: int | None = None, name: str | None = None) -> LoadedKernel:
    """Return a kernel on a device, loaded unless it is already: `CompiledKernel.load`.

    Threads: safe; threads that ask for one kernel at once load it once.

    Args:
        kernel: what was compiled.
        device: the device's number; None is the current context's device, otherwise device 0.
        name: a name expression that it was compiled with, or a kernel's name in the module
            (mangled, or `extern "C"`); None if there is only one.

    Raises:
        ConfigError: there is no such device or kernel; the message lists what there is.
        DeviceError: there is no driver or no GPU, cuda-core is missing, the kernel is for another
            architecture, or the driver refuses it.
    """
    if device is not None and type(device) is not int:
        raise ArgumentTypeError(f"device={device!r} is not allowed; allowed: None, an integer")
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name={name!r} is not allowed; allowed: None, text")
    contexts = _open() if _contexts is None else _contexts
    module = contexts.get(device).modules.get(kernel.key, kernel)
    function = module.function(_pick(kernel.lowered_names, name, module))
    return LoadedKernel(module, function, kernel.key)


def reset(device: int | None = None) -> None:
    """Make every kernel loaded on a device stale; its handles raise StaleKernelError from now on.

    Call it after the device's context was destroyed or created again, while nothing is being
    launched. The context itself is not changed, except that kcache releases its share of the
    primary one.

    Args:
        device: the device's number; None is the current context's device, or else device 0.

    Raises:
        ConfigError: there is no such device.
        DeviceError: there is no driver or no GPU.
    """
    contexts = _open()
    contexts.reset(contexts.device(device))


def generation(device: int | None = None) -> int:
    """Return how often the contexts of a device were reset, or were found to have been replaced.

    Raises:
        ConfigError: there is no such device.
        DeviceError: there is no driver or no GPU.
    """
    contexts = _open()
    return contexts.generation(contexts.device(device))


def _open() -> Contexts:
    global _contexts  # noqa: PLW0603  contexts belong to the process
    if _contexts is None:
        driver = open_driver()
        core()
        with _lock:
            _contexts = _contexts or Contexts(driver)
    return _contexts


def _pick(lowered: Mapping[str, str], name: str | None, module: Module) -> str:
    """Return which kernel of a module is meant.

    Raises:
        ConfigError: there are several.
    """
    if name is not None:
        return lowered.get(name, name)
    if len(lowered) == 1:
        for only in lowered.values():
            return only
    kernels = module.kernels()
    if len(kernels) == 1:
        return kernels[0]
    own = [kernel for kernel in kernels if kernel not in lowered.values()]
    listed = ", ".join((*lowered, *own)) or "none"
    raise ConfigError(f"no name is given, and there is not exactly one kernel; allowed: {listed}")


def _forget() -> None:
    """Forget all contexts in a forked child, which has none."""
    global _contexts, _lock  # noqa: PLW0603  as above
    _contexts = None
    _lock = Lock()


at_fork(in_child=_forget)
