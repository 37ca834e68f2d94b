// The weighted sums of the slots of tokens, in their order, in f32: a CTA has some features of a token. Slots without an expert, and
// those whose weight is NaN, are left out.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/operands.cuh"
#include "generated/abi.cuh"

QG_DEVICE u32 word(u64 base, u64 place) {
    return ld_global_u32(reinterpret_cast<const u8*>(base) + place * 4);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_experts_combine(const __grid_constant__ ExpertCombine p) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u64 token = cta_index().y + (u64)cta_index().z * grid_ctas().y;
    const u32 feature = cta_index().x * QG_THREADS + thread_index();
    if (token >= p.tokens || feature >= p.features) return;
    float sum = 0.0f;
    for (u64 slot = token * p.top_k; slot < (token + 1) * p.top_k; slot++) {
        const u32 weight = word(p.router_weights, slot);
        if (word(p.index, slot) >= p.experts || (weight & 0x7fffffffu) > 0x7f800000u) continue;
        sum += bits_to_f32(weight) * bits_to_f32(word(p.products, slot * p.features + feature));
    }
    if (p.residual != 0) sum += load_dense(p.residual_dtype, p.residual, token * p.residual_row + feature);
    store_dense(p.d_dtype, p.d, token * p.d_row + feature, sum);
}
