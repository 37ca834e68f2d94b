// Reads a buffer once, as fast as the memory delivers it: the yardstick for every bandwidth that is quoted.

struct ReadProbe {
    const uint4* data;          // 16-byte words
    unsigned long long words;
    unsigned int* sink;         // written never, or the loads would be removed
};

// Loads of one thread in flight at a time.
constexpr int IN_FLIGHT = 8;

extern "C" __global__ void __launch_bounds__(512) read_probe(const __grid_constant__ ReadProbe p) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long word = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int mixed = 0;

    // Whole groups of loads, issued before the first is used.
    for (; word + (IN_FLIGHT - 1) * stride < p.words; word += IN_FLIGHT * stride) {
        uint4 loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) loaded[i] = p.data[word + i * stride];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) mixed += loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
    }
    for (; word < p.words; word += stride) {
        const uint4 last = p.data[word];
        mixed += last.x ^ last.y ^ last.z ^ last.w;
    }

    // The buffer holds zeros, whose mix is 0: the compiler cannot know it, and nothing is ever written.
    if (mixed != 0) *p.sink = mixed;
}
