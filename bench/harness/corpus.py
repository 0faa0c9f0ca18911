"""The benchmark corpus: five CUDA kernels, with what it takes to compile each through NVRTC.

The kernels are in `kernels/`, where each file says what its arguments and its launch are.
`generated_source` adds self-contained sources of any size and number, for benchmarks of keys and
of hits. Nothing here imports kcache or a CUDA package.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "kernels"
ARCH = "sm_90"
STD = "c++17"


class MissingHeadersError(RuntimeError):
    """A case needs headers from a wheel that is not installed."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Header files that a wheel installs.

    `path` is the include directory below site-packages, and `probe` a header that must be in it.
    """

    wheel: str
    path: str
    probe: str

    def find(self) -> Path | None:
        """Returns the include directory, or None where the wheel or its headers are missing."""
        try:
            found = Path(str(distribution(self.wheel).locate_file(self.path)))
        except PackageNotFoundError:
            return None
        return found.resolve() if (found / self.probe).is_file() else None


CCCL = Headers("nvidia-cuda-cccl", "nvidia/cu13/include/cccl", "cub/cub.cuh")
# With CUDA 13, CUTLASS includes <cccl/cuda/std/...>, so it needs the directory above, too.
CCCL_ROOT = Headers("nvidia-cuda-cccl", "nvidia/cu13/include", "cccl/cuda/std/cstdint")
RUNTIME = Headers("nvidia-cuda-runtime", "nvidia/cu13/include", "cuda_fp16.h")
CRT = Headers("nvidia-cuda-crt", "nvidia/cu13/include", "crt/mma.h")
CUTLASS = Headers("nvidia-cutlass", "cutlass_library/source/include", "cutlass/cutlass.h")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is known of a case before its headers are looked for."""

    names: tuple[str, ...]
    headers: tuple[Headers, ...] = ()
    extra_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel of the corpus, ready to compile.

    `arch` and `std` are the defaults for this case ("sm_90", "c++17"); `extra_options` holds NVRTC
    options that the source needs beyond those and the include directories.
    """

    name: str
    source: str
    names: tuple[str, ...]
    include_dirs: tuple[Path, ...] = ()
    arch: str = ARCH
    std: str = STD
    extra_options: tuple[str, ...] = ()


RECIPES = {
    "trivial": Recipe(("axpy<float>",)),
    "attention": Recipe(("attention<64, 64, 64, true>",), (CCCL, RUNTIME, CRT)),
    "cub_reduce": Recipe(("block_sum<float, 256, 4>",), (CCCL,)),
    "cub_radix_sort": Recipe(("block_sort<unsigned int, int, 128, 8>",), (CCCL,)),
    "cutlass_gemm": Recipe(
        ("gemm<128, 128, 32, 64, 64, 3>",),
        (CUTLASS, CCCL, CCCL_ROOT, RUNTIME, CRT),
        ("--device-as-default-execution-space",),
    ),
}

NAMES = tuple(RECIPES)


def load(name: str) -> Case:
    """Returns the case `name`, one of `NAMES`.

    Raises MissingHeadersError where a wheel with its headers is not installed, and KeyError for
    another name.
    """
    recipe = RECIPES[name]
    source = (KERNELS / f"{name}.cu").read_text(encoding="utf-8")
    directories = _include_dirs(name, recipe)
    return Case(name, source, recipe.names, directories, extra_options=recipe.extra_options)


def cases() -> Iterator[Case]:
    """Yields the five cases, cheapest first. Raises MissingHeadersError like `load`."""
    return map(load, NAMES)


def generated_source(size: int = 4096, seed: int = 0) -> Case:
    """Returns a case that includes nothing and whose source is exactly `size` bytes long.

    Its kernel `horner` evaluates at every x[i] the polynomial whose coefficients, highest power
    first, are `generated_coefficients(size, seed)`; other seeds give other sources and other
    results. Arguments: x: float[n], read; y: float[n], written; n: int >= 0. Launch: one thread
    per element or more, of one dimension. `size` is 1024 at the least (ValueError).
    """
    head, tail = _generated_frame(seed)
    steps = "".join(_generated_step(c) for c in generated_coefficients(size, seed))
    padding = size - len(head) - len(steps) - len(tail)
    return Case(f"generated_{size}_{seed}", head + steps + tail + " " * padding, ("horner",))


def generated_coefficients(size: int = 4096, seed: int = 0) -> tuple[float, ...]:
    """Returns the coefficients of `generated_source(size, seed)`, each exact in float32.

    All of them lie in [-1, 1), so for |x| <= 1/2 the result does in [-2, 2].
    """
    if size < 1024:
        raise ValueError(f"size is {size}, but 1024 bytes are needed")
    head, tail = _generated_frame(seed)
    count = (size - len(head) - len(tail)) // len(_generated_step(0.0))
    # Fibonacci hashing: the upper bits of a multiple of 2**64 / golden ratio, as 12-bit fractions.
    mixed = ((((seed << 20) + i + 1) * 0x9E3779B97F4A7C15) >> 52 & 0xFFF for i in range(count))
    return tuple((value - 2048) / 2048 for value in mixed)


def _generated_frame(seed: int) -> tuple[str, str]:
    head = (
        f"// A polynomial by Horner's rule, one statement per coefficient; seed {seed}.\n"
        'extern "C" __global__ void horner(const float* __restrict__ x, float* __restrict__ y,'
        " int n)\n"
        "{\n"
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    if (i >= n) {\n"
        "        return;\n"
        "    }\n"
        "    const float v = x[i];\n"
        "    float sum = 0.0f;\n"
    )
    return head, "    y[i] = sum;\n}\n"


def _generated_step(coefficient: float) -> str:
    """One statement; every coefficient takes the same number of characters."""
    return f"    sum = fmaf(sum, v, {coefficient:+.11f}f);\n"


def _include_dirs(name: str, recipe: Recipe) -> tuple[Path, ...]:
    found = {headers: headers.find() for headers in recipe.headers}
    missing = sorted({headers.wheel for headers, path in found.items() if path is None})
    if missing:
        raise MissingHeadersError(
            f"the case {name!r} needs headers of {', '.join(missing)}, not installed here;"
            f" the dependency group `bench` has them"
        )
    return tuple(dict.fromkeys(path for path in found.values() if path is not None))
