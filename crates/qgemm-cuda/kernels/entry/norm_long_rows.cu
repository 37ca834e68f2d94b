// Normalizes rows of any length, one a CTA. The first columns are kept in shared memory as f32; what has no room there is
// read again for each pass.
#include "mainloop/norm.cuh"

// Groups of a thread: `thread`, `thread + threads`, …. It reads what it has written itself, and nothing of others.
struct LongRow {
    // What is normalized, in memory: X, or the sum with the residual.
    OperandRow source;
    u32 columns, kept_columns;
    // The halves of the groups that are kept: threads beside one another read vectors beside one another.
    f32x4 *low, *high;

    QG_DEVICE void keep(const LongRow& row, u32 column, const float (&value)[GROUP]) {
        if (column >= row.kept_columns) return;
        st_shared(&row.low[column / GROUP], f32x4{value[0], value[1], value[2], value[3]});
        st_shared(&row.high[column / GROUP], f32x4{value[4], value[5], value[6], value[7]});
    }

    QG_DEVICE void load(const LongRow& row, u32 column, float (&value)[GROUP]) {
        if (column >= row.kept_columns) {
            StoredGroup::decode(StoredGroup::load(row.source, column, row.columns), row.source.dtype, value);
            return;
        }
        const f32x4 low = ld_shared(&row.low[column / GROUP]), high = ld_shared(&row.high[column / GROUP]);
        value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
        value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
    }

    template <class Visit>
    QG_DEVICE void each(const LongRow& row, Visit visit) {
        for (u32 column = thread_index() * GROUP; column < row.columns; column += cta_threads() * GROUP) {
            float value[GROUP];
            load(row, column, value);
            visit(value, row.columns - column);
        }
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_norm_long_rows(const __grid_constant__ NormParams p) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    const u32 row = cta_index().x, step = cta_threads() * GROUP;
    const bool adds = p.shape.flags & QG_FLAG_RESIDUAL;
    LongRow own;
    own.columns = p.shape.columns;
    own.kept_columns = p.shape.kept_columns;
    own.low = reinterpret_cast<f32x4*>(dynamic_shared() + sizeof(NormStorage));
    own.high = own.low + own.kept_columns / GROUP;
    own.source = adds ? OperandRow::sum(p, row) : OperandRow::x(p, row);

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const OperandRow x = OperandRow::x(p, row), residual = OperandRow::residual(p, row);
    // Without a residual, what is not kept need not be read now.
    const u32 end = adds || own.columns < own.kept_columns ? own.columns : own.kept_columns;
    for (u32 column = thread_index() * GROUP; column < end; column += step) {
        float value[GROUP];
        const StoredGroup of_x = StoredGroup::load(x, column, own.columns);
        if (adds) {
            const StoredGroup of_residual = StoredGroup::load(residual, column, own.columns);
            StoredGroup::decode(of_x, x.dtype, value);
            add_residual(of_residual, residual.dtype, own.source, column, own.columns, value);
        } else {
            StoredGroup::decode(of_x, x.dtype, value);
        }
        LongRow::keep(own, column, value);
    }

    const Statistics statistics = Statistics::of(p, own, storage);
    if (p.shape.flags & QG_FLAG_K_ORDER) {
        store_gathered(p, statistics, row, thread_index(), cta_threads());
        return;
    }
    for (u32 column = thread_index() * GROUP; column < p.shape.d_columns; column += step) {
        const ColumnGroup of_columns = ColumnGroup::load(p, column);
        float value[GROUP] = {};
        if (column < own.columns) LongRow::load(own, column, value);
        store_normalized(p, statistics, value, of_columns, row, column);
    }
}
