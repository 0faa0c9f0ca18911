"""Loading and launching through the real cuda.core, with a model of the driver.

The model is `model_driver.c`. It has two devices, contexts that can be destroyed, and kernels that
print their arguments. The tests in tests/gpu use a real driver.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from core.helpers import started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the model needs Linux")

SETUP = """
import ctypes, os
import kcache, kcache.launch
from kcache import ConfigError, DeviceError, StaleKernelError
model = ctypes.CDLL("libcuda.so.1")

PTX = b".version 8.0\\n.visible .entry axpy(\\n.visible .entry none(\\n"
CUBIN = b"\\x7fELF for sm_%d"

def kernel(number=0, *, ptx=PTX, cubin=90, names={"axpy<float>": "axpy"}):
    code = None if cubin is None else CUBIN % cubin
    return kcache.CompiledKernel(ptx, code, None, names, "", f"{number:064}", False, 0.0)

def says(use, *arguments, **named):
    try:
        print(use(*arguments, **named), flush=True)
    except kcache.KcacheError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


#: Runs the code in each line in a child, with its output in a file; prints its exit status.
CHILDREN = """
import json, sys
import cuda.core
for line in sys.stdin:
    code, output = json.loads(line)
    if os.fork() == 0:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        exec(code, globals())
        sys.exit()
    print(os.wait()[1], flush=True)
"""
Run = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A function that runs code with the model as its driver, and returns the printed lines."""
    pytest.importorskip("cuda.core", reason="the extra launch is not installed")
    folder = tmp_path_factory.mktemp("model")
    source = Path(__file__).with_name("model_driver.c")
    command = ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", source, "-o", folder / "libcuda.so.1"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler is installed")
    # Without a buffer, the lines of Python and of the model are printed in order.
    environ = {"LD_LIBRARY_PATH": str(folder), "PYTHONUNBUFFERED": "1"}
    output = folder / "output"
    with started(SETUP + CHILDREN, environ=environ) as process:

        def run(code: str) -> list[str]:
            process.stdin.write(json.dumps([code, str(output)]) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "0\n", output.read_text()
            return output.read_text().splitlines()

        yield run


def test_arguments_arrive_in_the_sizes_that_the_kernel_takes(run: Run) -> None:
    code = """
import numpy
loaded = kernel().load()
print(loaded, loaded.name, loaded.device, loaded.generation, loaded.key == kernel().key)
print(loaded.kernel.num_arguments)
loaded.launch(2, (64, 2), 2.5, 4096, None, -7)
loaded.launch((1, 2, 3), 1, numpy.float32(0.5), ctypes.c_void_p(1), 2, numpy.int32(9), stream=2)
kernel().load(name="none").launch(1, 1, shared_memory=90_000, stream=12345)
"""
    assert run(code) == [
        "loads ELF ",
        "LoadedKernel('axpy', device=0, generation=0) axpy 0 0 True",
        "4",
        "launches axpy on 0: 2,1,1 64,2,1 0 stream 0x1: 2.5 0x1000 (nil) -7",
        "launches axpy on 0: 1,2,3 1,1,1 0 stream 0x2: 0.5 0x1 0x2 9",
        "launches none on 0: 1,1,1 1,1,1 90000 stream 0x3039:",
    ]


def test_an_invalid_launch_is_an_error(run: Run) -> None:
    code = """
none = kernel().load(name="none")
says(kernel().load().launch, 1, 1, 2.0)
says(kernel().load().launch, 1, 1, 2.0, 0, 0, 2**32)
says(none.launch, 0, 1)
says(none.launch, 1, "a")
says(none.launch, 1, 1, shared_memory=-1)
says(none.launch, 1, 1, stream="default")
says(none.launch, 1, 1, shared_memory="1 KiB")
says(none.launch, 1, 2000)
"""
    found = run(code)[1:]
    expected = [
        "ConfigError: expected 4 arguments, got 1",
        "ConfigError: argument 4: 4294967296 is not allowed: it does not fit into 4 bytes",
        "ConfigError: none can't be launched: LaunchConfig.grid value must be >= 1 (got 0)",
        "ConfigError: none can't be launched: LaunchConfig.block must be an int",
        "DeviceError: none was not launched with grid=1, block=1, shared_memory=-1: ",
        "ArgumentTypeError: stream: expected a cuda.core Stream",
        "ConfigError: none can't be launched: ",
        "DeviceError: none was not launched with grid=1, block=2000, shared_memory=0: ",
    ]
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


def test_a_kernel_is_loaded_once_for_each_context(run: Run) -> None:
    code = """
import threading
first = kernel()
threads = [threading.Thread(target=first.load) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert first.load().kernel == kernel().load().kernel == kernel().load(0, "axpy<float>").kernel
print("the second device")
assert first.load(1).kernel != first.load(0).kernel
print("another key, then other code under this key")
kernel(1).load()
kernel(1, ptx=PTX + b"//").load()
print("a context of its own")
own = ctypes.c_void_p()
assert model.cuCtxCreate_v2(ctypes.byref(own), 0, 0) == 0
first.load().launch(1, 1, 0.5, 0, 0, 1)
"""
    assert run(code) == [
        "loads ELF ",
        "the second device",
        "loads ELF ",
        "another key, then other code under this key",
        "loads ELF ",
        "loads ELF ",
        "a context of its own",
        "loads ELF ",
        "launches axpy on 0: 1,1,1 1,1,1 0 stream 0x1: 0.5 (nil) (nil) 1",
    ]


def test_a_kernel_of_another_device_leaves_the_current_context(run: Run) -> None:
    code = """
zero, one = kernel().load(0), kernel().load(1)
current, primary = ctypes.c_void_p(), ctypes.c_void_p()
assert model.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 1) == 0
assert model.cuCtxPushCurrent_v2(primary) == 0
zero.launch(1, 1, 0.5, 0, 0, 1)
says(lambda: (kernel().load().device, kernel().load(0).device))
assert model.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value == primary.value
"""
    assert run(code)[2:] == [
        "launches axpy on 0: 1,1,1 1,1,1 0 stream 0x1: 0.5 (nil) (nil) 1",
        "(1, 0)",
    ]


def test_ptx_serves_where_the_cubin_is_for_another_gpu(run: Run) -> None:
    code = """
says(kernel(cubin=80).load)
says(kernel(2, cubin=80, ptx=None).load, name="axpy")
says(kernel(3, cubin=None, ptx=None).load)
"""
    loaded, refused, nothing = [line for line in run(code) if "loads" not in line]
    assert loaded == "LoadedKernel('axpy', device=0, generation=0)"
    assert refused.startswith(
        "DeviceError: axpy can't be loaded on device 0, which is sm_90: cubin: "
        "CUDA_ERROR_NO_BINARY_FOR_GPU"
    )
    assert nothing.startswith("DeviceError: the kernel has neither CUBIN nor PTX nor LTOIR")


def test_names_and_devices_that_are_not_there_are_refused(run: Run) -> None:
    code = """
says(kernel().load, name="nothing")
says(kernel(names={}).load)
says(kernel().load, 2)
says(kernel().load, -1)
says(kcache.launch.reset, 2)
"""
    assert run(code) == [
        "ConfigError: name: expected one of axpy, none, got 'nothing'",
        "ConfigError: name: the module has 2 kernels; expected one of axpy, none",
        "ConfigError: device: expected None or 0 to 1, got 2",
        "ConfigError: device: expected None or 0 to 1, got -1",
        "ConfigError: device: expected None or 0 to 1, got 2",
    ]


def test_a_handle_is_stale_once_its_context_is_gone(run: Run) -> None:
    code = """
def launch(handle):
    handle.launch(1, 1)

zero, one = kernel().load(0, "none"), kernel().load(1, "none")
kcache.launch.reset(0)
says(launch, zero)
says(lambda: zero.kernel)
says(kcache.launch.generation, 0)
launch(one)
assert model.cuDevicePrimaryCtxReset_v2(1) == 0  # behind our back
says(launch, one)
again = kernel().load(0, "none")
says(lambda: again.generation)
launch(again)
own = ctypes.c_void_p()
assert model.cuCtxCreate_v2(ctypes.byref(own), 0, 0) == 0
theirs = kernel().load(name="none")
says(launch, again)
launch(theirs)
assert model.cuCtxDestroy_v2(own) == 0
says(launch, theirs)
launch(again)
"""
    stale = "StaleKernelError: the kernel was loaded into a context of device"
    launched = "launches none on 0: 1,1,1 1,1,1 0 stream 0x1:"
    found = [line for line in run(code) if "loads" not in line]
    assert found == [
        f"{stale} 0 that was reset or destroyed (generation 0, now 1); load it again",
        f"{stale} 0 that was reset or destroyed (generation 0, now 1); load it again",
        "1",
        launched.replace("on 0", "on 1"),
        f"{stale} 1 that was reset or destroyed (generation 0, now 0); load it again",
        "1",
        launched,
        f"{stale} 0 that is not the current one (generation 1, now 1); load it again",
        launched,
        f"{stale} 0 that is not the current one (generation 1, now 1); load it again",
        launched,
    ]


def test_a_forked_child_gets_an_error(run: Run) -> None:
    code = """
handle = kernel().load()
if os.fork() == 0:
    for use in (kernel().load, kernel(1).load, kcache.launch.reset, lambda: handle.launch(1, 1)):
        says(use)
    os._exit(0)
os.wait()
handle.launch(1, 1, 0.5, 0, 0, 1)
"""
    _, *forked, launched = run(code)
    assert len(forked) == 4
    for line in forked:
        assert line.startswith("DeviceError: this process was forked from one that used the CUDA")
    assert launched.startswith("launches axpy on 0")


def test_the_architecture_of_the_current_gpu_is_the_default(run: Run) -> None:
    code = """
from kcache.util.cuda_driver import current_arch
print(current_arch())
assert model.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 1) == 0
print(current_arch())
"""
    assert run(code) == ["sm_90", "sm_80"]


def test_each_gpu_gets_its_own_kernel(run: Run, tmp_path: Path) -> None:
    code = f"""
import asyncio
del os.environ["LD_LIBRARY_PATH"]  # NVRTC in a worker asks a driver for more than the model has
os.environ["KCACHE_DIR"] = {str(tmp_path / "cache")!r}
cache, source = kcache.KernelCache(), 'extern "C" __global__ void none() {{}}'

def targets():
    for kernel in (
        cache.get_or_compile(source),
        cache.get_or_compile(source, (), kcache.CompileOptions(std=17)),
        cache.lookup(source),
        cache.get_or_compile(source),
        kcache.compile(source),
        *cache.compile_many([source]),
        asyncio.run(cache.aget_or_compile(source)),
    ):
        yield kernel.ptx.partition(b".target ")[2][:5].decode()

print(*targets())
assert model.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 1) == 0
print(*targets())
"""
    assert run(code) == ["sm_90 " * 6 + "sm_90", "sm_80 " * 6 + "sm_80"]
