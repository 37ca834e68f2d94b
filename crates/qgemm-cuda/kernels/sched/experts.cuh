// What a CTA computes of products with experts: some rows of one expert. The problem that the kernel is given is narrowed to these,
// so that the main loop and the epilogue see a dense product of a few tokens.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "sched/params.cuh"

#if QG_EXPERTS
// The parameter of kernels that compute products with experts.
struct KernelParams {
    GemmParams gemm;
    ExpertGroups groups;
};

// The problem of this CTA, `p`, of what the kernel is given. CTAs without rows end here. The index may come from the launch before.
#define QG_TAKE_PROBLEM(p, given)        \
    griddepcontrol_launch_dependents();  \
    griddepcontrol_wait();               \
    GemmParams p = (given).gemm;         \
    {                                    \
        const OwnRows own = OwnRows::of_cta((given).groups); \
        if (own.rows == 0) return;       \
        OwnRows::narrow(own, p, (given).groups); \
    }
#else
using KernelParams = GemmParams;
#define QG_TAKE_PROBLEM(p, given) const GemmParams& p = given
#endif

#if QG_EXPERTS
// Rows of one expert, QG_TILE_M at most.
struct OwnRows {
    u32 expert, first, rows;

    QG_DEVICE u32 index_word(const ExpertGroups& g, u32 place) {
        return ld_global_u32(reinterpret_cast<const u8*>(g.index) + (u64)place * 4);
    }

    // Tiles of rows are along the grid's y axis and, beyond its limit, along z.
    QG_DEVICE OwnRows of_cta(const ExpertGroups& g) {
        const u32 place = cta_index().y + cta_index().z * grid_ctas().y;
        if (g.form == QG_FORM_INDEXED) return of_slot(g, place);
        if (g.form == QG_FORM_MASKED) return of_capacity(g, place);
        return of_offsets(g, place);
    }

    QG_DEVICE OwnRows of_slot(const ExpertGroups& g, u32 slot) {
        if (slot >= g.rows) return {0, 0, 0};
        // A negative id is a large number here.
        const u32 expert = index_word(g, slot);
        return {expert, slot, expert < g.experts ? 1u : 0u};
    }

    // `rows` is the capacity of an expert.
    QG_DEVICE OwnRows of_capacity(const ExpertGroups& g, u32 place) {
        const u32 tiles = (g.rows + QG_TILE_M - 1) / QG_TILE_M, expert = place / tiles;
        if (expert >= g.experts) return {0, 0, 0};
        const u32 count = index_word(g, expert), used = count < g.rows ? count : g.rows;
        const u32 first = place % tiles * QG_TILE_M, left = used > first ? used - first : 0;
        return {expert, expert * g.rows + first, left < QG_TILE_M ? left : QG_TILE_M};
    }

    // Every warp looks at 32 experts at a time and adds up their tiles.
    QG_DEVICE OwnRows of_offsets(const ExpertGroups& g, u32 place) {
        const u32 lane = thread_index() % 32;
        u32 before = 0;
        for (u32 group = 0; group < g.experts; group += 32) {
            const u32 expert = group + lane;
            u32 first = 0, rows = 0;
            if (expert < g.experts) {
                const u32 begin = index_word(g, expert), end = index_word(g, expert + 1);
                first = begin < g.rows ? begin : g.rows;
                const u32 bound = end < g.rows ? end : g.rows;
                rows = bound > first ? bound - first : 0;
            }
            const u32 tiles = (rows + QG_TILE_M - 1) / QG_TILE_M;
            u32 until = tiles;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = shfl_idx_u32(until, lane >= step ? lane - step : lane);
                if (lane >= step) until += other;
            }
            const u32 all = shfl_idx_u32(until, 31);
            if (place < before + all) {
                // As many experts end before this place.
                u32 owner = before + until <= place ? 1 : 0;
#pragma unroll
                for (u32 mask = 16; mask > 0; mask /= 2) owner += shfl_xor_u32(owner, mask);
                const u32 skipped = (place - before - shfl_idx_u32(until - tiles, owner)) * QG_TILE_M;
                const u32 left = shfl_idx_u32(rows, owner) - skipped;
                return {group + owner, shfl_idx_u32(first, owner) + skipped, left < QG_TILE_M ? left : QG_TILE_M};
            }
            before += all;
        }
        return {0, 0, 0};
    }

    QG_DEVICE u64 bytes_of(u32 dtype) {
        return dtype == DTYPE_F32 ? 4 : 2;
    }

    // Makes `p` the product of these rows with their expert.
    QG_DEVICE void narrow(const OwnRows& own, GemmParams& p, const ExpertGroups& g) {
        const u64 expert = own.expert, first = own.first;
        p.shape.m = own.rows;
        p.at.x += first / g.x_sharers * p.at.x_row * bytes_of(QG_X_DTYPE);
        p.at.w += expert * g.w_bytes;
        p.at.row_scale += expert * g.row_pitch * 4;
        p.at.k_order += expert * g.k_order_len * 4;
        p.at.bias += expert * g.bias_bytes;
        p.at.token_scale += first * 4;
        p.at.c += first * p.at.c_row * bytes_of(p.shape.c_dtype);
        p.at.d += first * p.at.d_row * bytes_of(p.shape.d_dtype);
        p.at.residual += first * p.at.residual_row * bytes_of(p.shape.residual_dtype);
    }
};
#endif
