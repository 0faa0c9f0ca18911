// As much of CUDA C++ as attention.cu uses, for a host compiler. See emulated.cpp.
#pragma once

#include <algorithm>
#include <cmath>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads)

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

extern thread_local dim3 threadIdx, blockIdx, blockDim;

using std::min;

void __syncthreads();
float __shfl_xor_sync(unsigned mask, float value, int lanes);
void tensor_core(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
