// MoE GEMM: the rows of one expert that a CTA computes.
// The problem is narrowed to these rows: the main loop and the
// epilogue see a dense product of few tokens.
#pragma once
#include "atoms/bits.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "sched/expert_faults.cuh"
#include "sched/lane_sums.cuh"
#include "sched/params.cuh"

using KernelParams = GemmParams;

#if QG_EXPERTS
// Row ranges of EXPERTS consecutive experts.
// Rows are rows of D, or entries of the list if there is one.
template <u32 EXPERTS>
struct ExpertRows {
    u32 first[EXPERTS], count[EXPERTS];

    // Ranges of experts `expert` and up; empty past the last expert.
    // All loads are issued before the first use.
    QG_DEVICE ExpertRows of(const ExpertGroups& g, u32 expert) {
        ExpertRows rows;
        if (g.form == QG_FORM_MASKED) {
            // `rows` is the capacity of an expert.
#pragma unroll
            for (u32 i = 0; i < EXPERTS; i++) {
                const u32 count = expert + i < g.experts ? index_word(g.index, expert + i) : 0;
                rows.first[i] = (expert + i) * g.rows;
                rows.count[i] = count < g.rows ? count : g.rows;
            }
            return rows;
        }
        const u64 offsets = g.list != 0 ? g.offsets : g.index;
        u32 bound[EXPERTS + 1];
#pragma unroll
        for (u32 i = 0; i <= EXPERTS; i++) {
            const u32 place = expert + i < g.experts ? expert + i : g.experts;
            const u32 offset = index_word(offsets, place);
            bound[i] = offset < g.rows ? offset : g.rows;
        }
#pragma unroll
        for (u32 i = 0; i < EXPERTS; i++) {
            rows.first[i] = bound[i];
            rows.count[i] = expert + i < g.experts && bound[i + 1] > bound[i] ? bound[i + 1] - bound[i] : 0;
        }
        return rows;
    }
};

// Experts per lane and per warp in one step of the search.
constexpr u32 LANE_EXPERTS = 4, WARP_EXPERTS = 32 * LANE_EXPERTS;

// Search state: experts passed, a multiple of WARP_EXPERTS,
// and their row tiles.
struct PassedExperts {
    u32 experts, tiles;
};

// Rows of a tile; the CTAs of a cluster share them.
constexpr u32 TILE_ROWS = QG_TILE_M * QG_CLUSTER;

// Rows of one expert, at most TILE_ROWS.
struct OwnRows {
    u32 expert, first, rows;

    // Rows of row tile number `place`; empty past the last tile.
    // Every warp scans WARP_EXPERTS experts at a time.
    // A search for a later tile resumes from `passed`.
    QG_DEVICE OwnRows find(const ExpertGroups& g, u32 place, PassedExperts& passed) {
        const u32 lane = thread_index() % 32;
        for (; passed.experts < g.experts; passed.experts += WARP_EXPERTS) {
            const u32 expert = passed.experts + lane * LANE_EXPERTS;
            const ExpertRows<LANE_EXPERTS> of_lane = ExpertRows<LANE_EXPERTS>::of(g, expert);
            u32 until = 0;
#pragma unroll
            for (u32 i = 0; i < LANE_EXPERTS; i++) until += tiles_of(of_lane.count[i]);
            const u32 tiles = until;
            until = sum_up_to_lane(until);
            const u32 all = shfl_idx_u32(until, 31);
            if (place < passed.tiles + all) {
                // The number of lanes that end before `place`.
                const u32 owner = popc(ballot(passed.tiles + until <= place));
                u32 before = passed.tiles + until - tiles;
                OwnRows own = {};
#pragma unroll
                for (u32 i = 0; i < LANE_EXPERTS; i++) {
                    const u32 of_expert = tiles_of(of_lane.count[i]);
                    if (place >= before && place - before < of_expert) {
                        const u32 skipped = (place - before) * TILE_ROWS, left = of_lane.count[i] - skipped;
                        own = {expert + i, of_lane.first[i] + skipped, left < TILE_ROWS ? left : TILE_ROWS};
                    }
                    before += of_expert;
                }
                return {shfl_idx_u32(own.expert, owner), shfl_idx_u32(own.first, owner), shfl_idx_u32(own.rows, owner)};
            }
            passed.tiles += all;
        }
        return {0, 0, 0};
    }

    QG_DEVICE u32 tiles_of(u32 rows) {
        return (rows + TILE_ROWS - 1) / TILE_ROWS;
    }

    // This CTA's share of a cluster's rows.
    // The second CTA's share may be empty.
    QG_DEVICE OwnRows of_rank(const OwnRows& all) {
        const u32 before = cta_index().x % QG_CLUSTER * QG_TILE_M, left = all.rows > before ? all.rows - before : 0;
        return {all.expert, all.first + before, left < QG_TILE_M ? left : QG_TILE_M};
    }

    // Rows of the CTA at grid position `place`.
    // `place` is a slot if rows are neither sorted nor listed.
    QG_DEVICE OwnRows of_place(const ExpertGroups& g, u32 place) {
        if (g.form == QG_FORM_INDEXED && g.list == 0) return of_slot(g, place);
        PassedExperts passed = {};
        return find(g, place, passed);
    }

    QG_DEVICE OwnRows of_slot(const ExpertGroups& g, u32 slot) {
        if (slot >= g.rows) return {0, 0, 0};
        // A negative id is a large unsigned number.
        const u32 expert = index_word(g.index, slot);
        return {expert, slot, expert < g.experts ? 1u : 0u};
    }

    QG_DEVICE u64 bytes_of(u32 dtype) {
        return dtype == DTYPE_F32 ? 4 : 2;
    }

    // Narrows `p` to the product of these rows with their expert.
    QG_DEVICE void narrow(const OwnRows& own, GemmParams& p) {
        const ExpertGroups& g = p.groups;
        const u64 expert = own.expert, first = own.first;
        p.shape.m = own.rows;
        p.at.w += expert * g.w_bytes;
        p.at.row_scale += expert * g.row_pitch * 4;
        p.at.k_order += expert * g.k_order_len * 4;
        p.at.bias += expert * g.bias_bytes;
        if (g.list != 0) {
            // Row pointers stay: the list holds the rows.
            p.groups.list += first * 4;
            return;
        }
        p.at.x += first / g.x_sharers * p.at.x_row * bytes_of(QG_X_DTYPE);
        p.at.token_scale += first * 4;
        p.at.c += first * p.at.c_row * bytes_of(p.shape.c_dtype);
        p.at.d += first * p.at.d_row * bytes_of(p.shape.d_dtype);
        p.at.residual += first * p.at.residual_row * bytes_of(p.shape.residual_dtype);
    }
};

// Row tiles run along the grid's y axis and, past its limit, z.
// The last CTA has no row tile and checks for faults.
struct CtaTile {
    u32 place;
    bool is_last;

    QG_DEVICE CtaTile of_grid() {
        const u32 place = cta_index().y + cta_index().z * grid_ctas().y;
        return {place, place + 1 == grid_ctas().y * grid_ctas().z};
    }
};

// Takes the CTA's rows `own`, and narrows `given` to `p`.
// CTAs without rows return here.
// The wait is for the index, which
// the previous launch may write.
#define QG_TAKE_ROWS(own, p, given)                                                                      \
    griddepcontrol_launch_dependents();                                                                  \
    griddepcontrol_wait();                                                                               \
    GemmParams p = given;                                                                                \
    OwnRows own;                                                                                         \
    {                                                                                                    \
        const CtaTile at = CtaTile::of_grid();                                                         \
        if (at.is_last) {                                                                                \
            u32* words = reinterpret_cast<u32*>(dynamic_shared());                                       \
            if (cta_index().x == 0) store_faults<QG_THREADS>(p.groups, words, thread_index(), [] { cta_barrier(); }); \
            return;                                                                                      \
        }                                                                                                \
        own = OwnRows::of_place(p.groups, at.place);                                                     \
        if (own.rows == 0) return;                                                                       \
        OwnRows::narrow(own, p);                                                                         \
    }
#define QG_TAKE_PROBLEM(p, given) QG_TAKE_ROWS(own_rows, p, given)
#elif !QG_PROJECTION
#define QG_TAKE_PROBLEM(p, given) const GemmParams& p = given
#endif
