// Sampling: one CTA chooses the token of a row. Sums of
// weights are integers, so their order does not matter.
#include "mainloop/sampling_cut.cuh"

// Weights of a row's tokens.
struct Weights {
    float best, inverse_temperature;

    __device__ __forceinline__ u32 operator()(u32 order) const {
        return weight_of(logit_of(order) - best, inverse_temperature);
    }
};

// Draws a token of a row whose best logit is finite.
QG_DEVICE u32 draw(SharedStorage& shared, const Row& row, const RowParameters& parameters, u32 best) {
    const Weights weight = {logit_of(best), rcp_rn_f32(parameters.temperature)};
    Cut cut = Cut::all();
    if (parameters.top_k > 0) {
        const u64 top_k = parameters.top_k;
        cut = cut_row(shared, row, cut, [](u32) { return 1u; }, [&](u64 total) { return total < top_k ? total : top_k; });
    }
    if (parameters.top_p < 1.0f)
        cut = cut_row(shared, row, cut, weight, [&](u64 total) { return kept_weight(parameters.top_p, total); });
    const u32 least = least_weight(parameters.min_p);
    const auto kept = [&](u32 id, u32 order) {
        const u32 own = cut.keeps(id, order) ? weight(order) : 0;
        return own >= least ? own : 0;
    };
    const u32 word = random_word(parameters.seed[0], parameters.seed[1], parameters.position[0], parameters.position[1]);
    return find_token(shared, row, kept, [&](u64 total) { return fraction_of(total, word) + 1; });
}

// Writes a row's token and status.
QG_DEVICE void write_row(const SamplingParams& p, u32 row, u32 id, u32 code, u32 index, u32 bits) {
    if (thread_index() != 0) return;
    st_global_u32(word_at(p.at.ids, row), id);
    const u32 status[4] = {code, index, bits, 0};
#pragma unroll
    for (u32 i = 0; i < 4; i++) st_global_u32(word_at(p.at.status, (u64)row * 4 + i), status[i]);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1) qg_sampling_sample(const __grid_constant__ SamplingParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 index = cta_index().x;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const RowParameters parameters = RowParameters::of(p, index);
    u32 bits = 0;
    const u32 refused = parameters.refused(bits);
    if (refused != NONE_REFUSED) return write_row(p, index, NO_TOKEN, STATUS_PARAMETER, refused, bits);
    const Row row = p.shape.earlier > 0 ? Row::of_orders(p, index) : Row::of_logits(p, index);
    Best best = {EXCLUDED, NO_TOKEN};
    row.each(0, row.vocabulary, thread_index(), QG_THREADS, [&](u32 id, u32 order) {
        if (order > best.order) best = {order, id};
    });
    best = cta_best(shared, best);
    if (best.order == EXCLUDED) return write_row(p, index, NO_TOKEN, STATUS_NO_CANDIDATE, 0, 0);
    if (best.order == NON_FINITE) {
        const u32 logit = ld_global_u32(word_at(p.at.logits, index * p.at.logits_row + best.id));
        return write_row(p, index, NO_TOKEN, STATUS_NON_FINITE, best.id, logit);
    }
    const u32 id = parameters.is_argmax() ? best.id : draw(shared, row, parameters, best.order);
    write_row(p, index, id, STATUS_FINE, 0, 0);
}
