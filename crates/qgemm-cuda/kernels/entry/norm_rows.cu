// RMSNorm and LayerNorm of rows in
// registers: X is read once and held as f32.
// A row has a CTA, a warp or part of a warp.
#include "mainloop/norm_register_row.cuh"

// Gamma and beta are constant operands: load them before
// the previous launch ends, if registers suffice.
constexpr bool COLUMNS_FIRST = QG_GROUPS <= 2;

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_LEAST_CTAS)
    qg_norm_rows(const __grid_constant__ NormParams p) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    u32 row;
    RegisterRow own = RegisterRow::of_thread(p, row);

    griddepcontrol_launch_dependents();
    ColumnGroup of_columns[QG_GROUPS];
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) {
        if constexpr (COLUMNS_FIRST)
            of_columns[i] = ColumnGroup::load(p, RegisterRow::column(own, i));
        else
            ColumnGroup::prefetch(p, RegisterRow::column(own, i));
    }
    griddepcontrol_wait();

    RegisterRow::load(own, p, row);

    const Statistics statistics = Statistics::of(p, own, storage);
    if (row >= p.shape.rows) return;
    if (p.shape.flags & QG_FLAG_K_ORDER) {
        store_gathered(p, statistics, row, own.lane, own.threads);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) {
        const u32 column = RegisterRow::column(own, i);
        if constexpr (!COLUMNS_FIRST) of_columns[i] = ColumnGroup::load(p, column);
        if (column < p.shape.d_columns) store_normalized(p, statistics, own.value[i], of_columns[i], row, column);
    }
}
