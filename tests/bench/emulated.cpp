// Runs one kernel of attention.cu on the CPU, a thread for each of a block's, and compares it with
// a reference in doubles. test_corpus.py compiles it with the headers of `emulated/` and with the
// kernel, whose one line of PTX is replaced by `tensor_core`.
//
//     emulated HEADS QUERIES KEYS  ->  the greatest error, the greatest value expected, and the
//                                      number of outputs that are neither, written outside

#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "emulated/cuda.h"

// Lanes exchange through these, one warp's row each; a warp waits for its own lanes only.
constexpr int max_warps = 8, lanes = 32;
static std::barrier<>* block_barrier;
static std::barrier<>* warp_barriers[max_warps];
static float exchanged[max_warps][lanes];
static unsigned fragments_a[max_warps][lanes][4], fragments_b[max_warps][lanes][2];

void __syncthreads() { block_barrier->arrive_and_wait(); }

static void sync_warp() { warp_barriers[threadIdx.x / lanes]->arrive_and_wait(); }

float __shfl_xor_sync(unsigned, float value, int mask)
{
    const int warp = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    exchanged[warp][lane] = value;
    sync_warp();
    const float other = exchanged[warp][lane ^ mask];
    sync_warp();
    return other;
}

static float half_of(unsigned bits, int index)
{
    _Float16 halves[2];
    __builtin_memcpy(halves, &bits, sizeof bits);
    return halves[index];
}

// mma.m16n8k16 by the tables of the PTX ISA, "Matrix Fragments for mma.m16n8k16": each element of
// the operands is looked up in the lane and register that the tables name.
void tensor_core(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    const int warp = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    __builtin_memcpy(fragments_a[warp][lane], a, sizeof a);
    fragments_b[warp][lane][0] = b0;
    fragments_b[warp][lane][1] = b1;
    sync_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
        float sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const int from_a = row % 8 * 4 + k % 8 / 2, in_a = row / 8 + 2 * (k / 8);
            const int from_b = column * 4 + k % 8 / 2, in_b = k / 8;
            sum += half_of(fragments_a[warp][from_a][in_a], k % 2)
                 * half_of(fragments_b[warp][from_b][in_b], k % 2);
        }
        c[i] = sum;
    }
    sync_warp();
}

thread_local dim3 threadIdx, blockIdx, blockDim;

#include "attention.cpp"  // the kernel

#ifndef SHAPE
#define SHAPE 32, 32, 32, true
#endif

template <int HeadDim, int TileQ, int TileK, bool Causal>
struct Shape {
    static constexpr int head = HeadDim, tile = TileQ;
    static constexpr bool causal = Causal;
    static constexpr auto kernel = attention<HeadDim, TileQ, TileK, Causal>;
};
using Here = Shape<SHAPE>;

static void run_block(int x, int y, const __half* q, const __half* k, const __half* v, __half* o,
                      int queries, int keys, float scale)
{
    constexpr int count = 2 * Here::tile;
    std::barrier<> block(count);
    block_barrier = &block;
    std::vector<std::barrier<>*> made;
    for (int warp = 0; warp < count / lanes; ++warp) {
        made.push_back(warp_barriers[warp] = new std::barrier<>(lanes));
    }
    std::vector<std::thread> threads;
    for (int thread = 0; thread < count; ++thread) {
        threads.emplace_back([=] {
            threadIdx = {unsigned(thread), 0, 0};
            blockIdx = {unsigned(x), unsigned(y), 0};
            blockDim = {unsigned(count), 1, 1};
            Here::kernel(q, k, v, o, queries, keys, scale);
        });
    }
    for (auto& thread : threads) thread.join();
    for (auto* each : made) delete each;
}

// Deterministic, in [-2, 2), and exact in a half.
static std::vector<__half> numbers(long count, unsigned seed)
{
    std::vector<__half> made(count);
    for (auto& value : made) {
        seed = seed * 1664525u + 1013904223u;
        value.value = _Float16(int(seed >> 24) - 128) / _Float16(64);
    }
    return made;
}

int main(int, char** arguments)
{
    const int heads = atoi(arguments[1]), queries = atoi(arguments[2]), keys = atoi(arguments[3]);
    constexpr int d = Here::head;
    const float scale = 1 / std::sqrt(float(d));
    const long guard = 1024;  // outputs behind the last one, which nothing may write
    const auto q = numbers(long(heads) * queries * d, 1), k = numbers(long(heads) * keys * d, 2);
    const auto v = numbers(long(heads) * keys * d, 3);
    std::vector<__half> o(long(heads) * queries * d + guard, __half{_Float16(99)});
    for (int head = 0; head < heads; ++head) {
        for (int x = 0; x < (queries + Here::tile - 1) / Here::tile; ++x) {
            run_block(x, head, q.data(), k.data(), v.data(), o.data(), queries, keys, scale);
        }
    }

    double worst = 0, largest = 0;
    for (int head = 0; head < heads; ++head) {
        for (int i = 0; i < queries; ++i) {
            std::vector<double> weights(keys, 0.0), expected(d, 0.0);
            double sum = 0;
            for (int j = 0; j < keys && (!Here::causal || j <= i + keys - queries); ++j) {
                double score = 0;
                for (int e = 0; e < d; ++e) {
                    score += double(q[(long(head) * queries + i) * d + e].value)
                           * double(k[(long(head) * keys + j) * d + e].value);
                }
                sum += weights[j] = std::exp(score * scale);
            }
            for (int j = 0; j < keys && sum > 0; ++j) {
                for (int e = 0; e < d; ++e) {
                    expected[e] += weights[j] / sum * double(v[(long(head) * keys + j) * d + e].value);
                }
            }
            for (int e = 0; e < d; ++e) {
                const double found = o[(long(head) * queries + i) * d + e].value;
                const double error = std::fabs(found - expected[e]);
                worst = error <= worst ? worst : error;  // a NaN stays
                largest = std::fmax(largest, std::fabs(expected[e]));
            }
        }
    }
    int outside = 0;
    for (long i = 0; i < guard; ++i) outside += float(o[o.size() - 1 - i].value) != 99;
    std::printf("%g %g %d\n", worst, largest, outside);
}
