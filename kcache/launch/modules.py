"""Module: the code of one kernel, loaded into one context, with its functions."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any, NamedTuple

from kcache.errors import ConfigError, DeviceError
from kcache.launch.contexts import Context, core, driver
from kcache.util.gpu_code import kernels_of


class Code(NamedTuple):
    """The outputs of one compile that can be loaded."""

    cubin: bytes | None
    ptx: bytes | None
    ltoir: bytes | None


class Function(NamedTuple):
    """One kernel of a module: cuda.core's object, and the sizes of its parameters in bytes."""

    kernel: Any
    sizes: tuple[int, ...]


class Module:
    """The code of one kernel in one context. It stays loaded until the process ends.

    Threads: safe to share.

    Attributes:
        context: where it is loaded.
        code: what it was made of.
        names: the kernels that it has, sorted.
    """

    def __init__(self, context: Context, code: Code) -> None:
        self.context = context
        self.code = code
        self._objects = list(_codes(code, context.device))
        self.names = kernels_of(code.ptx, bytes(self._objects[0].code))
        self._functions: dict[str, Function] = {}
        self._lock = Lock()

    def function(self, name: str) -> Function:
        """Return the kernel of this name; the context is current.

        Raises:
            ConfigError: the module has none; the message lists what it has.
            DeviceError: the driver refuses the code, for example because it is for another GPU.
        """
        if self.names and name not in self.names:
            listed = ", ".join(self.names)
            raise ConfigError(f"name={name!r} is not a kernel here; allowed: {listed}")
        with self._lock:
            if name not in self._functions:
                self._functions[name] = self._load(name)
            return self._functions[name]

    def _load(self, name: str) -> Function:
        device, reasons = self.context.device, list[str]()
        for code in self._objects:
            try:
                return _function(code.get_kernel(name), device)
            except Exception as error:  # cuda.core's CUDAError has no public name
                reasons.append(f"{code.code_type}: {error}")
        raise DeviceError(f"{name} can't be loaded on {_described(device)}: {'; '.join(reasons)}")


def _function(kernel: Any, device: int) -> Function:  # noqa: ANN401  cuda.core's
    """Return a kernel that is really loaded, and may use all the shared memory there is.

    The driver loads code when it is first used. Here it is used, so that errors appear now, and the
    first launch takes no longer than others. CUDA wants to be asked for more than 48 KiB of
    dynamic shared memory; a launch with less loses nothing by it.
    """
    shared = core().Device(device).properties.max_shared_memory_per_block_optin
    shared -= kernel.attributes[device].shared_size_bytes
    cuda = driver()
    attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    cuda.cuKernelSetAttribute(attribute, max(0, shared), kernel.handle, device)
    return Function(kernel, tuple(info.size for info in kernel.arguments_info))


def _codes(code: Code, device: int) -> Iterator[Any]:
    """Yield cuda.core's ObjectCode of what may run on a device: the CUBIN, then PTX.

    The driver compiles PTX, and nvJitLink links LTOIR if there is nothing else.
    """
    made = core().ObjectCode
    if code.cubin is not None:
        yield made.from_cubin(code.cubin)
    if code.ptx is not None:
        yield made.from_ptx(code.ptx)
    elif code.cubin is None:
        yield _linked(code.ltoir, device)


def _linked(ltoir: bytes | None, device: int) -> Any:  # noqa: ANN401  cuda.core's ObjectCode
    if ltoir is None:
        raise DeviceError("the kernel has neither CUBIN nor PTX nor LTOIR: nothing to load")
    cuda = core()
    arch = f"sm_{cuda.Device(device).arch}"
    try:
        options = cuda.LinkerOptions(arch=arch, link_time_optimization=True)
        return cuda.Linker(cuda.ObjectCode.from_ltoir(ltoir), options=options).link("cubin")
    except Exception as error:
        # Of cuda.core, of the bindings, or a RuntimeError, depending on what is missing.
        raise DeviceError(
            f"the kernel's LTOIR can't be linked for {arch} (with the package nvidia-nvjitlink, of "
            f"the driver's CUDA major version): {error}"
        ) from error


def _described(device: int) -> str:
    return f"device {device}, which is sm_{core().Device(device).arch}"


_modules: dict[tuple[Context, str], Module] = {}
_lock = Lock()


def load_module(context: Context, key: str, code: Code) -> Module:
    """Return the module of a kernel in a context, made now unless there is one of the same code.

    Kernels that are never cached may have other code under the same key: one with `__TIME__`, say.

    Raises:
        DeviceError: there is only LTOIR, and it can't be linked for the device.
    """
    with _lock:
        module = _modules.get((context, key))
        if module is None or module.code != code:
            module = _modules[context, key] = Module(context, code)
        return module
