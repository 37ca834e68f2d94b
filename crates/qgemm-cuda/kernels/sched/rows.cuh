// Which row of X, and of C, D, the residual and the row factors, a token of a tile is: the row of its number, or, with
// experts whose rows lie apart, the one that a list in memory names.
#pragma once
#include "atoms/memory.cuh"
#include "sched/params.cuh"

// False of tokens beyond the last, and of those that the list gives a row that is none.
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

// The same of X, of which several rows of D may share one. What is no row gets that of number 0 from a list, so that it may be read.
QG_DEVICE bool find_x_row(const GemmParams& p, u32 token, u32& row) {
    const bool found = find_row(p, token, row);
#if QG_EXPERTS
    if (p.groups.list != 0) row = found ? row / p.groups.x_sharers : 0;
#endif
    return found;
}
