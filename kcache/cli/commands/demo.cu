// sort_tiles: sorts every tile of Threads * Items keys by itself, with CUB's block merge sort.
//
// Arguments  keys: Key[n], n a multiple of Threads * Items, sorted in place
// Launch     grid n / (Threads * Items), block Threads
#include <cub/block/block_merge_sort.cuh>

template <typename Key, int Threads, int Items>
__global__ void __launch_bounds__(Threads) sort_tiles(Key* keys)
{
    using Sort = cub::BlockMergeSort<Key, Threads, Items>;
    __shared__ typename Sort::TempStorage storage;

    Key* const first = keys + (static_cast<long long>(blockIdx.x) * Threads + threadIdx.x) * Items;
    Key mine[Items];
    for (int i = 0; i < Items; ++i)
    {
        mine[i] = first[i];
    }
    Sort(storage).Sort(mine, [](Key a, Key b) { return a < b; });
    for (int i = 0; i < Items; ++i)
    {
        first[i] = mine[i];
    }
}
