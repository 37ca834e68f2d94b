// Projection with several output segments of
// consecutive features.
// A tile lies in one segment: the host selects these kernels
// only if every segment starts at a whole tile.
#pragma once
#include "sched/experts.cuh"

#if QG_PROJECTION
// Whether the kernel normalizes X.
QG_DEVICE bool normalizes_x(const GemmParams& p) {
    return p.projection.types >> 16 & 1u;
}
// Whether X is f32, and rounded to the multiplied type once normalized.
QG_DEVICE bool normalizes_f32(const GemmParams& p) {
    return QG_RESIDENT_X && (p.projection.types >> 20 & 1u);
}

struct Segment {
    // First feature of segment `index` + 1.
    QG_DEVICE u32 first_of(const ProjectionOperands& all, u32 index) {
        return (u32)(all.firsts >> 21 * index & 0x1fffffu) * 16;
    }
    // Points the output of `p` at the segment that
    // contains `first_row`.
    // D is offset, so features keep their global number.
    QG_DEVICE void narrow(GemmParams& p, u32 first_row) {
        const ProjectionOperands& all = p.projection;
        const u32 first1 = first_of(all, 0), first2 = first_of(all, 1), first3 = first_of(all, 2);
        if (first_row < first1) return;
        u64 d = all.d1, row = all.d1_row;
        u32 first = first1, place = 1;
        if (first_row >= first2) d = all.d2, row = all.d2_row, first = first2, place = 2;
        if (first_row >= first3) d = all.d3, row = all.d3_row, first = first3, place = 3;
        const u32 dtype = all.types >> 4 * place & 15u;
        const bool is_aligned = all.types >> (16 + place) & 1u;
        p.at.d = d - (u64)first * (dtype == DTYPE_F32 ? 4 : 2);
        p.at.d_row = row;
        p.shape.d_dtype = dtype;
        p.shape.flags = (p.shape.flags & ~QG_FLAG_D_ALIGNED16) | (is_aligned ? QG_FLAG_D_ALIGNED16 : 0);
    }
};

#if QG_SEGMENT_TILES
#define QG_TAKE_PROBLEM(p, given) const GemmParams& p = given
#else
#define QG_TAKE_PROBLEM(p, given) \
    GemmParams p = given;         \
    Segment::narrow(p, cta_index().x * QG_TILE_FEATURES)
#endif
#endif
