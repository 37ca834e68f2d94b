// MoE combine: weighted sum over the slots of a
// token, in slot order, in f32. A thread has a
// contiguous segment of features. Slots without an
// expert or with a NaN weight are skipped. Several
// slots are loaded at once to hide latency.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/operands.cuh"
#include "generated/abi.cuh"

constexpr u32 SLOTS_AT_ONCE = 8;

QG_DEVICE u32 word(u64 base, u64 place) {
    return ld_global_u32(reinterpret_cast<const u8*>(base) + place * 4);
}

// Adds `slots` slots from `first` on.
QG_DEVICE void add_slots(float (&sum)[RUN], const ExpertCombine& p, u64 first, u32 slots, u32 feature, u32 count) {
    u32 weight[SLOTS_AT_ONCE], id[SLOTS_AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < SLOTS_AT_ONCE; i++) {
        id[i] = i < slots ? word(p.index, first + i) : ~0u;
        weight[i] = i < slots ? word(p.router_weights, first + i) : 0;
    }
    float products[SLOTS_AT_ONCE][RUN];
#pragma unroll
    for (u32 i = 0; i < SLOTS_AT_ONCE; i++) {
        if (id[i] >= p.experts || (weight[i] & 0x7fffffffu) > 0x7f800000u) id[i] = ~0u;
        if (id[i] != ~0u)
            load_dense_run(products[i], DTYPE_F32, p.products, (first + i) * p.features + feature, p.features % 4 == 0,
                           count);
    }
#pragma unroll
    for (u32 i = 0; i < SLOTS_AT_ONCE; i++) {
        if (id[i] == ~0u) continue;
#pragma unroll
        for (u32 j = 0; j < RUN; j++) sum[j] += bits_to_f32(weight[i]) * products[i][j];
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_experts_combine(const __grid_constant__ ExpertCombine p) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u64 token = cta_index().y + (u64)cta_index().z * grid_ctas().y;
    const u32 feature = (cta_index().x * QG_THREADS + thread_index()) * RUN;
    if (token >= p.tokens || feature >= p.features) return;
    const u32 left = p.features - feature, count = left < RUN ? left : RUN;
    float sum[RUN] = {};
#pragma unroll 1
    for (u32 slot = 0; slot < p.top_k; slot += SLOTS_AT_ONCE)
        add_slots(sum, p, token * p.top_k + slot, p.top_k - slot, feature, count);
    if (p.residual != 0) {
        float residual[RUN];
        load_dense_run(residual, p.residual_dtype, p.residual, token * p.residual_row + feature,
                       p.flags & QG_FLAG_RESIDUAL_ALIGNED16, count);
#pragma unroll
        for (u32 j = 0; j < RUN; j++) sum[j] += residual[j];
    }
    store_dense_run(p.d_dtype, p.d, token * p.d_row + feature, p.flags & QG_FLAG_D_ALIGNED16, count, sum);
}
