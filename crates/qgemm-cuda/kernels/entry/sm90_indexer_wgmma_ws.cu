// Scores of E4M3 keys for queries of several heads on Hopper, warp-specialized. Consumer warpgroups keep 64 keys each in registers, as rows
// of `wgmma`; a producer thread copies the heads of one query after another by TMA, as columns in shared memory, and producer warps what
// they are weighed with. What a query's products become is added up over the columns while the tensor cores compute the next.
#include "atoms/mbarrier.cuh"
#include "atoms/narrow_store.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma_batch.cuh"
#include "mainloop/indexer_queries.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/sm90/indexer_wgmma.cuh"

// Tensor maps lie at multiples of 64 bytes.
struct alignas(64) HeadsMap {
    u64 word[16];
};

struct TmaIndexerParams {
    IndexerParams indexer;
    // Queries: [query][head][feature], boxes of QG_HEADS heads of a query and 128 features, 128-byte swizzle, zeros outside.
    HeadsMap q_map;
};

constexpr u32 GROUP_KEYS = 64, KEYS = QG_CONSUMERS / 128 * GROUP_KEYS;
// Columns of a stage: of so many groups of instructions.
constexpr u32 STAGE_COLUMNS = QG_STAGE_COLUMNS, GROUPS = STAGE_COLUMNS / COLUMNS, STAGE_QUERIES = STAGE_COLUMNS / QG_HEADS;
// A warp copies the weights of a part of a stage at a time.
constexpr u32 PART_COLUMNS = 128, PARTS = STAGE_COLUMNS / PART_COLUMNS, PART_QUERIES = STAGE_QUERIES / PARTS;
constexpr u32 HEAD_BYTES = QG_HEADS * FEATURES;
constexpr u32 MOST_QUERIES = QG_QUERIES;
using Registers = RegisterShares<32>;
static_assert((KEYS & (KEYS - 1)) == 0, "a key's place in the CTA is some bits of its number");
static_assert(QG_THREADS == QG_CONSUMERS + 128 && QG_THREADS >= MOST_QUERIES, "a warpgroup produces");

// A query of a stage: which keys it sees, and where its scores are, or where keys are gathered the score of its note.
struct alignas(16) StageQuery {
    u32 first, end;
    u64 scores_or_bound;
};

// The column of scores that a thread has, the scale of its key, and what it is compared with what queries see as: a key of no page is seen by
// none. Beside it, how many queries see keys of the CTA.
struct alignas(16) StoredKey {
    u32 column;
    float scale;
    u32 seen_as, active;

    // Of column `column` of scores.
    QG_DEVICE StoredKey at(const IndexerParams& p, u32 sequence, u32 column, u32 active) {
        StoredKey stored = {column, 0.0f, ~0u, active};
        if (column >= p.columns) return stored;
        const KeyPlace place = place_of_key(p, sequence_index(p, sequence), column * p.key_step);
        if (place.is_there) stored.scale = bits_to_f32(word_at(p.k_scales, place.scale)), stored.seen_as = column * p.key_step;
        return stored;
    }
};

// A key that reaches the bound of a query: its score, and the query's place among those that see keys of the CTA above the key's place in the
// CTA.
struct alignas(8) FoundKey {
    float score;
    u32 query_and_key;
};
// Keys that a warp has found and not yet written: two halves, of which one is written when the other is begun.
constexpr u32 FOUND_HALF = 32, FOUND_ROOM = 2 * FOUND_HALF;

struct SharedStorage {
    // TMA's swizzle depends on the address: stages begin at multiples of 1024 bytes.
    alignas(16) u8 heads[QG_STAGES][STAGE_COLUMNS * FEATURES];
    float weights[QG_STAGES][STAGE_COLUMNS];
    StageQuery stage_queries[QG_STAGES][STAGE_QUERIES];
    SeenQueries<MOST_QUERIES> queries;
    // Of each consumer, in shared memory for want of registers.
    StoredKey keys[QG_CONSUMERS];
    FoundKey found[QG_GATHERS ? QG_CONSUMERS / 32 : 1][QG_GATHERS ? FOUND_ROOM : 2];
    u64 full[QG_STAGES], empty[QG_STAGES];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
// All roles go through the same stages: ceil(active / STAGE_QUERIES) of them, where `active` is what `note_queries` returned to every thread.
// - `full` completes a phase when the thread that copies heads has announced all bytes of the stage (1), each lane of the warps whose turn it
//   is to copy weights of a part has stored its own (PARTS * 32), and TMA has brought the bytes: boxes are whole whatever lies outside of the
//   tensor, so they are always as many.
// - `empty` completes a phase when each consumer warp has arrived once (QG_CONSUMERS / 32). Producers wait for the phase before the first
//   one, which counts as complete, and then for one that consumers complete of a stage that they have got: neither waits for the other's next.
// - Where `active` is 0, no role enters its loop. Nobody passes a CTA barrier after the roles part, so that producers may end first; the
//   copies that they began complete on barriers that consumers wait for before they end.
constexpr u32 FILLING = 1 + PARTS * 32, EMPTYING = QG_CONSUMERS / 32;
// Warps that copy weights, a part of a stage each in turn. A single one waited for its loads longer than consumers take for a stage, which waited
// for it a third of their time (2048 queries of 64 heads, 16384 keys on an H200).
constexpr u32 WEIGHT_WARPS = 3;

// A position in the ring of stages.
struct Position {
    u32 stage, parity;

    QG_DEVICE void next(Position& at) {
        if (++at.stage == QG_STAGES) at.stage = 0, at.parity ^= 1;
    }
};

// Where a CTA stands.
struct Place {
    u32 key, sequence, first_query, count;
    // The first query among those of the launch.
    u64 launch_query;

    QG_DEVICE Place of(const IndexerParams& p) {
        Place at;
        at.key = cta_index().x % p.key_ctas * KEYS;
        const u32 query_cta = cta_index().x / p.key_ctas;
        at.sequence = query_cta / p.query_ctas;
        at.first_query = query_cta % p.query_ctas * p.cta_queries;
        at.count = least(p.cta_queries, p.sequence_queries - at.first_query);
        at.launch_query = (u64)at.sequence * p.sequence_queries + at.first_query;
        return at;
    }
};

// The query at place `item` of those that see keys of the CTA, the last one in the place of those behind it.
QG_DEVICE u32 query_at(const SharedStorage& shared, u32 item, u32 active) {
    return ld_shared(&shared.queries.seeing[least(item, active - 1)]);
}

// The work of the thread that copies heads.
QG_DEVICE void produce_heads(SharedStorage& shared, const TmaIndexerParams& params, const Place& place, u32 active) {
    Position at = {};
    for (u32 item = 0; item < active; item += STAGE_QUERIES) {
        mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
        mbarrier_arrive_expect_tx(&shared.full[at.stage], STAGE_COLUMNS * FEATURES);
#pragma unroll
        for (u32 i = 0; i < STAGE_QUERIES; i++) {
            const u64 query = params.indexer.first_query + place.launch_query + query_at(shared, item + i, active);
            cp_async_bulk_tensor_3d(shared.heads[at.stage] + i * HEAD_BYTES, &params.q_map, 0, 0, (i32)query,
                                    &shared.full[at.stage]);
        }
        Position::next(at);
    }
}

// What a lane of the warp that copies weights has of a part of a stage: of every 32nd column.
struct LaneWeights {
    float value[PART_COLUMNS / 32];

    QG_DEVICE LaneWeights load(const SharedStorage& shared, const IndexerParams& p, const Place& place, u32 item, u32 active,
                               u32 lane) {
        LaneWeights weights;
#pragma unroll
        for (u32 i = 0; i < PART_COLUMNS / 32; i++) {
            const u32 column = i * 32 + lane, head = column % QG_HEADS;
            const u64 query = p.first_query + place.launch_query + query_at(shared, item + column / QG_HEADS, active);
            weights.value[i] = 0.0f;
            if (head >= p.heads) continue;
            weights.value[i] = bits_to_f32(word_at(p.weights, query * p.weights_row + head));
            if (p.q_scales) weights.value[i] *= bits_to_f32(word_at(p.q_scales, query * p.heads + head));
        }
        return weights;
    }
};

// The work of the warp that copies weights of parts `turn`, `turn` + WEIGHT_WARPS and so on.
QG_DEVICE void produce_weights(SharedStorage& shared, const IndexerParams& p, const Place& place, u32 active, u32 turn, u32 lane) {
    const u32 parts = (active + STAGE_QUERIES - 1) / STAGE_QUERIES * PARTS;
    if (turn >= parts) return;
    LaneWeights next = LaneWeights::load(shared, p, place, turn * PART_QUERIES, active, lane);
    for (u32 part = turn; part < parts; part += WEIGHT_WARPS) {
        const LaneWeights own = next;
        const u32 ahead = part + WEIGHT_WARPS, at = part / PARTS % QG_STAGES, parity = part / PARTS / QG_STAGES % 2;
        // In flight while this warp waits.
        if (ahead < parts) next = LaneWeights::load(shared, p, place, ahead * PART_QUERIES, active, lane);
        mbarrier_wait(&shared.empty[at], parity ^ 1);
        float* const to = shared.weights[at] + part % PARTS * PART_COLUMNS;
#pragma unroll
        for (u32 i = 0; i < PART_COLUMNS / 32; i++) st_shared(to + i * 32 + lane, own.value[i]);
        if (lane < PART_QUERIES) {
            const u32 query = query_at(shared, part * PART_QUERIES + lane, active);
            const u64 launch_query = place.launch_query + query;
            StageQuery seen = {ld_shared(&shared.queries.first[query]), ld_shared(&shared.queries.end[query]), 0};
#if QG_GATHERS
            seen.scores_or_bound = f32_to_bits(QueryNote::of(p, launch_query).least);
            // Nothing is found for those behind the last.
            if (part * PART_QUERIES + lane >= active) seen.end = 0;
#else
            seen.scores_or_bound = p.scores + launch_query * p.scores_row * 4;
#endif
            st_shared(&shared.stage_queries[at][part % PARTS * PART_QUERIES + lane], seen);
        }
        mbarrier_arrive(&shared.full[at]);
    }
}

// A row of a lane's keys: the first or the second one.
QG_DEVICE void load_row(LaneKeys& keys, const IndexerParams& p, u32 sequence, u32 column, u32 row, u32 lane) {
    KeyPlace place = {0, 0, false};
    if (column < p.columns) place = place_of_key(p, sequence_index(p, sequence), column * p.key_step);
    const u8* from = reinterpret_cast<const u8*>(p.k) + place.row;
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 feature = step * 32 + half * 16 + lane % 4 * 4;
            keys.a[step][half * 2 + row] = place.is_there && feature < p.features ? ld_global_u32(from + feature) : 0;
        }
    }
}

#if QG_GATHERS
// Writes the first `count` keys of a half of what a warp has found.
QG_DEVICE void write_found(const SharedStorage& shared, const IndexerParams& p, const Place& place, const FoundKey* half, u32 count) {
    const u32 lane = thread_index() % 32;
    warp_barrier();
    if (lane >= count) return;
    const FoundKey found = ld_shared(half + lane);
    const u64 query = place.launch_query + ld_shared(&shared.queries.seeing[found.query_and_key / KEYS]);
    const u32 at = atomic_add_relaxed(reinterpret_cast<u32*>(QueryNote::place(p, query) + QG_OFFSET_OF(QueryNote, count)), 1);
    if (at < p.gathered)
        st_global_v2(gathered_keys(p, query) + (u64)at * 8, {f32_to_bits(found.score), place.key + found.query_and_key % KEYS});
}
#endif

// Stores scores of two queries of a stage, of query `pair` * 2 or the next, or takes in keys that reach their bounds, if there are so many
// queries from `item` on. `taken` counts the keys that the warp has taken in.
QG_DEVICE void store_scores(SharedStorage& shared, const IndexerParams& p, const Place& place, u32 stage, u32 pair, u32 item, u32& taken,
                            u32 thread, float of_first, float of_second) {
    const u32 lane = thread % 32, own = pair * 2 + lane / 2 % 2;
    const float sum = sum_of_lane(of_first, of_second, lane);
    // Behind the sum: registers are scarce.
    const StageQuery query = ld_shared(&shared.stage_queries[stage][own]);
    const StoredKey key = ld_shared(&shared.keys[thread]);
    const float score = sum * key.scale;
    const bool is_seen = key.seen_as >= query.first && key.seen_as < query.end;
#if QG_GATHERS
    FoundKey* const of_warp = shared.found[thread / 32];
    const bool is_found = is_seen && is_reached(bits_to_f32((u32)query.scores_or_bound), score);
    const u32 mask = ballot(is_found), at = taken + popc(mask & ((1u << lane) - 1));
    if (is_found) st_shared(of_warp + at % FOUND_ROOM, FoundKey{score, (item + own) * KEYS + key.column % KEYS});
    const u32 before = taken / FOUND_HALF;
    taken += popc(mask);
    if (taken / FOUND_HALF != before) write_found(shared, p, place, of_warp + before % 2 * FOUND_HALF, FOUND_HALF);
#else
    const u32 bits = is_seen ? score_bits(score) : p.not_seen;
    if (item + own < key.active && key.column < p.columns)
        st_global_u32(reinterpret_cast<u8*>(query.scores_or_bound) + (u64)key.column * 4, bits);
#endif
}

QG_DEVICE void consume(SharedStorage& shared, const IndexerParams& p, const Place& place, u32 active, u32 thread) {
    const u32 lane = thread % 32, warp = thread / 32;
    const u32 first_key = place.key + warp * 16 + lane / 4;
    LaneKeys keys;
#pragma unroll
    for (u32 row = 0; row < 2; row++) load_row(keys, p, place.sequence, first_key + row * 8, row, lane);
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) wgmma_fence_operand(keys.a[step]);
    StoredKey stored = StoredKey::at(p, place.sequence, first_key + lane % 2 * 8, active);
    stored.scale *= row_factor(lane);
    st_shared(&shared.keys[thread], stored);

    Position at = {};
    u32 taken = 0;
    for (u32 item = 0; item < active; item += STAGE_QUERIES) {
        mbarrier_wait(&shared.full[at.stage], at.parity);
        const u64 columns = wgmma_descriptor_128b(shared.heads[at.stage]);
        constexpr u64 NEXT = COLUMNS * FEATURES >> 4;
        const float* weights = shared.weights[at.stage];
        // The tensor cores compute one while the other's products are added up. Without that all warpgroups wait for them at the same time,
        // and then they for all warpgroups.
        float d[2][ACCUMULATORS];
        wgmma_fence_accumulators(d[0]);
        wgmma_fence_accumulators(d[1]);
        wgmma_fence();
        multiply(d[0], keys, columns);
        multiply(d[1], keys, columns + NEXT);
        float before = 0.0f;
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            float(&own)[ACCUMULATORS] = d[group % 2];
            if (group + 1 < GROUPS)
                wgmma_wait_group<1>();
            else
                wgmma_wait_group<0>();
            wgmma_fence_accumulators(own);
            const Sums sums = Sums::of(own, weights + group * COLUMNS, lane);
            if (group + 2 < GROUPS) {
                wgmma_fence_accumulators(own);
                wgmma_fence();
                multiply(own, keys, columns + (group + 2) * NEXT);
            }
            const auto store = [&](float of_first, float of_second, u32 pair) {
                store_scores(shared, p, place, at.stage, pair, item, taken, thread, of_first, of_second);
            };
            const float of_first = sum_of_row(sums.value[0], lane);
            if constexpr (COLUMN_QUERIES == 2)
                store(of_first, sum_of_row(sums.value[COLUMN_QUERIES - 1], lane), group);
            else if (group % 2 == 1)
                store(before, of_first, group / 2);
            before = of_first;
        }
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&shared.empty[at.stage]);
        Position::next(at);
    }
#if QG_GATHERS
    write_found(shared, p, place, shared.found[warp] + taken / FOUND_HALF % 2 * FOUND_HALF, taken % FOUND_HALF);
#endif
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_indexer_wgmma_ws(const __grid_constant__ TmaIndexerParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const IndexerParams& p = params.indexer;
    const u32 thread = thread_index();
    if (thread == 0) {
#pragma unroll
        for (u32 i = 0; i < QG_STAGES; i++) {
            mbarrier_init(&shared.full[i], FILLING);
            mbarrier_init(&shared.empty[i], EMPTYING);
        }
        fence_mbarrier_init();
    }
    cta_barrier();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Place place = Place::of(p);
    const u32 active = note_queries<QG_GATHERS>(p, shared.queries, place.sequence, place.first_query, place.count, place.key, KEYS, QG_THREADS);
    // The shuffle tells the compiler that the role is the same for the whole warp. Registers pass between whole warpgroups.
    if (shfl_idx_u32(thread / QG_CONSUMERS, 0) == 0) {
        Registers::take();
        consume(shared, p, place, active, thread);
    } else {
        Registers::give();
        if (thread == QG_CONSUMERS) produce_heads(shared, params, place, active);
        const u32 producer_warp = thread / 32 - QG_CONSUMERS / 32;
        if (producer_warp > 0) produce_weights(shared, p, place, active, producer_warp - 1, thread % 32);
    }
}
