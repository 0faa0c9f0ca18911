// block_sum: the sum of every tile of Threads * Items elements, with cub::BlockReduce.
//
// Name expression  block_sum<float, 256, 4> (T: any arithmetic type)
// Arguments        in: T[n], read; out: T[ceil(n / (Threads * Items))], written; n: int >= 1
// Result           out[b] = in[b * Threads * Items] + ... up to the end of the tile or of `in`
// Launch           grid ceil(n / (Threads * Items)), block Threads, no dynamic shared memory

#include <cub/block/block_reduce.cuh>

template <typename T, int Threads, int Items>
__global__ void __launch_bounds__(Threads)
block_sum(const T* __restrict__ in, T* __restrict__ out, int n)
{
    using Reduce = cub::BlockReduce<T, Threads>;
    __shared__ typename Reduce::TempStorage storage;

    // Neighbouring threads read neighbouring elements; a sum does not mind the order.
    const long long first = static_cast<long long>(blockIdx.x) * (Threads * Items) + threadIdx.x;
    T partial{};
    #pragma unroll
    for (int item = 0; item < Items; ++item) {
        const long long i = first + item * Threads;
        if (i < n) {
            partial += in[i];
        }
    }

    const T sum = Reduce(storage).Sum(partial);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = sum;
    }
}
