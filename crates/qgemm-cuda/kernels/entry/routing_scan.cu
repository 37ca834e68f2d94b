// Expert lists: prefix sum of counts over
// chunks. A CTA has 32 experts, one per lane;
// its warps share the chunks. CTA 0 also
// finds the first slot without an expert.
#include "mainloop/expert_lists.cuh"

constexpr u32 WARPS = QG_THREADS / 32;

struct SharedStorage {
    u32 sums[WARPS][32];
    u32 bad[WARPS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Chunks whose counts a lane loads at once.
constexpr u32 AT_ONCE = 4;

// Counts of one expert for the chunks
// from `first` on, before `last`.
struct Counts {
    u32 of_chunk[AT_ONCE];

    QG_DEVICE Counts load(const RoutingParams& p, u32 first, u32 last, u32 expert, bool has_expert) {
        Counts counts;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            counts.of_chunk[i] = has_expert && first + i < last ? ld_global_u32(chunk_count(p, first + i, expert)) : 0;
        return counts;
    }
    QG_DEVICE u32 sum(const Counts& counts) {
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) sum += counts.of_chunk[i];
        return sum;
    }
};

QG_DEVICE void find_bad(const RoutingParams& p, SharedStorage& shared) {
    u32 bad = NO_SLOT;
    for (u32 chunk = thread_index(); chunk < p.shape.chunks; chunk += QG_THREADS) {
        const u32 other = ld_global_u32(chunk_bad(p, chunk));
        bad = other < bad ? other : bad;
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
        const u32 other = shfl_xor_u32(bad, mask);
        bad = other < bad ? other : bad;
    }
    bad = least_of_warps({nullptr, nullptr, nullptr, shared.bad}, bad);
    if (thread_index() == 0) store_status(p, p.at.given_ids, bad);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_routing_scan(const __grid_constant__ RoutingParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (cta_index().x == 0) find_bad(p, shared);
    if (!(p.shape.flags & QG_FLAG_LISTS)) return;
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    const u32 e = cta_index().x * 32 + lane;
    const u32 each = (p.shape.chunks + WARPS - 1) / WARPS;
    const u32 first = warp * each;
    const u32 last = first + each < p.shape.chunks ? first + each : p.shape.chunks;
    const bool has_expert = e < p.shape.experts;
    Counts held = Counts::load(p, first, last, e, has_expert);
    u32 count = Counts::sum(held);
    for (u32 chunk = first + AT_ONCE; chunk < last; chunk += AT_ONCE) count += Counts::sum(Counts::load(p, chunk, last, e, has_expert));
    st_shared(&shared.sums[warp][lane], count);
    cta_barrier();
    if (!has_expert) return;
    u32 before = 0;
#pragma unroll
    for (u32 other = 0; other < WARPS; other++) before += other < warp ? ld_shared(&shared.sums[other][lane]) : 0;
    for (u32 chunk = first; chunk < last; chunk += AT_ONCE) {
        if (chunk != first) held = Counts::load(p, chunk, last, e, true);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (chunk + i >= last) break;
            st_global_u32(chunk_count(p, chunk + i, e), before);
            before += held.of_chunk[i];
        }
    }
    // The last warp holds the total;
    // warps without chunks add 0.
    if (warp == WARPS - 1) st_global_u32(chunk_count(p, p.shape.chunks, e), before);
}
