"""Corpus: the kernels that the benchmarks compile."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

import kcache

KERNELS = Path(__file__).parent / "kernels"
ARCH, STD = "sm_90", "c++17"


@dataclass(frozen=True)
class Case:
    """A kernel, ready to compile. `more` holds NVRTC options in addition to the usual ones."""

    name: str
    source: str
    names: tuple[str, ...] = ()
    include_paths: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `kcache.CompileOptions`."""
        paths, more = list(self.include_paths), list(self.more)
        return {"arch": ARCH, "std": STD, "include_paths": paths, "extra_options": more}

    @property
    def options(self) -> kcache.CompileOptions:
        return kcache.CompileOptions(**self.settings)

    @property
    def flags(self) -> list[str]:
        """The same options as arguments of NVRTC."""
        paths = (f"-I{path}" for path in self.include_paths)
        return [f"-arch={ARCH}", f"-std={STD}", *paths, *self.more]


#: The name expression of each kernel.
NAMES = {
    "trivial": "axpy<float>",
    "attention": "attention<64, 64, 64, true>",
    "cub_reduce": "block_sum<float, 256, 4>",
    "cub_radix_sort": "block_sort<unsigned int, int, 128, 8>",
    "cutlass_gemm": "gemm<128, 128, 32, 64, 64, 3>",
}


def load(name: str, config: pytest.Config | None = None) -> Case:
    """Return the kernel `name`: one of `bench/kernels/`, or the one of the option `--kernel`.

    For the name `plain`, a kernel is generated. If headers that the kernel includes are not
    installed, the benchmark is skipped.
    """
    if name == "plain":
        return generated(4096)
    if name not in NAMES and config is not None:
        names, more = (tuple(config.getoption(f"--kernel-{what}")) for what in ("name", "option"))
        return Case(name, config.getoption("--kernel").read_text(encoding="utf-8"), names, (), more)
    source = (KERNELS / f"{name}.cu").read_text(encoding="utf-8")
    if name == "trivial":
        return Case(name, source, (NAMES[name],))
    paths, more = kcache.include_paths(), ()
    if name == "cutlass_gemm":
        paths, more = (cutlass(), *paths), ("--device-as-default-execution-space",)
    return Case(name, source, (NAMES[name],), paths, more)


def cutlass() -> str:
    try:
        found = distribution("nvidia-cutlass").locate_file("cutlass_library/source/include")
    except PackageNotFoundError:
        pytest.skip("nvidia-cutlass is not installed")
    return str(found)


def generated(size: int, seed: int = 0) -> Case:
    """Return a kernel of exactly `size` bytes that includes nothing and depends on `seed`."""
    head = f'// {seed}\nextern "C" __global__ void horner(float* x) {{\n  float v = *x, sum = 0;\n'
    tail = "  *x = sum;\n}\n"
    step = "  sum = fmaf(sum, v, {:.6f}f);\n"
    count = (size - len(head) - len(tail)) // len(step.format(0.5))
    steps = "".join(step.format(n % 4096 / 4096) for n in range(count))
    return Case("generated", head + steps + tail + " " * (size - len(head + steps + tail)))
