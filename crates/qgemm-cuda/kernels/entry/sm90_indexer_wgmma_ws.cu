// Warp-specialized indexer scores for many queries on
// Hopper (FP8 WGMMA). Each consumer warpgroup holds 64
// keys in registers as rows. A producer thread copies the
// heads of one query after another by TMA, as columns;
// producer warps copy their weights. Weighted ReLU sums
// of a query overlap with the WGMMAs of the next.
#include "atoms/mbarrier.cuh"
#include "atoms/narrow_store.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma_batch.cuh"
#include "mainloop/indexer_queries.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/sm90/indexer_wgmma.cuh"

// Tensor maps must be 64-byte aligned.
struct alignas(64) HeadsMap {
    u64 word[16];
};

struct TmaIndexerParams {
    IndexerParams indexer;
    // Queries: [query][head][feature], boxes of QG_HEADS heads
    // and 128 features, 128-byte swizzle, zeros out of bounds.
    HeadsMap q_map;
};

constexpr u32 GROUP_KEYS = 64, KEYS = QG_CONSUMERS / 128 * GROUP_KEYS;
// Columns of a stage, and WGMMAs and queries in them.
constexpr u32 STAGE_COLUMNS = QG_STAGE_COLUMNS, GROUPS = STAGE_COLUMNS / COLUMNS, STAGE_QUERIES = STAGE_COLUMNS / QG_HEADS;
// A warp copies the weights of one part of a stage at a time.
constexpr u32 PART_COLUMNS = 128, PARTS = STAGE_COLUMNS / PART_COLUMNS, PART_QUERIES = STAGE_QUERIES / PARTS;
constexpr u32 HEAD_BYTES = QG_HEADS * FEATURES;
constexpr u32 MOST_QUERIES = QG_QUERIES;
using Registers = RegisterShares<32>;
static_assert(KEYS == GATHER_KEYS && KEYS * 32 == RECORD_KEYS * QG_CONSUMERS, "a record is of a warp's keys");
static_assert(QG_THREADS == QG_CONSUMERS + 128 && QG_THREADS >= MOST_QUERIES, "a warpgroup produces");

// Query of a stage: its visible keys, and the
// address of its scores. When gathering: its
// score bound and row of records instead.
struct alignas(16) StageQuery {
    u32 first, end;
#if QG_GATHERS
    float least;
    u32 row;
#else
    u64 scores;
#endif
};

// Column of scores that a thread stores, the scale
// of its key, and the key's position for visibility
// checks. The position is ~0 if the key has no page.
struct alignas(16) StoredKey {
    u32 column;
    float scale;
    u32 visible_as;

    // For a column of scores.
    QG_DEVICE StoredKey at(const IndexerParams& p, u32 sequence, u32 column) {
        StoredKey stored = {column, 0.0f, ~0u};
        if (column >= p.columns) return stored;
        const KeyAddress place = address_of_key(p, sequence_index(p, sequence), column * p.key_step);
        if (place.is_there) stored.scale = bits_to_f32(word_at(p.k_scales, place.scale)), stored.visible_as = column * p.key_step;
        return stored;
    }
};

struct SharedStorage {
    // Stages must be 1024-byte aligned:
    // TMA's swizzle depends on the address.
    alignas(16) u8 heads[QG_STAGES][STAGE_COLUMNS * FEATURES];
    float weights[QG_STAGES][STAGE_COLUMNS];
    StageQuery stage_queries[QG_STAGES][STAGE_QUERIES];
    SeenQueries<MOST_QUERIES> queries;
#if QG_GATHERS
    // Score bound of each query.
    float least[MOST_QUERIES];
#endif
    // Per consumer thread; in shared memory to save registers.
    StoredKey keys[QG_CONSUMERS];
    u64 full[QG_STAGES], empty[QG_STAGES];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
// All roles iterate over the same ceil(active / STAGE_QUERIES)
// stages; `note_queries` returned `active` to every thread.
// - `full` completes a phase after one arrival of the TMA thread,
// which announces all bytes of the stage, and PARTS * 32 arrivals
// of the lanes that stored weights. TMA's bytes must also have
// arrived; boxes always count in full, even out of bounds.
// - `empty` completes a phase when each consumer warp
// has arrived. The phase before the first counts as
// complete. A producer waits only for stages that
// consumers have received, so the roles cannot deadlock.
// - If `active` is 0, no role enters its loop. No role passes
// a CTA barrier after the roles diverge, so producers may exit
// early. Consumers wait for all copies that producers started.
constexpr u32 FILLING = 1 + PARTS * 32, EMPTYING = QG_CONSUMERS / 32;
// Warps that copy weights, taking parts in turn. With
// one warp, consumers would wait for its load latency.
constexpr u32 WEIGHT_WARPS = 3;

// Position in the ring of stages.
struct Position {
    u32 stage, parity;

    QG_DEVICE void next(Position& at) {
        if (++at.stage == QG_STAGES) at.stage = 0, at.parity ^= 1;
    }
};

// Work of a CTA.
struct Place {
    u32 key, sequence, first_query, count;
    // Index of the first query within the launch.
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

// Active query number `item`; clamped to the last one.
QG_DEVICE u32 query_at(const SharedStorage& shared, u32 item, u32 active) {
    return ld_shared(&shared.queries.seeing[least(item, active - 1)]);
}

// TMA producer thread of heads.
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

// Weights of a part of a stage: every 32nd column per lane.
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

// Producer warp of weights: parts `turn`,
// `turn` + WEIGHT_WARPS, and so on.
QG_DEVICE void produce_weights(SharedStorage& shared, const IndexerParams& p, const Place& place, u32 active, u32 turn, u32 lane) {
    const u32 parts = (active + STAGE_QUERIES - 1) / STAGE_QUERIES * PARTS;
    if (turn >= parts) return;
    LaneWeights next = LaneWeights::load(shared, p, place, turn * PART_QUERIES, active, lane);
    for (u32 part = turn; part < parts; part += WEIGHT_WARPS) {
        const LaneWeights own = next;
        const u32 ahead = part + WEIGHT_WARPS, at = part / PARTS % QG_STAGES, parity = part / PARTS / QG_STAGES % 2;
        // Prefetch while waiting for the stage.
        if (ahead < parts) next = LaneWeights::load(shared, p, place, ahead * PART_QUERIES, active, lane);
        mbarrier_wait(&shared.empty[at], parity ^ 1);
        float* const to = shared.weights[at] + part % PARTS * PART_COLUMNS;
#pragma unroll
        for (u32 i = 0; i < PART_COLUMNS / 32; i++) st_shared(to + i * 32 + lane, own.value[i]);
        if (lane < PART_QUERIES) {
            const u32 query = query_at(shared, part * PART_QUERIES + lane, active);
            const u64 launch_query = place.launch_query + query;
            StageQuery visible = {ld_shared(&shared.queries.first[query]), ld_shared(&shared.queries.end[query])};
#if QG_GATHERS
            visible.least = ld_shared(&shared.least[query]);
            visible.row = (u32)launch_query + 1;
            // Padding queries find nothing; their row is the dummy row 0.
            if (part * PART_QUERIES + lane >= active) visible.end = visible.row = 0;
#else
            visible.scores = p.scores + launch_query * p.scores_row * 4;
#endif
            st_shared(&shared.stage_queries[at][part % PARTS * PART_QUERIES + lane], visible);
        }
        mbarrier_arrive(&shared.full[at]);
    }
}

// Loads row 0 or 1 of a lane's key fragments.
QG_DEVICE void load_row(LaneKeys& keys, const IndexerParams& p, u32 sequence, u32 column, u32 row, u32 lane) {
    KeyAddress place = {0, 0, false};
    if (column < p.columns) place = address_of_key(p, sequence_index(p, sequence), column * p.key_step);
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
// Takes a spare chunk; chunk 0 if none is left.
QG_DEVICE u32 take_chunk(const IndexerParams& p, u32 lane) {
    u32 taken = 0;
    if (lane == 0) taken = atomic_add_relaxed(FoundHeader::taken_chunks(p), 1);
    taken = shfl_idx_u32(taken, 0);
    return taken < p.spare_chunks ? (taken + 1) * CHUNK : 0;
}
#endif

// Stores scores of queries `pair` * 2 and the next;
// `left` queries of the stage exist. When gathering,
// stores only candidates, from index `found` on.
QG_DEVICE void store_scores(SharedStorage& shared, const IndexerParams& p, u32 stage, u32 pair, u32 left, u32& found, u32 thread,
                            float of_first, float of_second) {
    const u32 lane = thread % 32, own = pair * 2 + lane / 2 % 2;
    const float sum = sum_of_lane(of_first, of_second, lane);
    // Loads come after the sum, one after another, to save registers.
    const StageQuery& of_query = shared.stage_queries[stage][own];
    const StoredKey& of_key = shared.keys[thread];
#if QG_GATHERS
    const float score = sum * ld_shared(&of_key.scale);
    const u32 visible_as = ld_shared(&of_key.visible_as);
    // Non-short-circuit `&`: branches would diverge the warp.
    const bool is_found = (visible_as >= ld_shared(&of_query.first)) & (visible_as < ld_shared(&of_query.end)) & is_reached(ld_shared(&of_query.least), score);
    const u32 lanes = ballot(is_found);
    u8* const to = found_score(p, found + popc(lanes & ((1u << lane) - 1)));
    if (is_found) st_global_u32(to, f32_to_bits(score));
    // Lanes of the warp's first key.
    if ((lane & ~2u) == 0) {
        const FoundRecord record = FoundRecord::of(found, lane / 2, lanes);
        st_global_v2(found_record(p, ld_shared(&of_query.row), ld_shared(&of_key.column)), {record.first_and_query, record.lanes});
    }
    found += popc(lanes);
#else
    const StageQuery query = ld_shared(&of_query);
    const StoredKey key = ld_shared(&of_key);
    const float score = sum * key.scale;
    const bool is_visible = key.visible_as >= query.first && key.visible_as < query.end;
    const u32 bits = is_visible ? score_bits(score) : p.masked_score;
    if (own < left && key.column < p.columns)
        st_global_u32(reinterpret_cast<u8*>(query.scores) + (u64)key.column * 4, bits);
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
    StoredKey stored = StoredKey::at(p, place.sequence, first_key + lane % 2 * 8);
    stored.scale *= row_factor(lane);
    st_shared(&shared.keys[thread], stored);

    Position at = {};
    u32 found = (1 + p.spare_chunks + cta_index().x * (QG_CONSUMERS / 32) + warp) * CHUNK;
    for (u32 left = active; left > 0; left -= least(left, STAGE_QUERIES)) {
        mbarrier_wait(&shared.full[at.stage], at.parity);
        const u64 columns = wgmma_descriptor_128b(shared.heads[at.stage]);
        constexpr u64 NEXT = COLUMNS * FEATURES >> 4;
        const float* weights = shared.weights[at.stage];
        // Two WGMMAs in flight: one computes while the other's
        // products are reduced. Otherwise all warpgroups would
        // alternate in lockstep between tensor cores and reduction.
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
                store_scores(shared, p, at.stage, pair, left, found, thread, of_first, of_second);
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
#if QG_GATHERS
        // Ensures space for everything that the next stage
        // may find. The ballot makes the branch uniform.
        if (ballot(found % CHUNK >= CHUNK - STAGE_QUERIES * RECORD_KEYS) != 0) found = take_chunk(p, lane);
#endif
    }
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
#if !QG_GATHERS
    if (FoundHeader::all_are_served(p)) return;
#endif
    const Place place = Place::of(p);
#if QG_GATHERS
    // The barriers in `note_queries` publish this.
    if (thread < place.count) st_shared(&shared.least[thread], QueryState::of(p, place.launch_query + thread).least);
#endif
    const u32 active = note_queries<QG_GATHERS>(p, shared.queries, place.sequence, place.first_query, place.count, place.key, KEYS, QG_THREADS);
    // The shuffle makes the role warp-uniform for the
    // compiler. Registers move between whole warpgroups.
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
