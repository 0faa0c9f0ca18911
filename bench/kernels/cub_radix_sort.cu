// block_sort: sorts every tile of Threads * Items pairs by key, ascending and stable, with
// cub::BlockRadixSort. Tiles are sorted each by itself; the last one may be partial.
//
// Name expression  block_sort<unsigned int, int, 128, 8> (Key: any integer type; Value: any
//                  trivially copyable type)
// Arguments        keys_in: Key[n], values_in: Value[n], read; keys_out: Key[n],
//                  values_out: Value[n], written; n: int >= 1. In place is allowed
//                  (keys_out == keys_in, values_out == values_in).
// Launch           grid ceil(n / (Threads * Items)), block Threads, no dynamic shared memory

#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_store.cuh>
#include <cuda/std/limits>
#include <cuda/std/type_traits>

template <typename Key, typename Value, int Threads, int Items>
__global__ void __launch_bounds__(Threads)
block_sort(const Key* keys_in, const Value* values_in, Key* keys_out, Value* values_out, int n)
{
    static_assert(cuda::std::is_integral<Key>::value, "a partial tile is padded with max()");

    using LoadKeys = cub::BlockLoad<Key, Threads, Items, cub::BLOCK_LOAD_TRANSPOSE>;
    using LoadValues = cub::BlockLoad<Value, Threads, Items, cub::BLOCK_LOAD_TRANSPOSE>;
    using Sort = cub::BlockRadixSort<Key, Threads, Items, Value>;
    using StoreKeys = cub::BlockStore<Key, Threads, Items, cub::BLOCK_STORE_TRANSPOSE>;
    using StoreValues = cub::BlockStore<Value, Threads, Items, cub::BLOCK_STORE_TRANSPOSE>;

    __shared__ union {
        typename LoadKeys::TempStorage load_keys;
        typename LoadValues::TempStorage load_values;
        typename Sort::TempStorage sort;
        typename StoreKeys::TempStorage store_keys;
        typename StoreValues::TempStorage store_values;
    } storage;

    constexpr int tile = Threads * Items;
    const long long first = static_cast<long long>(blockIdx.x) * tile;
    const int valid = n - first < tile ? static_cast<int>(n - first) : tile;

    // The padding comes last in the tile and has the greatest key, and the sort is stable: so it
    // stays behind every real pair, and the stores leave it out.
    Key keys[Items];
    Value values[Items];
    LoadKeys(storage.load_keys)
        .Load(keys_in + first, keys, valid, cuda::std::numeric_limits<Key>::max());
    __syncthreads();
    LoadValues(storage.load_values).Load(values_in + first, values, valid, Value{});
    __syncthreads();
    Sort(storage.sort).Sort(keys, values);
    __syncthreads();
    StoreKeys(storage.store_keys).Store(keys_out + first, keys, valid);
    __syncthreads();
    StoreValues(storage.store_values).Store(values_out + first, values, valid);
}
