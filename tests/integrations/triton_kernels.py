"""Compiles Triton kernels for sm_90 without a GPU; prints a digest of each, and the cache's counts.

    python triton_kernels.py FIRST COUNT

The cache is of the class that `TRITON_CACHE_MANAGER` names.
"""

import hashlib
import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def scale(x, out, n, factor: triton.language.constexpr, block: triton.language.constexpr):
    at = triton.language.program_id(0) * block + triton.language.arange(0, block)
    value = triton.language.load(x + at, mask=at < n)
    triton.language.store(out + at, value * factor, mask=at < n)


def compile_one(number: int) -> str:
    source = ASTSource(
        fn=scale,
        signature={
            "x": "*fp32",
            "out": "*fp32",
            "n": "i32",
            "factor": "constexpr",
            "block": "constexpr",
        },
        constexprs={"factor": number + 2, "block": 128},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    parts = [kernel.asm["cubin"], kernel.asm["ptx"].encode(), kernel.asm["ttir"].encode()]
    assert kernel.metadata.name == "scale"
    return hashlib.sha256(b"".join(parts)).hexdigest()


def counts() -> dict[str, float]:
    module = sys.modules.get("kcache.integrations.triton")
    return {} if module is None else module._open().entries.engine.stats().to_dict()


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    for number in range(first, first + count):
        print(json.dumps([number, compile_one(number)]), flush=True)
    print(json.dumps(counts()))
