"""torch: runs kernels that torch compiles with NVRTC, and prints a digest of each result."""

import hashlib

import torch


def say(name, tensor):
    print(name, hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()[:12])


x = torch.linspace(-2, 2, 1000, device="cuda")
double = torch.cuda._compile_kernel(
    'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }', "twice"
)
y = x.clone()
double((1, 1, 1), (256, 1, 1), (y,))
say("torch.cuda._compile_kernel", y)
code = "template <typename T> T f(T x, T y, T s) { return s * x + y * y; }"
jitted = torch.cuda.jiterator._create_jit_fn(code, s=2.0)
say("jiterator", jitted(x, x))
for name in ("bessel_j0", "airy_ai", "i0e", "log_ndtr"):
    say(f"torch.special.{name}", getattr(torch.special, name)(x.abs() + 0.1))


@torch.jit.script
def fused(a, b):
    return (a * b + a).sigmoid() * b


for _ in range(4):
    y = fused(x, x)
say("torch.jit", y)
