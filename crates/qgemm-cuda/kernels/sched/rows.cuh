// Token → row of X, C, D, residual and row scales.
// Listed MoE rows come from the list.
// Otherwise the row is the token.
#pragma once
#include "atoms/memory.cuh"
#include "sched/params.cuh"

// False past the last token and for an invalid row in the list.
QG_DEVICE bool find_row(const GemmParams& p, u32 token, u32& row) {
    row = token;
    if (token >= p.shape.m) return false;
#if QG_EXPERTS
    if (p.groups.list != 0) {
        row = ld_global_u32(reinterpret_cast<const u8*>(p.groups.list) + (u64)token * 4);
        return row < p.groups.rows;
    }
#endif
    return true;
}

// Row of X.
// `x_sharers` rows of D share one row of X.
// An invalid list entry maps to row 0, which is safe to read.
QG_DEVICE bool find_x_row(const GemmParams& p, u32 token, u32& row) {
    const bool found = find_row(p, token, row);
#if QG_EXPERTS
    if (p.groups.list != 0) row = found ? row / p.groups.x_sharers : 0;
#endif
    return found;
}
