// Log-probabilities of a row's sampled token
// and of the most likely ones, from the
// logits alone; one CTA per row.
#include "mainloop/sampling_sums.cuh"

constexpr u32 MINUS_INFINITY = 0xff800000u;

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sampling_log_probabilities(const __grid_constant__ SamplingParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 index = cta_index().x, thread = thread_index(), count = p.shape.alternatives;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 id = ld_global_u32(word_at(p.at.ids, index));
    const Row row = Row::of_logits(p, index);
    const u64 listed = (u64)index * count;
    u32 place = 0;
    if (id < row.vocabulary) {
        Best last = best_after(shared, row, {NON_FINITE, 0});
        const float best = logit_of(last.order);
        u64 own = 0;
        row.each(0, row.vocabulary, thread, QG_THREADS, [&](u32, u32 order) {
            if (order != EXCLUDED) own += weight_of(logit_of(order) - best, 1.0f);
        });
        const float normalizer = log_sum(cta_prefix(shared, own).total);
        if (thread == 0) st_global_u32(word_at(p.at.log_probabilities, index), f32_to_bits(logit_of(row.order(id)) - best - normalizer));
        for (; place < count && last.order != EXCLUDED; place++) {
            if (thread == 0) {
                st_global_u32(word_at(p.at.alternative_ids, listed + place), last.id);
                const float log_probability = logit_of(last.order) - best - normalizer;
                st_global_u32(word_at(p.at.alternative_log_probabilities, listed + place), f32_to_bits(log_probability));
            }
            if (place + 1 < count) last = best_after(shared, row, last);
        }
    } else if (thread == 0) {
        st_global_u32(word_at(p.at.log_probabilities, index), MINUS_INFINITY);
    }
    for (place += thread; place < count; place += QG_THREADS) {
        st_global_u32(word_at(p.at.alternative_ids, listed + place), NO_TOKEN);
        st_global_u32(word_at(p.at.alternative_log_probabilities, listed + place), MINUS_INFINITY);
    }
}
