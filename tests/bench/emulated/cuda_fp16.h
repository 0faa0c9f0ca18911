// Halves, for a host compiler. See emulated.cpp.
#pragma once

#include "cuda.h"

struct __half { _Float16 value; };
struct alignas(4) __half2 { __half x, y; };

inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {{_Float16(x)}, {_Float16(y)}}; }
