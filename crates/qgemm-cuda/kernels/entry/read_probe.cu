// Memory read bandwidth: reads a buffer once.
// Quoted bandwidths are relative to this kernel's.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"

struct ReadProbe {
    u64 data;   // Address of 16-byte words.
    u64 words;
    u64 sink;  // A word that is never written. Without it the loads would be removed.
};

// Loads of one thread in flight.
constexpr u32 IN_FLIGHT = 8;

extern "C" __global__ void __launch_bounds__(512) read_probe(const __grid_constant__ ReadProbe p) {
    const u8* data = reinterpret_cast<const u8*>(p.data);
    const u64 stride = (u64)grid_ctas().x * cta_threads();
    u64 word = (u64)cta_index().x * cta_threads() + thread_index();
    u32 mixed = 0;

    // All loads of a group are issued before the first use.
    for (; word + (IN_FLIGHT - 1) * stride < p.words; word += IN_FLIGHT * stride) {
        u32x4 loaded[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) loaded[i] = ld_global_v4(data + (word + i * stride) * 16);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) mixed += loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
    }
    for (; word < p.words; word += stride) {
        const u32x4 last = ld_global_v4(data + word * 16);
        mixed += last.x ^ last.y ^ last.z ^ last.w;
    }

    // The buffer holds zeros, so `mixed` is 0 and nothing is
    // written. The compiler does not know the contents.
    if (mixed != 0) st_global_u32(reinterpret_cast<u8*>(p.sink), mixed);
}
