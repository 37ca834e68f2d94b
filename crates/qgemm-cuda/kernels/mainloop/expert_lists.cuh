// Expert lists: the slots of each expert, ascending. Each warp
// counts a range of slots, prefix sums give its offset in every
// list, and it scatters its slots. The order is deterministic.
#pragma once
#include "atoms/bits.cuh"
#include "atoms/launch.cuh"
#include "atoms/match.cuh"
#include "atoms/memory.cuh"
#include "atoms/shared_atomic.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "generated/abi.cuh"
#include "sched/lane_sums.cuh"

// Kernel parameter of routing kernels.
struct RoutingParams {
    RoutingShape shape;
    RoutingPointers at;
};

constexpr u32 NO_SLOT = ~0u;
// Id of a slot whose expert is not local: in no list, and no fault.
constexpr u32 ELSEWHERE = ~1u;
// Status codes.
constexpr u32 STATUS_BAD_ID = 1, STATUS_TOO_FEW = 2;

struct SlotRange {
    u32 first, last;

    QG_DEVICE SlotRange of_chunk(const RoutingParams& p, u32 chunk) {
        const u32 all = p.shape.tokens * p.shape.top_k, each = p.shape.chunk_tokens * p.shape.top_k;
        // The last chunk may exceed the tokens.
        const u32 first = chunk * each < all ? chunk * each : all;
        return {first, first + each < all ? first + each : all};
    }
    // Range of a warp: whole rows of 32 slots.
    QG_DEVICE SlotRange of_warp(const SlotRange& range, u32 warp, u32 warps) {
        const u32 each = ((range.last - range.first + warps - 1) / warps + 31) / 32 * 32;
        const u32 first = range.first + warp * each;
        return {first < range.last ? first : range.last, first + each < range.last ? first + each : range.last};
    }
};

// Shared memory of a CTA. `of_warps`: per warp and expert, a
// count that becomes the position of the warp's next slot.
// `offsets`: per expert, a count that becomes the offset of
// its list, then the end. `sums`, `bad`: one word per warp.
struct ListStorage {
    u32* of_warps;
    u32* offsets;
    u32* sums;
    u32* bad;

    QG_DEVICE ListStorage of(u8* shared, u32 experts, u32 warps) {
        u32* words = reinterpret_cast<u32*>(shared);
        u32* offsets = words + warps * experts;
        return {words, offsets, offsets + experts + 1, offsets + experts + 1 + 32};
    }
};

QG_DEVICE u8* word_at(u64 address, u64 index) {
    return reinterpret_cast<u8*>(address) + index * 4;
}

// Workspace: first bad slot of each chunk,
// counts of each chunk, total counts.
QG_DEVICE u8* chunk_bad(const RoutingParams& p, u32 chunk) {
    return word_at(p.at.workspace, chunk);
}
QG_DEVICE u8* chunk_count(const RoutingParams& p, u32 chunk, u32 expert) {
    return word_at(p.at.workspace, p.shape.chunks + (u64)chunk * p.shape.experts + expert);
}

// Index of the lowest set bit.
QG_DEVICE u32 lowest(u32 bits) {
    return popc(~bits & (bits - 1));
}

// Expert id of a slot; `experts` if out of range or invalid,
// one more if it is not local.
QG_DEVICE u32 load_id(const RoutingParams& p, u64 ids, const SlotRange& range, u32 slot) {
    if (slot >= range.last) return p.shape.experts;
    const u32 id = ld_global_u32(word_at(ids, slot));
    return id < p.shape.experts ? id : p.shape.experts + (id == ELSEWHERE);
}

// Rows of 32 slots that a warp loads at once, and warps
// whose counts a thread loads at once, to hide latency.
constexpr u32 ROWS_AT_ONCE = QG_ROWS_AT_ONCE;

// Expert ids of a lane in consecutive rows of slots.
struct SlotIds {
    u32 id[ROWS_AT_ONCE];

    QG_DEVICE SlotIds load(const RoutingParams& p, u64 ids, const SlotRange& range, u32 first) {
        SlotIds own;
#pragma unroll
        for (u32 i = 0; i < ROWS_AT_ONCE; i++) own.id[i] = load_id(p, ids, range, first + i * 32 + thread_index() % 32);
        return own;
    }
};

// Counts the slots of a warp's range; the first rows are
// already loaded. Returns the first slot without an expert.
QG_DEVICE u32 count_slots(const RoutingParams& p, u64 ids, const SlotRange& range, const SlotIds& first_rows, u32* counts) {
    const u32 lane = thread_index() % 32, experts = p.shape.experts;
    u32 first_bad = NO_SLOT;
    for (u32 rows = range.first; rows < range.last; rows += ROWS_AT_ONCE * 32) {
        const SlotIds own = rows == range.first ? first_rows : SlotIds::load(p, ids, range, rows);
#pragma unroll
        for (u32 i = 0; i < ROWS_AT_ONCE; i++) {
            const u32 first = rows + i * 32, id = own.id[i];
            const u32 bad = ballot(id == experts && first + lane < range.last);
            if (bad != 0 && first_bad == NO_SLOT) first_bad = first + lowest(bad);
            if (id < experts) reduce_add_shared(&counts[id], 1);
        }
    }
    warp_barrier();
    return first_bad;
}

// Scatters the slots of a warp's range to the lists; the
// first rows are already loaded. `places`: the warp's
// next position in each list, relative to `offsets`.
QG_DEVICE void scatter_slots(const RoutingParams& p, u64 ids, const SlotRange& range, const SlotIds& first_rows, u32* places,
                             const u32* offsets) {
    const u32 lane = thread_index() % 32, experts = p.shape.experts;
    for (u32 rows = range.first; rows < range.last; rows += ROWS_AT_ONCE * 32) {
        const SlotIds own = rows == range.first ? first_rows : SlotIds::load(p, ids, range, rows);
#pragma unroll
        for (u32 i = 0; i < ROWS_AT_ONCE; i++) {
            const u32 id = own.id[i];
            if (rows + i * 32 >= range.last) break;
            const u32 lanes = match_any(id), before = popc(lanes & ((1u << lane) - 1));
            // One atomic per expert: the first lane reserves
            // positions for all lanes with this expert.
            u32 place = 0;
            if (id < experts && before == 0) place = atomic_add_shared(&places[id], popc(lanes));
            place = shfl_idx_u32(place, lowest(lanes)) + before;
            if (id < experts) st_global_u32(word_at(p.at.rows, ld_shared(&offsets[id]) + place), rows + i * 32 + lane);
            // Later rows must get later positions.
            warp_barrier();
        }
    }
}

// Exclusive prefix sum of the counts;
// the total follows the last entry.
QG_DEVICE void counts_to_offsets(const ListStorage& storage, u32 experts) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, warps = cta_threads() / 32;
    const u32 rows = (experts + 31) / 32;
    for (u32 row = warp; row < rows; row += warps) {
        const u32 e = row * 32 + lane;
        const u32 count = e < experts ? ld_shared(&storage.offsets[e]) : 0;
        const u32 sum = sum_up_to_lane(count);
        if (e < experts) st_shared(&storage.offsets[e], sum - count);
        if (lane == 31) st_shared(&storage.sums[row], sum);
    }
    cta_barrier();
    if (warp == 0) {
        const u32 count = lane < rows ? ld_shared(&storage.sums[lane]) : 0;
        const u32 sum = sum_up_to_lane(count);
        if (lane < rows) st_shared(&storage.sums[lane], sum - count);
        if (lane == 31) st_shared(&storage.offsets[experts], sum);
    }
    cta_barrier();
    for (u32 e = thread_index(); e < experts; e += cta_threads())
        st_shared(&storage.offsets[e], ld_shared(&storage.offsets[e]) + ld_shared(&storage.sums[e / 32]));
    cta_barrier();
}

// Exclusive prefix sum of an expert's counts over warps,
// starting at `place`. Returns the end. Loads several
// counts before it overwrites them, to hide latency.
QG_DEVICE u32 counts_to_places(const ListStorage& storage, u32 experts, u32 expert, u32 place) {
    const u32 warps = cta_threads() / 32;
    for (u32 warp = 0; warp < warps; warp += ROWS_AT_ONCE) {
        u32 own[ROWS_AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < ROWS_AT_ONCE; i++)
            own[i] = warp + i < warps ? ld_shared(&storage.of_warps[(warp + i) * experts + expert]) : 0;
#pragma unroll
        for (u32 i = 0; i < ROWS_AT_ONCE; i++) {
            if (warp + i < warps) st_shared(&storage.of_warps[(warp + i) * experts + expert], place);
            place += own[i];
        }
    }
    return place;
}

QG_DEVICE void clear_counts(const ListStorage& storage, u32 experts) {
    for (u32 i = thread_index(); i < experts * (cta_threads() / 32); i += cta_threads())
        st_shared(&storage.of_warps[i], 0u);
    cta_barrier();
}

// Minimum over warps, for every thread.
QG_DEVICE u32 least_of_warps(const ListStorage& storage, u32 slot) {
    const u32 lane = thread_index() % 32;
    if (lane == 0) st_shared(&storage.bad[thread_index() / 32], slot);
    cta_barrier();
    slot = lane < cta_threads() / 32 ? ld_shared(&storage.bad[lane]) : NO_SLOT;
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
        const u32 other = shfl_xor_u32(slot, mask);
        slot = other < slot ? other : slot;
    }
    return slot;
}

// Writes the status; `slot` is the first
// without an expert. Call from one thread.
QG_DEVICE void store_status(const RoutingParams& p, u64 ids, u32 slot) {
    const bool is_bad = slot != NO_SLOT, is_given = p.shape.flags & QG_FLAG_GIVEN_IDS;
    u32 id = is_bad ? ~0u : 0;
    if (is_bad && is_given) id = ld_global_u32(word_at(ids, slot));
    st_global_u32(word_at(p.at.status, 0), is_bad ? (is_given ? STATUS_BAD_ID : STATUS_TOO_FEW) : 0);
    st_global_u32(word_at(p.at.status, 1), is_bad ? slot / p.shape.top_k : 0);
    st_global_u32(word_at(p.at.status, 2), is_bad ? slot % p.shape.top_k : 0);
    st_global_u32(word_at(p.at.status, 3), id);
}

// Fills unused entries behind the last list, within this CTA's range.
QG_DEVICE void fill_rest(const RoutingParams& p, const SlotRange& range, u32 listed) {
    const u32 first = range.first < listed ? listed : range.first;
    for (u32 place = first + thread_index(); place < range.last; place += cta_threads())
        st_global_u32(word_at(p.at.rows, place), ~0u);
}

// Stores the offsets and counts of all lists.
QG_DEVICE void store_offsets(const RoutingParams& p, const ListStorage& storage) {
    for (u32 e = thread_index(); e <= p.shape.experts; e += cta_threads()) {
        const u32 offset = ld_shared(&storage.offsets[e]);
        st_global_u32(word_at(p.at.offsets, e), offset);
        if (e < p.shape.experts)
            st_global_u32(word_at(p.at.counts, e), ld_shared(&storage.offsets[e + 1]) - offset);
    }
}

// Counts the slots of a chunk for later launches.
QG_DEVICE void count_chunk(const RoutingParams& p, u64 ids, u32 chunk, const ListStorage& storage) {
    const u32 experts = p.shape.experts, warp = thread_index() / 32, warps = cta_threads() / 32;
    const SlotRange range = SlotRange::of_warp(SlotRange::of_chunk(p, chunk), warp, warps);
    const SlotIds first_rows = SlotIds::load(p, ids, range, range.first);
    clear_counts(storage, experts);
    const u32 bad = least_of_warps(storage, count_slots(p, ids, range, first_rows, storage.of_warps + warp * experts));
    if (thread_index() == 0) st_global_u32(chunk_bad(p, chunk), bad);
    for (u32 e = thread_index(); e < experts; e += cta_threads()) {
        u32 count = 0;
        for (u32 other = 0; other < warps; other++) count += ld_shared(&storage.of_warps[other * experts + e]);
        st_global_u32(chunk_count(p, chunk, e), count);
    }
}

// Builds the lists in one launch. Several CTAs each count
// all slots and scatter the ranges of every ctas-th warp.
QG_DEVICE void make_lists(const RoutingParams& p, u64 ids, const ListStorage& storage) {
    const u32 experts = p.shape.experts, warp = thread_index() / 32, warps = cta_threads() / 32;
    const SlotRange all = {0, p.shape.tokens * p.shape.top_k};
    const SlotRange range = SlotRange::of_warp(all, warp, warps);
    const SlotIds first_rows = SlotIds::load(p, ids, range, range.first);
    clear_counts(storage, experts);
    const u32 bad = least_of_warps(storage, count_slots(p, ids, range, first_rows, storage.of_warps + warp * experts));
    const u32 cta = cta_index().x, ctas = grid_ctas().x;
    if (cta == 0 && thread_index() == 0) store_status(p, ids, bad);
    for (u32 e = thread_index(); e < experts; e += cta_threads()) {
        st_shared(&storage.offsets[e], counts_to_places(storage, experts, e, 0));
    }
    cta_barrier();
    counts_to_offsets(storage, experts);
    if (cta == 0) store_offsets(p, storage);
    if (ctas == 1 || warp % ctas == cta) scatter_slots(p, ids, range, first_rows, storage.of_warps + warp * experts, storage.offsets);
    if (cta == 0) fill_rest(p, all, ld_shared(&storage.offsets[experts]));
}
