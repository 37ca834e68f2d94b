// Validation of an expert index: the first fault and its offset.
// Faults are numbered like `ExpertFault` of qgemm-hal.
// One CTA checks the index while the others multiply.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "generated/abi.cuh"

QG_DEVICE u32 index_word(u64 base, u32 place) {
    return ld_global_u32(reinterpret_cast<const u8*>(base) + (u64)place * 4);
}

struct ExpertFaults {
    static constexpr u32 NONE = 0xffffffffu;
    // First faulty offsets in the index and in the router weights.
    u32 in_index, in_weights;

    QG_DEVICE u32 smaller(u32 a, u32 b) {
        return a < b ? a : b;
    }

    QG_DEVICE bool is_wrong(const ExpertGroups& g, u32 place) {
        const u32 own = index_word(g.index, place);
        if (g.form == QG_FORM_CONTIGUOUS) return own > g.rows || (place > 0 && own < index_word(g.index, place - 1));
        return g.form == QG_FORM_INDEXED ? own >= g.experts : own > g.rows;
    }

    // Checks every `threads`-th entry.
    QG_DEVICE ExpertFaults of_thread(const ExpertGroups& g, u32 thread, u32 threads) {
        const u32 places = (g.form == QG_FORM_INDEXED ? g.rows : g.experts) + (g.form == QG_FORM_CONTIGUOUS ? 1 : 0);
        ExpertFaults first = {NONE, NONE};
#pragma unroll 4
        for (u32 place = thread; place < places; place += threads) {
            if (is_wrong(g, place)) first.in_index = smaller(first.in_index, place);
            if (g.router_weights != 0 && (index_word(g.router_weights, place) & 0x7fffffffu) > 0x7f800000u)
                first.in_weights = smaller(first.in_weights, place);
        }
        return first;
    }

    // As `of_thread` for an index of one expert id per slot.
    // AT_ONCE loads are in flight: with a million slots, one load
    // at a time would be bound by latency.
    template <u32 AT_ONCE>
    QG_DEVICE ExpertFaults of_slots(const ExpertGroups& g, u32 thread, u32 threads) {
        const u32 experts = g.experts;
        ExpertFaults first = {NONE, NONE};
        first.in_index = first_wrong<AT_ONCE>(g.index, g.rows, thread, threads, [&](u32 id) { return id >= experts; });
        if (g.router_weights != 0)
            first.in_weights = first_wrong<AT_ONCE>(g.router_weights, g.rows, thread, threads,
                                                    [](u32 weight) { return (weight & 0x7fffffffu) > 0x7f800000u; });
        return first;
    }

    // First faulty entry among every `threads`-th of `places` words.
    template <u32 AT_ONCE, class IsWrong>
    QG_DEVICE u32 first_wrong(u64 words, u32 places, u32 thread, u32 threads, IsWrong is_wrong) {
        u32 first = NONE;
        for (u32 place = thread; place < places; place += threads * AT_ONCE) {
            u32 word[AT_ONCE];
            // Past the end, reload the first word of this iteration.
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                word[i] = index_word(words, place + i * threads < places ? place + i * threads : place);
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++)
                if (place + i * threads < places && is_wrong(word[i])) first = smaller(first, place + i * threads);
        }
        return first;
    }

    QG_DEVICE u32 warp_min(u32 value) {
#pragma unroll
        for (u32 mask = 16; mask > 0; mask /= 2) value = smaller(value, shfl_xor_u32(value, mask));
        return value;
    }

    QG_DEVICE void store(const ExpertGroups& g, const ExpertFaults& first) {
        const u32 of_index = g.form == QG_FORM_INDEXED  ? QG_FAULT_ID
                             : g.form == QG_FORM_MASKED ? QG_FAULT_COUNT
                                                        : QG_FAULT_OFFSET;
        u32 fault = 0, place = 0;
        if (first.in_index != NONE)
            fault = of_index, place = first.in_index;
        else if (first.in_weights != NONE)
            fault = QG_FAULT_ROUTER_WEIGHT, place = first.in_weights;
        u8* status = reinterpret_cast<u8*>(g.status);
        st_global_u32(status, fault);
        st_global_u32(status + 4, place);
    }
};

// Checks the index with THREADS threads, joined by `barrier`.
// `words` is shared memory, two words per warp.
// AT_ONCE above 1 keeps as many slot loads in flight.
// Does nothing without a status buffer.
template <u32 THREADS, u32 AT_ONCE = 1, class Barrier>
QG_DEVICE void store_faults(const ExpertGroups& g, u32* words, u32 thread, Barrier barrier) {
    if (g.status == 0) return;
    ExpertFaults first;
    if (AT_ONCE > 1 && g.form == QG_FORM_INDEXED)
        first = ExpertFaults::of_slots<AT_ONCE>(g, thread, THREADS);
    else
        first = ExpertFaults::of_thread(g, thread, THREADS);
    first.in_index = ExpertFaults::warp_min(first.in_index);
    first.in_weights = ExpertFaults::warp_min(first.in_weights);
    if (thread % 32 == 0) {
        st_shared(&words[thread / 32 * 2], first.in_index);
        st_shared(&words[thread / 32 * 2 + 1], first.in_weights);
    }
    barrier();
    if (thread != 0) return;
    for (u32 warp = 1; warp < THREADS / 32; warp++) {
        first.in_index = ExpertFaults::smaller(first.in_index, ld_shared(&words[warp * 2]));
        first.in_weights = ExpertFaults::smaller(first.in_weights, ld_shared(&words[warp * 2 + 1]));
    }
    ExpertFaults::store(g, first);
}
