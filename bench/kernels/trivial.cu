// axpy: y[i] = a * x[i] + y[i], for 0 <= i < n. Includes nothing.
//
// Name expression  axpy<float> (T: any arithmetic type)
// Arguments        a: T; x: T[n], read; y: T[n], read and written; n: int >= 0
// Launch           any grid and block of one dimension: the loop strides over the grid

template <typename T>
__global__ void axpy(T a, const T* __restrict__ x, T* __restrict__ y, int n)
{
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i < n; i += stride) {
        y[i] = a * x[i] + y[i];
    }
}
