// attention: O = softmax(scale * Q K^T) V for every head, forward only, in one pass over the keys:
// the softmax is renormalised as it goes ("online"), so that no row of scores is ever whole in
// memory. Tensor cores multiply halves; sums, the softmax and its running maximum are floats.
// After: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "FlashAttention", 2022, and "FlashAttention-2", 2023. Written for this benchmark.
//
// Name expression  attention<64, 64, 64, true>: HeadDim (a multiple of 16), TileQ (queries of a
//                  thread block, 16 for each warp), TileK (keys in shared memory at a time, a
//                  multiple of 16), Causal (query i sees the keys j <= i + keys - queries)
// Arguments        Q: half[heads, queries, HeadDim], K, V: half[heads, keys, HeadDim], read;
//                  O: half[heads, queries, HeadDim], written; queries, keys: int >= 1;
//                  scale: float, commonly 1 / sqrt(HeadDim). A batch is more heads. All four
//                  pointers are aligned to 16 bytes. A query that sees no key gets zeros.
// Launch           grid (ceil(queries / TileQ), heads), block 2 * TileQ, no dynamic shared memory
// Compile          for sm_80 or later

#include <cuda/std/limits>
#include <cuda_fp16.h>

namespace flash {

constexpr int warp_size = 32;
constexpr float log2_e = 1.4426950408889634f;
constexpr float infinity = cuda::std::numeric_limits<float>::infinity();

// Fragments of mma.m16n8k16, as the PTX ISA gives them. With group = lane / 4, pair = lane % 4 * 2:
//   A (16 x 16)  a[0], a[1]: rows group, group + 8 at columns pair, pair + 1; a[2], a[3]: the same
//                rows at columns pair + 8, pair + 9
//   B (16 x 8)   b0: rows pair, pair + 1 of column group; b1: rows pair + 8, pair + 9
//   C (16 x 8)   c[0], c[1]: row group at columns pair, pair + 1; c[2], c[3]: row group + 8
using A = unsigned[4];
using C = float[4];

// c += a b
__device__ __forceinline__ void multiply_add(C& c, const A& a, unsigned b0, unsigned b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned bits(__half2 two)
{
    return *reinterpret_cast<const unsigned*>(&two);
}

// Two neighbouring halves; the first one's index is even.
__device__ __forceinline__ unsigned load_pair(const __half* from)
{
    return *reinterpret_cast<const unsigned*>(from);
}

// The four lanes of a group hold one row of C between them.
__device__ __forceinline__ float row_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float row_sum(float value)
{
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Rows of keys or values in shared memory. Eight halves more than a row needs put the rows that
// are read together into different banks.
template <int Rows, int HeadDim>
struct Tile {
    static constexpr int stride = HeadDim + 8;
    __half at[Rows * stride];

    // Copies rows from `first` on, 16 bytes at a time, all threads of the block together; those
    // from `count` on become zeros.
    __device__ void load(const __half* from, int first, int count)
    {
        constexpr int chunk = 8, chunks = HeadDim / chunk;
        for (int i = threadIdx.x; i < Rows * chunks; i += blockDim.x) {
            const int row = i / chunks, column = i % chunks * chunk;
            uint4 eight = {0, 0, 0, 0};
            if (first + row < count) {
                const long long offset = static_cast<long long>(first + row) * HeadDim + column;
                eight = *reinterpret_cast<const uint4*>(from + offset);
            }
            *reinterpret_cast<uint4*>(at + row * stride + column) = eight;
        }
    }

    __device__ const __half* row(int index) const { return at + index * stride; }
};

// What a thread knows of its two rows, group and group + 8: the greatest score so far and the sum
// of the exponentials of this lane's scores, both in powers of two.
struct Softmax {
    float greatest[2] = {-infinity, -infinity};
    float sum[2] = {0.0f, 0.0f};

    // Turns the scores of a tile into exponentials; scale[r] is what earlier sums of row r are to
    // be multiplied with.
    template <int Columns>
    __device__ void update(C (&scores)[Columns], float (&scale)[2])
    {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = greatest[r];
            #pragma unroll
            for (int n = 0; n < Columns; ++n) {
                most = fmaxf(most, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            }
            most = row_max(most);
            // A row that has seen no key yet: any finite number keeps -inf - -inf away.
            const float base = most == -infinity ? 0.0f : most;
            scale[r] = exp2f(greatest[r] - base);
            greatest[r] = most;
            sum[r] *= scale[r];
            #pragma unroll
            for (int n = 0; n < Columns; ++n) {
                #pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    scores[n][e] = exp2f(scores[n][e] - base);
                    sum[r] += scores[n][e];
                }
            }
        }
    }
};

}  // namespace flash

template <int HeadDim, int TileQ, int TileK, bool Causal>
__global__ void __launch_bounds__(2 * TileQ)
attention(const __half* __restrict__ Q, const __half* __restrict__ K,
          const __half* __restrict__ V, __half* __restrict__ O, int queries, int keys, float scale)
{
    using KeyTile = flash::Tile<TileK, HeadDim>;
    static_assert(HeadDim % 16 == 0 && TileQ % 16 == 0 && TileK % 16 == 0, "16 x 16 fragments");
    static_assert(2 * sizeof(KeyTile) <= 48 * 1024, "the tiles fit in static shared memory");
    __shared__ __align__(16) KeyTile shared_keys, shared_values;

    constexpr int steps = HeadDim / 16;      // of Q K^T along the head
    constexpr int key_columns = TileK / 8;   // fragments of the scores
    constexpr int head_columns = HeadDim / 8;  // fragments of the output
    const int lane = threadIdx.x % flash::warp_size;
    const int group = lane / 4, pair = lane % 4 * 2;
    const int block_row = blockIdx.x * TileQ;
    const int first_row = block_row + threadIdx.x / flash::warp_size * 16 + group;
    const int rows[2] = {first_row, first_row + 8};
    const long long head = blockIdx.y;
    Q += head * queries * HeadDim;
    O += head * queries * HeadDim;
    K += head * keys * HeadDim;
    V += head * keys * HeadDim;

    flash::A q[steps];
    #pragma unroll
    for (int step = 0; step < steps; ++step) {
        #pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int row = rows[part % 2], column = 16 * step + part / 2 * 8 + pair;
            const long long offset = static_cast<long long>(row) * HeadDim + column;
            q[step][part] = row < queries ? flash::load_pair(Q + offset) : 0u;
        }
    }

    flash::C output[head_columns] = {};
    flash::Softmax softmax;
    const int seen = Causal ? min(keys, block_row + TileQ + keys - queries) : keys;
    for (int first = 0; first < seen; first += TileK) {
        __syncthreads();  // the tile before this one has been used
        shared_keys.load(K, first, keys);
        shared_values.load(V, first, keys);
        __syncthreads();

        // Q K^T: column n of the fragment is key 8 n + group, which is a row of the tile.
        flash::C scores[key_columns] = {};
        #pragma unroll
        for (int n = 0; n < key_columns; ++n) {
            const __half* key = shared_keys.row(8 * n + group);
            #pragma unroll
            for (int step = 0; step < steps; ++step) {
                flash::multiply_add(scores[n], q[step], flash::load_pair(key + 16 * step + pair),
                                    flash::load_pair(key + 16 * step + pair + 8));
            }
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int at = first + 8 * n + pair + e % 2;
                const bool hidden = at >= keys || (Causal && at > rows[e / 2] + keys - queries);
                scores[n][e] = hidden ? -flash::infinity : scores[n][e] * (scale * flash::log2_e);
            }
        }

        float rescale[2];
        softmax.update(scores, rescale);
        #pragma unroll
        for (int n = 0; n < head_columns; ++n) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                output[n][e] *= rescale[e / 2];
            }
        }

        // P V: two fragments of the scores, side by side, are one of the left operand.
        #pragma unroll
        for (int step = 0; step < TileK / 16; ++step) {
            const flash::C &left = scores[2 * step], &right = scores[2 * step + 1];
            const flash::A p = {flash::bits(__floats2half2_rn(left[0], left[1])),
                                flash::bits(__floats2half2_rn(left[2], left[3])),
                                flash::bits(__floats2half2_rn(right[0], right[1])),
                                flash::bits(__floats2half2_rn(right[2], right[3]))};
            const __half* above = shared_values.row(16 * step + pair) + group;
            const __half* below = shared_values.row(16 * step + pair + 8) + group;
            #pragma unroll
            for (int n = 0; n < head_columns; ++n) {
                const __half2 b0 = __halves2half2(above[8 * n], above[8 * n + KeyTile::stride]);
                const __half2 b1 = __halves2half2(below[8 * n], below[8 * n + KeyTile::stride]);
                flash::multiply_add(output[n], p, flash::bits(b0), flash::bits(b1));
            }
        }
    }

    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = flash::row_sum(softmax.sum[r]);
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        if (rows[r] < queries) {
            __half* out = O + static_cast<long long>(rows[r]) * HeadDim + pair;
            #pragma unroll
            for (int n = 0; n < head_columns; ++n) {
                *reinterpret_cast<__half2*>(out + 8 * n) = __floats2half2_rn(
                    output[n][2 * r] * inverse, output[n][2 * r + 1] * inverse);
            }
        }
    }
}
