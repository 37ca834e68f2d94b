// RMSNorm and LayerNorm of long rows, one CTA per
// row. Shared memory caches the first columns as
// f32; further columns are reloaded in each pass.
#include "mainloop/norm_long_row.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_norm_long_rows(const __grid_constant__ NormParams p) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    const u32 row = cta_index().x, step = cta_threads() * GROUP;
    LongRow own = LongRow::of_cta(p, dynamic_shared() + sizeof(NormStorage));

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    LongRow::load(own, p, row);

    const Statistics statistics = Statistics::of(p, own, storage);
    if (p.shape.flags & QG_FLAG_K_ORDER) {
        store_gathered(p, statistics, row, thread_index(), cta_threads());
        return;
    }
    for (u32 column = thread_index() * GROUP; column < p.shape.d_columns; column += step) {
        const ColumnGroup of_columns = ColumnGroup::load(p, column);
        float value[GROUP] = {};
        if (column < own.columns) LongRow::read(own, column, value);
        store_normalized(p, statistics, value, of_columns, row, column);
    }
}
