// Row in registers as f32.
#pragma once
#include "mainloop/norm.cuh"

// A thread has groups `lane`, `lane + row_threads`, ….
struct RegisterRow {
    float value[QG_GROUPS][GROUP];
    u32 lane, threads, columns;

    // Assigns a row to the thread; sets `index`. Loads no values.
    QG_DEVICE RegisterRow of_thread(const NormParams& p, u32& index) {
        RegisterRow row;
        row.threads = p.shape.row_threads;
        const bool is_alone = row.threads == cta_threads();
        row.lane = is_alone ? thread_index() : thread_index() % row.threads;
        index = is_alone ? cta_index().x
                         : cta_index().x * (cta_threads() / row.threads) + thread_index() / row.threads;
        // Threads without a row still take part in shuffles.
        row.columns = index < p.shape.rows ? p.shape.columns : 0;
        return row;
    }

    // Loads row `index` and adds the residual.
    QG_DEVICE void load(RegisterRow& row, const NormParams& p, u32 index) {
        const OperandRow x = OperandRow::x(p, index);
        StoredGroup stored[QG_GROUPS];
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) stored[i] = StoredGroup::load(x, column(row, i), row.columns);
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) StoredGroup::decode(stored[i], x.dtype, row.value[i]);
        if (!(p.shape.flags & QG_FLAG_RESIDUAL)) return;
        const OperandRow residual = OperandRow::residual(p, index), sum = OperandRow::sum(p, index);
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++) stored[i] = StoredGroup::load(residual, column(row, i), row.columns);
#pragma unroll
        for (u32 i = 0; i < QG_GROUPS; i++)
            add_residual(stored[i], residual.dtype, sum, column(row, i), row.columns, row.value[i]);
    }

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
