// Orders of a row's logits after the repetition penalty.
// A CTA has a part of the vocabulary and reads all earlier
// tokens of the row.
#include "atoms/launch.cuh"
#include "atoms/shared_atomic.cuh"
#include "atoms/sync.cuh"
#include "mainloop/sampling_params.cuh"

// Tokens of a CTA.
constexpr u32 PART = 2048;

struct SharedStorage {
    // How often a token is an earlier one.
    u32 counts[PART];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1) qg_sampling_penalize(const __grid_constant__ SamplingParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), parts = (p.shape.vocabulary + PART - 1) / PART;
    const u32 row = cta_index().x / parts, first = cta_index().x % parts * PART;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    for (u32 i = thread; i < PART; i += QG_THREADS) st_shared(&shared.counts[i], 0u);
    cta_barrier();
    const u32 stated = ld_global_u32(word_at(p.at.earlier_lengths, row));
    const u32 count = stated < p.shape.earlier ? stated : p.shape.earlier;
    for (u32 i = thread; i < count; i += QG_THREADS) {
        const u32 id = ld_global_u32(word_at(p.at.earlier, row * p.at.earlier_row + i));
        // Ids below `first` wrap around.
        if (id - first < PART) reduce_add_shared(&shared.counts[id - first], 1);
    }
    cta_barrier();
    const float penalty = RowParameters::of(p, row).repetition_penalty;
    for (u32 i = thread; i < PART && first + i < p.shape.vocabulary; i += QG_THREADS) {
        const u32 bits = ld_global_u32(word_at(p.at.logits, row * p.at.logits_row + first + i));
        const u32 order = ld_shared(&shared.counts[i]) > 0 ? penalized_order(bits, penalty) : order_of(bits);
        st_global_u32(word_at(p.at.orders, (u64)row * p.shape.vocabulary + first + i), order);
    }
}
