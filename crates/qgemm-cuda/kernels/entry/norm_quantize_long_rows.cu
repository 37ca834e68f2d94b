// RMSNorm and LayerNorm with quantization of long
// rows, one CTA per row. Per-token scales or factors
// need two passes over the normalized columns.
#include "mainloop/norm_long_row.cuh"
#include "mainloop/norm_quantize.cuh"

QG_DEVICE NormalizedGroup normalized(const NormParams& p, const Statistics& s, const LongRow& row, u32 column) {
    float value[GROUP] = {};
    if (column < row.columns) LongRow::read(row, column, value);
    NormalizedGroup group;
    normalize_group(p, s, value, ColumnGroup::load(p, column), column, group.number);
    return group;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_norm_quantize_long_rows(const __grid_constant__ NormQuantizeParams params) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    const NormParams& p = params.norm;
    const u32 row = cta_index().x, first = thread_index() * GROUP, step = cta_threads() * GROUP;
    const LongRow own = LongRow::of_cta(p, dynamic_shared() + sizeof(NormStorage));

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    LongRow::load(own, p, row);
    const Statistics statistics = Statistics::of(p, own, storage);
    u32 largest = 0;
    if constexpr (OF_TOKEN) {
        for (u32 column = first; column < own.columns; column += step)
            largest = larger(largest, NormalizedGroup::largest(normalized(p, statistics, own, column)));
    }
    const RowScale scale = RowScale::of(params, row, thread_index() == 0, largest, storage);
    // Whole warps iterate together: lanes compare by shuffles.
    for (u32 column = first; column - thread_index() % 32 * GROUP < p.shape.d_columns; column += step)
        store_quantized(params, scale, normalized(p, statistics, own, column), row, column);
}
