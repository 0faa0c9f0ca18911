"""Loads kernels onto a GPU, each once for each context, and launches them through cuda.core.

Importing this package imports nothing of CUDA; `load` does, after it has found the driver.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.launch.loaded_kernel import Code, Context, LoadedKernel, generations, load_module, on

__all__ = ["LoadedKernel", "generation", "reset"]


def load(
    code: tuple[bytes | None, bytes | None, bytes | None],
    key: str,
    names: Mapping[str, str],
    device: int | None,
    name: str | None,
) -> LoadedKernel:
    """Return a kernel on a device, loaded there on the first call; see `CompiledKernel.load`.

    Threads: may be called from several threads at the same time; a kernel that several threads load
    is loaded once.
    """
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name: expected None or text, got {name!r}")
    with on(device) as number:
        module = load_module(Context.of(number), key, Code(*code))
        return LoadedKernel(module, _pick(names, name, module.names), key)


def reset(device: int | None = None) -> None:
    """Mark every kernel that is loaded on a device as stale.

    Afterwards, using the handle of such a kernel raises StaleKernelError. Call this function after
    the device's context was destroyed or created again, while nothing is being launched. It does
    not change the context itself.

    Args:
        device: the number of the device; None for the device of the current context, or device 0
            if there is no current context.

    Raises:
        ConfigError: the device does not exist.
        DeviceError: there is no driver or no GPU.
    """
    with on(device) as number:
        generations[number] += 1


def generation(device: int | None = None) -> int:
    """Return how often `reset` was called for a device.

    Args:
        device: the number of the device, or None as for `reset`.

    Raises:
        ConfigError: the device does not exist.
        DeviceError: there is no driver or no GPU.
    """
    with on(device) as number:
        return generations[number]


def _pick(lowered: Mapping[str, str], name: str | None, kernels: list[str]) -> str:
    """Return the mangled name of the kernel to load from a module.

    Args:
        lowered: name expression -> mangled name.
        name: the name that the caller passed, or None.
        kernels: the mangled names of the module's kernels.

    Raises:
        ConfigError: `name` is None, and the module does not have exactly one kernel.
    """
    if name is not None:
        return lowered.get(name, name)
    only = list(lowered.values()) or kernels
    if len(only) == 1:
        return only[0]
    own = [kernel for kernel in kernels if kernel not in lowered.values()]
    found = (*lowered, *own)
    listed = ", ".join(found) or "none"
    raise ConfigError(f"name: the module has {len(found)} kernels; expected one of {listed}")
