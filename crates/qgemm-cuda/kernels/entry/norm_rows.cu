// Normalizes rows that fit in registers: X is read once, and kept as f32. A row has a CTA, or, if it is short, a warp or a
// part of one.
#include "mainloop/norm.cuh"

// Groups of a thread: `lane`, `lane + row_threads`, ….
struct RegisterRow {
    float value[QG_GROUPS][GROUP];
    u32 lane, threads, columns;

    QG_DEVICE u32 column(const RegisterRow& row, u32 i) {
        return (i * row.threads + row.lane) * GROUP;
    }

    template <class Visit>
    QG_DEVICE void each(const RegisterRow& row, Visit visit) {
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) {
            const u32 first = column(row, i);
            visit(row.value[i], first < row.columns ? row.columns - first : 0);
        }
    }
};

// Gamma and beta are constant operands, which come before the kernel before ours is done, if there are registers for them.
constexpr bool COLUMNS_FIRST = QG_GROUPS <= 2;

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_LEAST_CTAS)
    qg_norm_rows(const __grid_constant__ NormParams p) {
    NormStorage& storage = *reinterpret_cast<NormStorage*>(dynamic_shared());
    RegisterRow own;
    own.threads = p.shape.row_threads;
    const bool is_alone = own.threads == cta_threads();
    own.lane = is_alone ? thread_index() : thread_index() % own.threads;
    const u32 row = is_alone ? cta_index().x
                             : cta_index().x * (cta_threads() / own.threads) + thread_index() / own.threads;
    // Threads without a row take part in what their warp does.
    own.columns = row < p.shape.rows ? p.shape.columns : 0;

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

    const OperandRow x = OperandRow::x(p, row);
    StoredGroup stored[QG_GROUPS];
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++)
        stored[i] = StoredGroup::load(x, RegisterRow::column(own, i), own.columns);
#pragma unroll
    for (u32 i = 0; i < QG_GROUPS; i++) StoredGroup::decode(stored[i], x.dtype, own.value[i]);
    if (p.shape.flags & QG_FLAG_RESIDUAL) {
        const OperandRow residual = OperandRow::residual(p, row), sum = OperandRow::sum(p, row);
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++)
            stored[i] = StoredGroup::load(residual, RegisterRow::column(own, i), own.columns);
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++)
            add_residual(stored[i], residual.dtype, sum, RegisterRow::column(own, i), own.columns, own.value[i]);
    }

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
