// RMSNorm and LayerNorm with quantization of
// rows in registers. A CTA per row, or a warp
// per short row: lanes that share a scale are
// in one warp, as in quantize_blocks.cu.
#include "mainloop/norm_quantize.cuh"
#include "mainloop/norm_register_row.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_norm_quantize_rows(const __grid_constant__ NormQuantizeParams params) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    const NormParams& p = params.norm;
    u32 row;
    RegisterRow own = RegisterRow::of_thread(p, row);

    griddepcontrol_launch_dependents();
    // Gamma and beta are constant operands: prefetch
    // them before the previous launch ends.
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) ColumnGroup::prefetch(p, RegisterRow::column(own, i));
    griddepcontrol_wait();
    RegisterRow::load(own, p, row);
    const Statistics statistics = Statistics::of(p, own, storage);
    // Whole warps exit: no later shuffle or barrier misses their threads.
    if (row >= p.shape.rows) return;

    NormalizedGroup group[QG_GROUPS];
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) {
        const u32 column = RegisterRow::column(own, i);
        normalize_group(p, statistics, own.value[i], ColumnGroup::load(p, column), column, group[i].number);
        largest = larger(largest, NormalizedGroup::largest(group[i]));
    }
    const RowScale scale = RowScale::of(params, row, own.lane == 0, largest, storage);
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) store_quantized(params, scale, group[i], row, RegisterRow::column(own, i));
}
