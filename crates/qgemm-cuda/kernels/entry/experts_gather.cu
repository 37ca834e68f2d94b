// MoE gather of quantized X into list order, so
// that each expert's rows are contiguous: codes,
// scales and token factors. One CTA per list
// entry; entries without a slot are not written.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

struct GatherParams {
    // Planes of X and their destinations; 0 if absent.
    u64 codes, scales, factors, to_codes, to_scales, to_factors;
    // Slot of each list entry, and row strides of X in bytes.
    u64 list, codes_row, scales_row;
    // Slots, and slots per row of X; 16-byte
    // chunks of codes and words of scales per row.
    u32 slots, x_sharers, chunks, words;
};
static_assert(sizeof(GatherParams) == 88, "the host lays out another size");

// Copies of a thread in flight.
constexpr u32 AT_ONCE = 4;

QG_DEVICE void copy_chunks(const u8* from, u8* to, u32 chunks, u32 thread) {
#pragma unroll 1
    for (u32 first = thread; first < chunks; first += QG_THREADS * AT_ONCE) {
        u32x4 chunk[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            const u32 own = first + i * QG_THREADS;
            if (own < chunks) chunk[i] = ld_global_v4(from + (u64)own * 16);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            const u32 own = first + i * QG_THREADS;
            if (own < chunks) st_global_v4(to + (u64)own * 16, chunk[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 8) qg_experts_gather(const __grid_constant__ GatherParams p) {
    const u32 place = cta_index().x, thread = thread_index();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (place >= p.slots) return;
    const u32 slot = ld_global_u32(reinterpret_cast<const u8*>(p.list) + (u64)place * 4);
    if (slot >= p.slots) return;
    const u64 row = slot / p.x_sharers, to = place;
    copy_chunks(reinterpret_cast<const u8*>(p.codes) + row * p.codes_row, reinterpret_cast<u8*>(p.to_codes) + to * p.chunks * 16,
                p.chunks, thread);
    const u8* scales = reinterpret_cast<const u8*>(p.scales) + row * p.scales_row;
    u8* to_scales = reinterpret_cast<u8*>(p.to_scales) + to * p.words * 4;
    for (u32 word = thread; word < p.words; word += QG_THREADS) st_global_u32(to_scales + word * 4, ld_global_u32(scales + word * 4));
    if (p.factors != 0 && thread == 0)
        st_global_u32(reinterpret_cast<u8*>(p.to_factors) + to * 4, ld_global_u32(reinterpret_cast<const u8*>(p.factors) + row * 4));
}
