// MoE problem of a CTA whose expert may be ready before launch.
#pragma once
#include "sched/experts.cuh"

#if QG_EXPERTS
#include "atoms/fresh_load.cuh"

// Flag bit: no kernel still at work writes the
// slots' expert ids.
constexpr u32 INDEX_READY = 1u << 31;

struct ReadyExperts {
    // Row of a slot.
    QG_DEVICE OwnRows of_slot(const ExpertGroups& g, u32 slot) {
        if (slot >= g.rows) return {0, 0, 0};
        const u32 expert = ld_global_fresh_u32(reinterpret_cast<const u8*>(g.index) + (u64)slot * 4);
        return {expert, slot, expert < g.experts ? 1u : 0u};
    }
};

// As `QG_TAKE_PROBLEM` for kernels that wait by themselves and
// then launch dependents. They may load W before they wait,
// but not X. CTAs without rows return without a wait:
// the last CTA, which checks for faults, has waited.
#define QG_TAKE_PROBLEM_EARLY(p, given)                                                                  \
    GemmParams p = given;                                                                                \
    {                                                                                                    \
        const CtaTile at = CtaTile::of_grid();                                                         \
        const bool is_ready = p.shape.flags & INDEX_READY;                                           \
        if (at.is_last || !is_ready) griddepcontrol_wait();                                            \
        if (at.is_last) {                                                                                \
            u32* words = reinterpret_cast<u32*>(dynamic_shared());                                       \
            if (cta_index().x == 0) store_faults<QG_THREADS>(p.groups, words, thread_index(), [] { cta_barrier(); }); \
            return;                                                                                      \
        }                                                                                                \
        const OwnRows own =                                                                              \
            is_ready ? ReadyExperts::of_slot(p.groups, at.place) : OwnRows::of_place(p.groups, at.place); \
        if (own.rows == 0) return;                                                                       \
        OwnRows::narrow(own, p);                                                                         \
    }
#else
#define QG_TAKE_PROBLEM_EARLY(p, given) QG_TAKE_PROBLEM(p, given)
#endif
