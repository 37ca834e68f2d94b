// Long row: shared memory caches the first columns
// as f32; further columns are reloaded from memory.
#pragma once
#include "mainloop/norm.cuh"

// A thread has groups `thread`, `thread + threads`, …. It
// reads only groups that it wrote, so no barrier is needed.
struct LongRow {
    // Row to normalize in memory: X,
    // or its sum with the residual.
    OperandRow source;
    u32 columns, kept_columns;
    // Low and high halves of cached groups.
    // Adjacent threads access adjacent vectors.
    f32x4 *low, *high;

    // The row of this CTA; `shared` holds the cache.
    QG_DEVICE LongRow of_cta(const NormParams& p, u8* shared) {
        LongRow row;
        row.columns = p.shape.columns;
        row.kept_columns = p.shape.kept_columns;
        row.low = reinterpret_cast<f32x4*>(shared);
        row.high = row.low + row.kept_columns / GROUP;
        const u32 index = cta_index().x;
        row.source = p.shape.flags & QG_FLAG_RESIDUAL ? OperandRow::sum(p, index) : OperandRow::x(p, index);
        return row;
    }

    // Adds the residual to all columns and fills the cache.
    QG_DEVICE void load(const LongRow& row, const NormParams& p, u32 index) {
        const bool adds = p.shape.flags & QG_FLAG_RESIDUAL;
        const OperandRow x = OperandRow::x(p, index), residual = OperandRow::residual(p, index);
        // Without a residual, uncached columns are not read yet.
        const u32 end = adds || row.columns < row.kept_columns ? row.columns : row.kept_columns;
        for (u32 column = thread_index() * GROUP; column < end; column += cta_threads() * GROUP) {
            float value[GROUP];
            const StoredGroup of_x = StoredGroup::load(x, column, row.columns);
            if (adds) {
                const StoredGroup of_residual = StoredGroup::load(residual, column, row.columns);
                StoredGroup::decode(of_x, x.dtype, value);
                add_residual(of_residual, residual.dtype, row.source, column, row.columns, value);
            } else {
                StoredGroup::decode(of_x, x.dtype, value);
            }
            keep(row, column, value);
        }
    }

    QG_DEVICE void keep(const LongRow& row, u32 column, const float (&value)[GROUP]) {
        if (column >= row.kept_columns) return;
        st_shared(&row.low[column / GROUP], f32x4{value[0], value[1], value[2], value[3]});
        st_shared(&row.high[column / GROUP], f32x4{value[4], value[5], value[6], value[7]});
    }

    QG_DEVICE void read(const LongRow& row, u32 column, float (&value)[GROUP]) {
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
            read(row, column, value);
            visit(value, row.columns - column);
        }
    }
};
