// MMA attention for many queries. A CTA has
// QG_ROWS queries of a head; scores, softmax state
// and accumulators stay in registers of a warp.
// The next K tile and the current V tile are
// loaded meanwhile: with cp.async on Ampere, to
// shared memory on Turing, to registers on Volta.
#include "atoms/cp_async.cuh"
#include "mainloop/attention_finish.cuh"
#include "mainloop/attention_tile_bits.cuh"
#if QG_VARIANT >= 75
#include "mainloop/attention_m16n8.cuh"
#else
#include "mainloop/sm70/attention_m8n8k4.cuh"
#endif

constexpr u32 WARPS = QG_THREADS / 32;
static_assert(WARPS * WARP_ROWS == QG_ROWS, "each warp has its queries");
// Words with one bit per key of a tile,
// and the unused bits of the last word.
constexpr u32 PRESENT_WORDS = (QG_KEYS + 31) / 32, NO_KEYS = QG_KEYS < 32 ? ~0u << QG_KEYS % 32 : 0;

struct SharedStorage {
    u8 q[QG_ROWS * QK_PITCH];
#if QG_VARIANT >= 75
    u8 k[QG_KEYS * QK_PITCH];
    u8 v[QG_KEYS * V_PITCH];
#else
    // K and V share memory; each waits in registers until
    // the other has been read. Two CTAs fit on an SM.
    union {
        u8 k[QG_KEYS * QK_PITCH];
        u8 v[QG_KEYS * V_PITCH];
    };
#endif
    // Bits of keys that have a page.
    u32 present[2];
    // Whether a value row has infinities or NaN.
    u32 not_finite[QG_KEYS];
#if QG_BITS
    TileBits<QG_ROWS> tiles;
#endif
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

QG_DEVICE bool is_finite(u32 half) {
    constexpr u32 EXPONENT = QG_KV == DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    return (half & EXPONENT) != EXPONENT;
}

// Copies 16 bytes from global to shared memory, or zeros.
QG_DEVICE void copy_16(bool wanted, u8* to, const u8* from) {
#if QG_VARIANT >= 80
    cp_async_16_or_zeros(wanted, shared_address(to), from);
#else
    u32x4 v = {0, 0, 0, 0};
    if (wanted) v = ld_global_v4(from);
    st_shared(reinterpret_cast<u32x4*>(to), v);
#endif
}

// Closes the group of copies since the last commit.
QG_DEVICE void commit_copies() {
#if QG_VARIANT >= 80
    cp_async_commit_group();
#endif
}

// Waits for all copies of the CTA. The barrier also
// ensures that all reads of the previous tile are done.
QG_DEVICE void wait_for_copies() {
#if QG_VARIANT >= 80
    cp_async_wait_group<0>();
#endif
    cta_barrier();
}

// Copy of a K or V tile to shared memory.
// [QG_KEYS][COLUMNS], PITCH bytes a row
template <u32 COLUMNS, u32 PITCH>
struct TileCopy {
    static constexpr u32 CHUNKS = COLUMNS / 8;
#if QG_VARIANT < 75
    static constexpr u32 COUNT = QG_KEYS * CHUNKS / QG_THREADS;
    static_assert(QG_KEYS * CHUNKS % QG_THREADS == 0, "threads copy as many chunks each");
    u32x4 staged[COUNT];
#endif

    // Starts the copy of the tile at key `tile`. Keys outside
    // `keys` and features beyond `columns` become zeros.
    QG_DEVICE void begin(TileCopy& copy, const AttentionParams& p, const Sequence& s, const u8* base, u64 page_stride,
                         u64 token_stride, u32 columns, u32 tile, const KeyRange& keys, u8* to) {
#pragma unroll
        for (u32 i = 0; i < QG_KEYS * CHUNKS; i += QG_THREADS) {
            const u32 chunk = i + thread_index();
            if (QG_KEYS * CHUNKS % QG_THREADS != 0 && chunk >= QG_KEYS * CHUNKS) break;
            const u32 row = chunk / CHUNKS, column = chunk % CHUNKS * 8, key = tile + row;
            bool wanted = key >= keys.first && key < keys.end && column < columns;
            const u8* from = base;
            if (wanted) {
                const KeyAddress at = address_of_key(p, s, key);
                wanted = at.is_present;
                if (wanted) from += (at.page * page_stride + at.row * token_stride + column) * 2;
            }
#if QG_VARIANT >= 75
            copy_16(wanted, to + row * PITCH + column * 2, from);
#else
            copy.staged[i / QG_THREADS] = {0, 0, 0, 0};
            if (wanted) copy.staged[i / QG_THREADS] = ld_global_v4(from);
#endif
        }
        commit_copies();
    }

    // Completes the copy; `wait_for_copies` makes it visible.
    // All reads of the previous contents must be done.
    QG_DEVICE void end(const TileCopy& copy, u8* to) {
#if QG_VARIANT < 75
        cta_barrier();
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const u32 chunk = i * QG_THREADS + thread_index();
            st_shared(reinterpret_cast<u32x4*>(to + chunk / CHUNKS * PITCH + chunk % CHUNKS * 16), copy.staged[i]);
        }
#endif
    }
};

// Stores the bits of keys that have a page.
QG_DEVICE void find_present_keys(const AttentionParams& p, const Sequence& s, u32 tile, const KeyRange& keys,
                          SharedStorage& shared) {
    if (p.shape.table_width == 0 || thread_index() / 32 >= PRESENT_WORDS) return;
    const u32 key = tile + thread_index();
    const bool is_visible = key >= keys.first && key < keys.end;
    const u32 present = ballot(is_visible && address_of_key(p, s, key).is_present);
    if (thread_index() % 32 == 0) st_shared(&shared.present[thread_index() / 32], present);
}

#if QG_VARIANT < 75
// Visible keys of the lane's rows, recomputed on use to
// save registers. Only mixed tiles, which are few, use it.
struct VisibleKeys {
    const AttentionParams& p;
    const Sequence& s;
    u32 first_query, own_row, last_query;

    __device__ __forceinline__ KeyRange operator[](u32 row) const {
        return visible_keys(p, s, least(first_query + own_row + Fragments::rows_below(row), last_query));
    }
};
#endif

// Replaces infinities and NaN in V by zeros
// and records their keys. A masked value must
// not reach a query through 0 · inf = NaN.
QG_DEVICE void zero_not_finite(SharedStorage& shared) {
    const u32 lane = thread_index() % 32;
    for (u32 key = thread_index() / 32; key < QG_KEYS; key += WARPS) {
        bool found = false;
        if (lane < QG_V / 8) {
            u32x4* at = reinterpret_cast<u32x4*>(shared.v + key * V_PITCH + lane * 16);
            const u32x4 v = ld_shared(at);
            u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (!is_finite(words[i])) words[i] &= 0xffff0000u, found = true;
                if (!is_finite(words[i] >> 16)) words[i] &= 0xffffu, found = true;
            }
            if (found) st_shared(at, {words[0], words[1], words[2], words[3]});
        }
        const u32 any = ballot(found);
        if (lane == 0) st_shared(&shared.not_finite[key], any);
    }
}

// Occupancy bound where ptxas would
// otherwise aim for one more CTA per SM and
// spill (`kernels.lock` shows no spills).
#if QG_CTAS_PER_SM
#define QG_BOUNDS __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
#else
#define QG_BOUNDS __launch_bounds__(QG_THREADS)
#endif

extern "C" __global__ void QG_BOUNDS
    qg_attention_mma(const __grid_constant__ KernelParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    // The last queries of a causal sequence
    // attend to the most keys: they begin first.
    u32 cta = cta_index().x;
    const u32 head = cta % p.shape.heads;
    cta /= p.shape.heads;
    const u32 row_cta = p.at.row_ctas - 1 - cta % p.at.row_ctas;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Sequence s = sequence_of(p, cta / p.at.row_ctas);
    const u32 first_query = row_cta * QG_ROWS;
    if (first_query >= s.queries) return;
    const u32 last_query = least(first_query + QG_ROWS, s.queries) - 1;
    const u32 kv_head = head / (p.shape.heads / p.shape.kv_heads);
    const KeyRange keys = visible_keys_of(p, s, first_query, last_query);
    const KeyRange visible_to_all = {visible_keys(p, s, last_query).first, visible_keys(p, s, first_query).end};
    const u8* k_base = reinterpret_cast<const u8*>(p.at.k) + kv_head * p.at.k_head * 2;
    const u8* v_base = reinterpret_cast<const u8*>(p.at.v) + kv_head * p.at.v_head * 2;
#if QG_BITS
    const MaskedRows mask_rows = {s, head, first_query, last_query, keys.end};
#endif
    using KeyCopy = TileCopy<QG_QK, QK_PITCH>;
    using ValueCopy = TileCopy<QG_V, V_PITCH>;
    KeyCopy key_copy;
    ValueCopy value_copy;
    const auto copy_keys = [&](u32 tile) {
#if QG_BITS
        TileBits<QG_ROWS>::store_row_bits(shared.tiles, p, mask_rows, tile);
#endif
        find_present_keys(p, s, tile, keys, shared);
        KeyCopy::begin(key_copy, p, s, k_base, p.at.k_page, p.at.k_token, p.shape.qk_dim, tile, keys, shared.k);
    };

    {
        constexpr u32 CHUNKS = QG_QK / 8;
        const u8* q_base = reinterpret_cast<const u8*>(p.at.q) + (s.token * p.at.q_token + head * p.at.q_head) * 2;
        for (u32 chunk = thread_index(); chunk < QG_ROWS * CHUNKS; chunk += QG_THREADS) {
            const u32 row = chunk / CHUNKS, column = chunk % CHUNKS * 8, query = first_query + row;
            const bool wanted = query <= last_query && column < p.shape.qk_dim;
            const u64 element = wanted ? query * p.at.q_token + column : 0;
            copy_16(wanted, shared.q + row * QK_PITCH + column * 2, q_base + element * 2);
        }
        // A separate group: without keys, no later commit would
        // include it, and uncommitted copies are not waited for.
        commit_copies();
    }
    // Queries of this lane. Rows beyond
    // the last repeat the last query.
    const u32 own_row = warp * WARP_ROWS + Fragments::first_row(lane);
#if QG_VARIANT >= 75
    KeyRange visible[LANE_ROWS];
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++)
        visible[row] = visible_keys(p, s, least(first_query + own_row + Fragments::rows_below(row), last_query));
#else
    const VisibleKeys visible = {p, s, first_query, own_row, last_query};
#endif
    float sums[ROW_TILES * FEATURE_TILES][TILE_SUMS] = {};
    float row_max[LANE_ROWS], row_sum[LANE_ROWS] = {};
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++) row_max[row] = minus_infinity();
    const float factor = key_factor(p, kv_head);

    Operands operands;
    Operands::find(operands, shared.q, shared.k, shared.v, warp, lane);
    u32 tile = keys.first / QG_KEYS * QG_KEYS, next;
#if QG_BITS
    tile = TileBits<QG_ROWS>::next(shared.tiles, p, mask_rows, tile, true);
    if (tile < keys.end) copy_keys(tile);
#else
    if (keys.first < keys.end) copy_keys(tile);
#endif
    for (; tile < keys.end; tile = next) {
        KeyCopy::end(key_copy, shared.k);
        wait_for_copies();
        ValueCopy::begin(value_copy, p, s, v_base, p.at.v_page, p.at.v_token, p.shape.v_dim, tile, keys, shared.v);

        float scores[ROW_TILES * KEY_TILES][TILE_SUMS] = {};
        multiply_keys(scores, operands);

#if QG_BITS
        bool all_visible = TileBits<QG_ROWS>::is_full(shared.tiles, tile);
#else
        bool all_visible = tile >= visible_to_all.first && tile + QG_KEYS <= visible_to_all.end;
#endif
        u32 present[2] = {~0u, ~0u};
        if (p.shape.table_width != 0) {
#pragma unroll
            for (u32 i = 0; i < PRESENT_WORDS; i++) {
                present[i] = ld_shared(&shared.present[i]);
                all_visible = all_visible && (present[i] | NO_KEYS) == ~0u;
            }
        }
#if QG_BITS
        u32 bits[LANE_ROWS][QG_KEYS / WORD_KEYS];
#pragma unroll
        for (u32 i = 0; i < LANE_ROWS * QG_KEYS / WORD_KEYS; i++) {
            const u32 row = own_row + Fragments::rows_below(i % LANE_ROWS), word = i / LANE_ROWS;
            bits[i % LANE_ROWS][word] = ld_shared(&shared.tiles.of_row[row][word]) & present[word];
        }
#endif
        float next_max[LANE_ROWS] = {row_max[0], row_max[1]};
#pragma unroll
        for (u32 row = 2; row < LANE_ROWS; row++) next_max[row] = row_max[row];
#pragma unroll
        for (u32 n = 0; n < ROW_TILES * KEY_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < TILE_SUMS; i++) {
                float& score = scores[n][i];
                const u32 row = Fragments::row_of<KEY_TILES>(n, i);
                score = bounded(p, score * factor);
#if QG_BITS
                const u32 column = Fragments::key_of(n, i, lane);
                if (!(bits[row][Fragments::first_key(n) / WORD_KEYS] >> column % WORD_KEYS & 1u)) score = minus_infinity();
#else
                if (!all_visible) {
                    const u32 column = Fragments::key_of(n, i, lane), key = tile + column;
                    const bool is_visible = key >= visible[row].first && key < visible[row].end;
                    if (!is_visible || !(present[column / 32] >> column % 32 & 1u)) score = minus_infinity();
                }
#endif
                next_max[row] = score > next_max[row] ? score : next_max[row];
            }
        }
        float rescale[LANE_ROWS], base[LANE_ROWS];
#pragma unroll
        for (u32 row = 0; row < LANE_ROWS; row++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const float other = shfl_xor(next_max[row], Fragments::SAME_ROWS[i]);
                next_max[row] = other > next_max[row] ? other : next_max[row];
            }
            // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
            base[row] = next_max[row] == minus_infinity() ? 0.0f : next_max[row];
            rescale[row] = ex2_approx(row_max[row] - base[row]);
            row_max[row] = next_max[row];
            row_sum[row] *= rescale[row];
        }
#pragma unroll
        for (u32 n = 0; n < ROW_TILES * KEY_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < TILE_SUMS; i++) {
                const u32 row = Fragments::row_of<KEY_TILES>(n, i);
                scores[n][i] = ex2_approx(scores[n][i] - base[row]);
                row_sum[row] += scores[n][i];
            }
        }
#pragma unroll
        for (u32 n = 0; n < ROW_TILES * FEATURE_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < TILE_SUMS; i++) sums[n][i] *= rescale[Fragments::row_of<FEATURE_TILES>(n, i)];
        }

        ValueCopy::end(value_copy, shared.v);
        wait_for_copies();
#if QG_BITS
        next = TileBits<QG_ROWS>::next(shared.tiles, p, mask_rows, tile + QG_KEYS, false);
#else
        next = tile + QG_KEYS;
#endif
        if (next < keys.end) copy_keys(next);
        if (!all_visible) {
            zero_not_finite(shared);
            cta_barrier();
        }
        multiply_values(sums, scores, operands, lane);
        // Adds the replaced infinities and NaN
        // to the queries that attend to them.
        for (u32 j = 0; !all_visible && j < QG_KEYS; j++) {
            const u32 key = tile + j;
            if (ld_shared(&shared.not_finite[j]) == 0) continue;
            const KeyAddress at = address_of_key(p, s, key);
            const u8* from = v_base + (at.page * p.at.v_page + at.row * p.at.v_token) * 2;
#if QG_BITS
            // The mask bits in shared memory
            // already belong to the next tile.
            u32 row_visible[LANE_ROWS];
#pragma unroll
            for (u32 i = 0; i < LANE_ROWS; i++) {
                const u32 query = least(first_query + own_row + Fragments::rows_below(i), last_query);
                const u8* row = mask_row(p, s, head, query);
                row_visible[i] = mask_bits(p, row, visible[i], key / WORD_KEYS * WORD_KEYS) >> key % WORD_KEYS & 1u;
            }
#endif
#pragma unroll
            for (u32 n = 0; n < ROW_TILES * FEATURE_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < TILE_SUMS; i++) {
                    const u32 column = Fragments::feature_of(n, i, lane), row = Fragments::row_of<FEATURE_TILES>(n, i);
#if QG_BITS
                    const bool is_visible = row_visible[row];
#else
                    const bool is_visible = key >= visible[row].first && key < visible[row].end;
#endif
                    if (!is_visible || column >= p.shape.v_dim) continue;
                    const u32 half = ld_global_u16(from + column * 2);
                    if (!is_finite(half)) sums[n][i] += QG_KV == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
                }
            }
        }
    }

    u8* d = reinterpret_cast<u8*>(p.at.d);
#pragma unroll
    for (u32 own = 0; own < LANE_ROWS; own++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) row_sum[own] += shfl_xor(row_sum[own], Fragments::SAME_ROWS[i]);
        const u32 query = first_query + own_row + Fragments::rows_below(own);
        if (query > last_query) continue;
        const RowEnd end = end_of_row(p, head, row_max[own], row_sum[own], 1.0f);
        const u64 token = s.token + query;
        u8* row = d + (token * p.at.d_token + head * p.at.d_head) * 2;
#pragma unroll
        for (u32 tile = 0; tile < FEATURE_TILES; tile++) {
#pragma unroll
            for (u32 first = 0; first < TILE_SUMS; first += 4) {
                const u32 n = own / 2 * FEATURE_TILES + tile, i = own % 2 * 2 + first;
                const u32 column = Fragments::feature_of(n, i, lane);
                if (column >= p.shape.v_dim) continue;
                const u32 pair = rounded_pair(sums[n][i] * end.scale, sums[n][i + 1] * end.scale);
                if (p.shape.flags & QG_FLAG_D_ALIGNED) {
                    st_global_u32(row + column * 2, pair);
                } else {
                    st_global_u16(row + column * 2, pair);
                    st_global_u16(row + column * 2 + 2, pair >> 16);
                }
            }
        }
        if ((lane & (Fragments::SAME_ROWS[0] | Fragments::SAME_ROWS[1])) == 0) store_lse(p, token, head, end);
    }
#if QG_VARIANT >= 80
    // Without keys, the copy of Q is still in flight.
    cp_async_wait_group<0>();
#endif
}
