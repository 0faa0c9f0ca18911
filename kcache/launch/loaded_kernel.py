"""LoadedKernel: a kernel on a device, ready to launch, with its module and its context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

from kcache.errors import ArgumentTypeError, ConfigError, DeviceError, StaleKernelError
from kcache.gpu_code import kernels_of
from kcache.launch.arguments import address_of, pack
from kcache.util.cuda_driver import FORKED, open_library
from kcache.util.hints import how_to_install

#: The address of CUDA's default stream (CU_STREAM_LEGACY of cuda.h).
_LEGACY = 1


class LoadedKernel:
    """A kernel on a device, ready to launch. `CompiledKernel.load` returns it.

    Threads: may be used by several threads at the same time. Fork: a forked child can't use it; a
    launch there raises DeviceError.

    The kernel's code stays loaded until the process ends. This object becomes stale when
    `kcache.launch.reset` is called for its device, or when the driver no longer has its context.
    From then on, `launch` and `kernel` raise StaleKernelError. kcache can't detect that a primary
    context was reset (`cuDevicePrimaryCtxReset`, `cudaDeviceReset`) and created again between two
    uses. If your program does that, call `kcache.launch.reset` afterwards.

    Attributes:
        name: the kernel's name in its module: mangled, unless it is `extern "C"`.
        device: the device's number.
        key: the key of the compiled kernel.
        generation: how often `kcache.launch.reset` had been called for the device when the kernel
            was loaded.
    """

    __slots__ = ("_context", "_kernel", "_sizes", "device", "generation", "key", "name")

    def __init__(self, module: Module, name: str, key: str) -> None:
        self._kernel = module.kernel(name)
        self._sizes = [info.size for info in self._kernel.arguments_info]
        self._context = module.context
        self.name = name
        self.device = module.context.device
        self.key = key
        self.generation = module.context.generation

    @property
    def kernel(self) -> Any:  # noqa: ANN401  optional, and typed by its own stubs
        """cuda.core's `Kernel`, for attributes, occupancy, clusters and cooperative launches."""
        with self._context.current():
            return self._kernel

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: object,
        stream: object = None,
        shared_memory: int = 0,
    ) -> None:
        """Launch the kernel on a stream and return without waiting for it.

        A Python int becomes an integer of the parameter's size, and a Python float a `float` or a
        `double`; both are rejected if they do not fit. For a `float`, pass `2.0`, not `2`, because
        the driver reports only the sizes of the parameters, not their types. numpy and ctypes
        scalars are passed unchanged, and must have the parameter's size.

        For a pointer, pass a cuda.core `Buffer`, an object with DLPack or
        `__cuda_array_interface__`, an address (int), or None for the null pointer. The kernel gets
        the address of the first element; element type, shape and strides are ignored. The caller
        must keep the memory allocated until the kernel has finished.

        Args:
            grid: number of blocks, as an int or as up to three dimensions.
            block: number of threads per block, as an int or as up to three dimensions.
            args: one value for each parameter.
            stream: a cuda.core `Stream`, an object with `__cuda_stream__`, the address of a stream
                from another library, or None for CUDA's default stream.
            shared_memory: bytes of dynamic shared memory per block. More than 48 KiB are allowed,
                up to the device's limit.

        Raises:
            StaleKernelError: the kernel's context no longer exists; load the kernel again.
            ConfigError: an argument is not allowed; the message names it.
            DeviceError: the driver rejected the launch, or reported that an earlier kernel failed.
        """
        cuda = core()
        with self._context.current():
            order = _as_stream(stream)
            address = partial(address_of, device=self.device, stream=int(order.handle))
            values = pack(self._sizes, args, address)
            try:
                config = cuda.LaunchConfig(grid=grid, block=block, shmem_size=shared_memory)
                cuda.launch(order, config, self._kernel, *values)
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{self.name} can't be launched: {error}") from error
            except Exception as error:  # cuda.core's CUDAError has no public name
                how = f"grid={grid!r}, block={block!r}, shared_memory={shared_memory!r}"
                raise DeviceError(f"{self.name} was not launched with {how}: {error}") from error

    def __repr__(self) -> str:
        return f"LoadedKernel({self.name!r}, device={self.device}, generation={self.generation})"


def _as_stream(stream: Any) -> Any:  # noqa: ANN401  cuda.core's
    """Return a stream as a cuda.core `Stream`.

    Raises:
        ArgumentTypeError: the stream has a type that is not allowed.
    """
    made = core().Stream
    if isinstance(stream, made):
        return stream
    address = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else stream or 0
    if type(address) is not int or address < 0:
        raise ArgumentTypeError(
            f"stream: expected a cuda.core Stream, an object with __cuda_stream__, a stream's "
            f"address or None, got {stream!r}"
        )
    return made.from_handle(address or _LEGACY)


# -- modules ---------------------------------------------------------------------------------------


class Code(NamedTuple):
    """The outputs of one compile from which a module can be loaded."""

    cubin: bytes | None
    ptx: bytes | None
    ltoir: bytes | None


class Module:
    """The outputs of one compile, loaded into one context until the process exits.

    Threads: may be used by several threads at the same time.

    Attributes:
        context: the context that the module is loaded into.
        code: the outputs that the module was made from.
        names: the names of the module's kernels, sorted.
    """

    def __init__(self, context: Context, code: Code) -> None:
        self.context = context
        self.code = code
        self._objects = list(_codes(code, context.device))
        self.names = kernels_of(code.ptx, bytes(self._objects[0].code))
        self._kernels: dict[str, Any] = {}
        self._lock = Lock()

    def kernel(self, name: str) -> Any:  # noqa: ANN401  optional, and typed by its own stubs
        """Return the kernel `name` as cuda.core's `Kernel`. The module's context must be current.

        Raises:
            ConfigError: the module has no such kernel; the message lists those that it has.
            DeviceError: the driver rejects the code, for example because it is for another GPU.
        """
        if self.names and name not in self.names:
            listed = ", ".join(self.names)
            raise ConfigError(f"name: expected one of {listed}, got {name!r}")
        with self._lock:
            if name not in self._kernels:
                self._kernels[name] = self._load(name)
            return self._kernels[name]

    def _load(self, name: str) -> Any:  # noqa: ANN401  as above
        device, reasons = self.context.device, list[str]()
        for code in self._objects:
            try:
                return _loaded(code.get_kernel(name), device)
            except Exception as error:  # cuda.core's CUDAError has no public name
                reasons.append(f"{code.code_type}: {error}")
        where = f"device {device}, which is sm_{core().Device(device).arch}"
        raise DeviceError(f"{name} can't be loaded on {where}: {'; '.join(reasons)}")


def _loaded(kernel: Any, device: int) -> Any:  # noqa: ANN401  cuda.core's
    """Make the driver load a kernel's code, allow it all shared memory, and return the kernel.

    The driver loads code at its first use. This function uses the code, so that errors appear here
    and the first launch takes no longer than later ones. A kernel needs permission to use more than
    48 KiB of dynamic shared memory. Launches that use less are not slower with the permission.
    """
    shared = core().Device(device).properties.max_shared_memory_per_block_optin
    shared -= kernel.attributes[device].shared_size_bytes
    cuda = driver()
    attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    cuda.cuKernelSetAttribute(attribute, max(0, shared), kernel.handle, device)
    list(kernel.arguments_info)  # drivers before 12.4 do not have it, and fail here
    return kernel


def _codes(code: Code, device: int) -> Iterator[Any]:
    """Yield each output as a cuda.core `ObjectCode`, first the CUBIN, then the PTX.

    The driver compiles the PTX if it can't use the CUBIN. If there is only LTOIR, nvJitLink links
    it into a CUBIN.
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
        # The exception's type depends on what is missing: cuda.core, the bindings or nvJitLink.
        raise DeviceError(
            f"the kernel's LTOIR can't be linked for {arch} (this needs the package "
            f"nvidia-nvjitlink of the driver's CUDA major version): {error}"
        ) from error


_modules: dict[tuple[Context, str], Module] = {}
_lock = Lock()


def load_module(context: Context, key: str, code: Code) -> Module:
    """Return the module with `code` in `context`; make it unless it exists.

    The key is not enough to find a module, because a kernel that is never cached, such as one with
    `__TIME__`, may have other code under the same key.

    Raises:
        DeviceError: `code` is only LTOIR, and it can't be linked for the device.
    """
    with _lock:
        module = _modules.get((context, key))
        if module is None or module.code != code:
            module = _modules[context, key] = Module(context, code)
        return module


# -- contexts --------------------------------------------------------------------------------------

#: Number of a device -> how often `kcache.launch.reset` was called for it.
generations: Counter[int] = Counter()


@cache
def core() -> Any:  # noqa: ANN401  optional, and typed by its own stubs
    """Import and return cuda.core.

    Raises:
        DeviceError: there is no driver or no GPU, or cuda.core is not installed.
    """
    open_library()
    try:
        return import_module("cuda.core")
    except ImportError as error:
        raise DeviceError(
            "the package cuda-core is missing, which loads and launches kernels: "
            f"{how_to_install('cu13,launch')} (CUDA 12: cu12,launch); {error}"
        ) from error


def driver() -> Any:  # noqa: ANN401  as above
    """Return the driver's bindings that cuda.core uses, or raise the same errors as `core`."""
    core()
    return import_module("cuda.bindings.driver")


class Context(NamedTuple):
    """A context of a device, as it was when a kernel was loaded.

    Attributes:
        device: the device's number.
        number: the driver's number of the context, which is unique in this process; None if the
            driver could not return it.
        active: whether the device's primary context existed.
        generation: how often `kcache.launch.reset` had been called for the device.
    """

    device: int
    number: int | None
    active: bool
    generation: int

    @classmethod
    def of(cls, device: int) -> Context:
        """Return the calling thread's current context, which must belong to `device`."""
        return cls(device, _number(), _is_active(device), generations[device])

    @contextmanager
    def current(self) -> Generator[None]:
        """Make this context the calling thread's current context during the block.

        Raises:
            StaleKernelError: either the device was reset, or `on` makes another context of the
                device current.
            DeviceError: this process is a forked child of the process that made the context.
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
    """Make a context of a device current during the block; yield the device's number.

    The calling thread's current context is used if it belongs to `device`, or if `device` is None.
    Otherwise the primary context of `device` is used, or of device 0 if `device` is None. A primary
    context is created if necessary and kept until the process ends, as in cuda.core and in CUDA's
    runtime.

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
