// MMA attention for many queries on Ampere and later. A
// CTA has 128 queries of a head. A warp has 32 queries,
// so that each K and V fragment serves two row tiles.
// cp.async loads the next K tile and the current V tile
// meanwhile. Rows have no padding: 16-byte chunks are
// XOR-swizzled by the row to avoid bank conflicts.
#include "atoms/cp_async.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "atoms/opaque_register.cuh"
#include "epilogue/attention_store.cuh"
#include "mainloop/attention_tile_bits.cuh"

constexpr u32 WARPS = QG_THREADS / 32, ROW_TILES = 2, WARP_ROWS = ROW_TILES * 16, ROWS = WARPS * WARP_ROWS;
constexpr u32 MMA_K = 16, MMA_N = 8;
constexpr u32 QK_PITCH = QG_QK * 2, V_PITCH = QG_V * 2;
constexpr u32 SCORES = QG_KEYS / 2, SUMS = QG_V / 2;
static_assert(QG_QK % 64 == 0 && QG_V % 64 == 0, "eight chunks are exchanged");
static_assert(QG_KEYS <= 64, "two words say which keys have a page");

struct CpAsyncParams {
    KernelParams attention;
    // Heads that CTAs process together, so that their K and V stay in L2.
    u32 heads_together;
    u32 reserved;
};

// Work of a CTA. It is reloaded from shared memory
// on each use; registers are for accumulators.
struct Work {
    const u8 *k, *v;
    Sequence s;
    u32 head, first_query, last_query;
    // Union and intersection of the keys visible to the queries.
    KeyRange keys, visible_to_all;

    QG_DEVICE Work load(const Work& shared) {
        const Sequence& s = shared.s;
        return {ld_shared(&shared.k),
                ld_shared(&shared.v),
                {ld_shared(&s.index), ld_shared(&s.token), ld_shared(&s.queries), ld_shared(&s.row), ld_shared(&s.keys)},
                ld_shared(&shared.head),
                ld_shared(&shared.first_query),
                ld_shared(&shared.last_query),
                {ld_shared(&shared.keys.first), ld_shared(&shared.keys.end)},
                {ld_shared(&shared.visible_to_all.first), ld_shared(&shared.visible_to_all.end)}};
    }
    QG_DEVICE void store(Work& shared, const Work& work) {
        st_shared(&shared.k, work.k), st_shared(&shared.v, work.v);
        Sequence& s = shared.s;
        st_shared(&s.index, work.s.index), st_shared(&s.token, work.s.token), st_shared(&s.queries, work.s.queries);
        st_shared(&s.row, work.s.row), st_shared(&s.keys, work.s.keys);
        st_shared(&shared.head, work.head);
        st_shared(&shared.first_query, work.first_query), st_shared(&shared.last_query, work.last_query);
        st_shared(&shared.keys.first, work.keys.first), st_shared(&shared.keys.end, work.keys.end);
        st_shared(&shared.visible_to_all.first, work.visible_to_all.first), st_shared(&shared.visible_to_all.end, work.visible_to_all.end);
    }
};

struct SharedStorage {
    alignas(16) u8 q[ROWS * QK_PITCH];
    u8 k[QG_KEYS * QK_PITCH];
    u8 v[QG_KEYS * V_PITCH];
    // Bits of keys that have a page.
    u32 present[2];
    // Whether V of some mixed tile has infinities or NaN.
    u32 not_finite;
#if QG_BITS
    TileBits<ROWS> tiles;
#endif
    Work work;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Factor from scores to base-2 exponents. With
// a soft cap, scores already are exponents.
QG_DEVICE float factor(const AttentionParams& p) {
    return QG_BOUNDED ? 1.0f : p.shape.factor;
}

// Registers of a lane: two query rows
// of each row tile, eight apart.
struct Rows {
    float sums[ROW_TILES][SUMS];
    float row_max[ROW_TILES][2], row_sum[ROW_TILES][2];
};

QG_DEVICE void multiply_add(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    float(&four)[4] = *reinterpret_cast<float(*)[4]>(d);
    const u32 b[2] = {b0, b1};
    if constexpr (QG_KV == DTYPE_BF16)
        mma_m16n8k16_bf16(four, a, b);
    else
        mma_m16n8k16_f16(four, a, b);
}

QG_DEVICE bool is_finite(u32 half) {
    constexpr u32 EXPONENT = QG_KV == DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    return (half & EXPONENT) != EXPONENT;
}

// Waits for all copies of the CTA. The barrier also
// ensures that all reads of the previous tile are done.
QG_DEVICE void wait_for_copies() {
    cp_async_wait_group<0>();
    cta_barrier();
}

// Copies a K or V tile. Keys that no query attends
// to and features beyond `columns` become zeros.
// [QG_KEYS][COLUMNS]
template <u32 COLUMNS>
QG_DEVICE void copy_tile(const AttentionParams& p, const Work& work, const u8* base, u64 page_stride, u64 token_stride,
                         u32 columns, u32 tile, u8* to) {
    constexpr u32 CHUNKS = COLUMNS / 8, STEP = QG_THREADS / CHUNKS;
    static_assert(STEP % 8 == 0, "the rows of a thread exchange their chunks alike");
    const u32 row = thread_index() / CHUNKS, chunk = thread_index() % CHUNKS;
    const u32 place = shared_address(to) + row * COLUMNS * 2 + (chunk ^ (row & 7u)) * 16;
    const bool is_column = chunk * 8 < columns;
    const u8* from = base + chunk * 16;
    if (p.shape.table_width == 0) {
        const KeyAddress at = address_of_key(p, work.s, tile);
        from += (at.page * page_stride + (u64)(at.row + row) * token_stride) * 2;
#pragma unroll
        for (u32 i = 0; i < QG_KEYS; i += STEP) {
            const u32 key = tile + row + i;
            const bool wanted = is_column && key >= work.keys.first && key < work.keys.end;
            cp_async_16_or_zeros(wanted, place + i * COLUMNS * 2, from + i * token_stride * 2);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < QG_KEYS; i += STEP) {
        const u32 key = tile + row + i;
        bool wanted = is_column && key >= work.keys.first && key < work.keys.end;
        u64 element = 0;
        if (wanted) {
            const KeyAddress at = address_of_key(p, work.s, key);
            wanted = at.is_present;
            if (wanted) element = at.page * page_stride + at.row * token_stride;
        }
        cp_async_16_or_zeros(wanted, place + i * COLUMNS * 2, from + element * 2);
    }
}

#if QG_BITS
QG_DEVICE MaskedRows masked_rows(const Work& work) {
    return {work.s, work.head, work.first_query, work.last_query, work.keys.end};
}
#endif

// Starts the copy of a K tile and
// stores its mask and page bits.
QG_DEVICE void copy_keys(const KernelParams& p, const Work& work, SharedStorage& shared, u32 tile) {
#if QG_BITS
    TileBits<ROWS>::store_row_bits(shared.tiles, p, masked_rows(work), tile);
#endif
    if (p.shape.table_width != 0 && thread_index() < QG_KEYS) {
        const u32 key = tile + thread_index();
        const bool is_visible = key >= work.keys.first && key < work.keys.end;
        const u32 present = ballot(is_visible && address_of_key(p, work.s, key).is_present);
        if (thread_index() % 32 == 0) st_shared(&shared.present[thread_index() / 32], present);
    }
    copy_tile<QG_QK>(p, work, work.k, p.at.k_page, p.at.k_token, p.shape.qk_dim, tile, shared.k);
    cp_async_commit_group();
}

QG_DEVICE void copy_queries(const AttentionParams& p, const Work& work, SharedStorage& shared) {
    constexpr u32 CHUNKS = QG_QK / 8, STEP = QG_THREADS / CHUNKS;
    const u32 row = thread_index() / CHUNKS, chunk = thread_index() % CHUNKS;
    const u32 place = shared_address(shared.q) + row * QK_PITCH + (chunk ^ (row & 7u)) * 16;
    const u64 element = (u64)(work.s.token + work.first_query + row) * p.at.q_token + work.head * p.at.q_head;
    const u8* from = reinterpret_cast<const u8*>(p.at.q) + element * 2 + chunk * 16;
#pragma unroll
    for (u32 i = 0; i < ROWS; i += STEP) {
        const bool wanted = work.first_query + row + i <= work.last_query && chunk * 8 < p.shape.qk_dim;
        cp_async_16_or_zeros(wanted, place + i * QK_PITCH, from + i * p.at.q_token * 2);
    }
    // A separate group: without keys, no later commit would
    // include it, and uncommitted copies are not waited for.
    cp_async_commit_group();
}

QG_DEVICE void multiply_keys(float (&scores)[ROW_TILES][SCORES], const SharedStorage& shared) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    const u32 q = shared_address(shared.q) + (warp * WARP_ROWS + lane % 16) * QK_PITCH;
    const u32 k = shared_address(shared.k) + (lane / 16 * 8 + lane % 8) * QK_PITCH;
#pragma unroll
    for (u32 step = 0; step < QG_QK / MMA_K; step++) {
        const u32 q_chunk = ((step * 2 + lane / 16) ^ (lane & 7u)) * 16;
        const u32 k_chunk = ((step * 2 + lane / 8 % 2) ^ (lane & 7u)) * 16;
        u32 a[ROW_TILES][4];
#pragma unroll
        for (u32 row = 0; row < ROW_TILES; row++) ldmatrix_x4(a[row], q + q_chunk + row * 16 * QK_PITCH);
#pragma unroll
        for (u32 n = 0; n < QG_KEYS / MMA_N; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, k + k_chunk + n * MMA_N * QK_PITCH);
#pragma unroll
            for (u32 row = 0; row < ROW_TILES; row++) {
                multiply_add(&scores[row][n * 4], a[row], b[0], b[1]);
                multiply_add(&scores[row][n * 4 + 4], a[row], b[2], b[3]);
            }
        }
    }
}

QG_DEVICE void multiply_values(Rows& rows, const u32 (&weights)[ROW_TILES][QG_KEYS / MMA_K][4],
                               const SharedStorage& shared) {
    const u32 lane = thread_index() % 32;
    const u32 v = shared_address(shared.v) + lane % 16 * V_PITCH;
#pragma unroll
    for (u32 step = 0; step < QG_KEYS / MMA_K; step++) {
#pragma unroll
        for (u32 n = 0; n < QG_V / MMA_N; n += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, v + ((n + lane / 16) ^ (lane & 7u)) * 16 + step * MMA_K * V_PITCH);
#pragma unroll
            for (u32 row = 0; row < ROW_TILES; row++) {
                multiply_add(&rows.sums[row][n * 4], weights[row][step], b[0], b[1]);
                multiply_add(&rows.sums[row][n * 4 + 4], weights[row][step], b[2], b[3]);
            }
        }
    }
}

// Visible keys of the lane's two queries in a row
// tile. Rows beyond the last repeat the last query.
QG_DEVICE void visible_to_lane(KeyRange (&visible)[2], const AttentionParams& p, const Work& work, u32 row_tile) {
    const u32 row = thread_index() / 32 * WARP_ROWS + row_tile * 16 + thread_index() % 32 / 4;
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        visible[i] = visible_keys(p, work.s, least(work.first_query + row + 8 * i, work.last_query));
}

// Next tile; with a mask, the next tile that has visible keys.
QG_DEVICE u32 tile_behind(const KernelParams& p, const Work& work, SharedStorage& shared, u32 tile) {
#if QG_BITS
    return TileBits<ROWS>::next(shared.tiles, p, masked_rows(work), tile + QG_KEYS, false);
#else
    return tile + QG_KEYS;
#endif
}

#if QG_BITS
// Masks scores by the mask bits,
// which include the causal range.
QG_DEVICE void mask_scores_by_bits(float (&scores)[SCORES], const SharedStorage& shared, u32 row_tile) {
    const u32 row = thread_index() / 32 * WARP_ROWS + row_tile * 16 + thread_index() % 32 / 4;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 word = 0; word < QG_KEYS / WORD_KEYS; word++) {
            const u32 bits = ld_shared(&shared.tiles.of_row[row + 8 * i][word]) >> thread_index() % 4 * 2;
#pragma unroll
            for (u32 j = 0; j < WORD_KEYS / MMA_N * 2; j++) {
                float& score = scores[(word * (WORD_KEYS / MMA_N) + j / 2) * 4 + i * 2 + j % 2];
                if (!(bits >> (j / 2 * MMA_N + j % 2) & 1u)) score = minus_infinity();
            }
        }
    }
}
#endif

// Masks keys without a page.
QG_DEVICE void mask_pages(float (&scores)[SCORES], const SharedStorage& shared) {
    u32 present[2] = {~0u, ~0u};
#pragma unroll
    for (u32 i = 0; i < QG_KEYS / 32; i++) present[i] = ld_shared(&shared.present[i]);
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) {
        const u32 column = i / 4 * 8 + thread_index() % 4 * 2 + i % 2;
        if (!(present[i / 16] >> column % 32 & 1u)) scores[i] = minus_infinity();
    }
}

// Whether some query does not attend to all keys of a
// tile. With a block table any key may lack a page.
QG_DEVICE bool is_mixed(const KernelParams& p, const Work& work, const SharedStorage& shared, u32 tile) {
#if QG_BITS
    return !TileBits<ROWS>::is_full(shared.tiles, tile) || p.shape.table_width != 0;
#else
    return tile < work.visible_to_all.first || tile + QG_KEYS > work.visible_to_all.end || p.shape.table_width != 0;
#endif
}

// Replaces infinities and NaN in V of a mixed
// tile by zeros and sets a flag. A masked value
// must not reach a query through 0 · inf = NaN.
QG_DEVICE void zero_not_finite(SharedStorage& shared) {
    constexpr u32 CHUNKS = QG_KEYS * QG_V / 8;
    bool found = false;
    for (u32 chunk = thread_index(); chunk < CHUNKS; chunk += QG_THREADS) {
        u32x4* at = reinterpret_cast<u32x4*>(shared.v + chunk * 16);
        const u32x4 v = ld_shared(at);
        u32 words[4] = {v.x, v.y, v.z, v.w};
        bool is_changed = false;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (!is_finite(words[i])) words[i] &= 0xffff0000u, is_changed = true;
            if (!is_finite(words[i] >> 16)) words[i] &= 0xffffu, is_changed = true;
        }
        if (is_changed) st_shared(at, {words[0], words[1], words[2], words[3]});
        found = found || is_changed;
    }
    if (ballot(found) != 0 && thread_index() % 32 == 0) st_shared(&shared.not_finite, 1u);
}

// Adds the replaced infinities and NaN to
// the queries that attend to them. They
// decide the sum in any order of addition.
QG_DEVICE void add_not_finite(Rows& rows, const KernelParams& p, const Work& work, const SharedStorage& shared) {
#pragma unroll 1
    for (u32 key = work.keys.first; key < work.keys.end; key++) {
#if !QG_BITS
        // With a mask, any tile may have been mixed.
        // Adding a value that was not replaced is
        // harmless: the sum is already infinite or NaN.
        if (!is_mixed(p, work, shared, key / QG_KEYS * QG_KEYS)) continue;
#endif
        const KeyAddress at = address_of_key(p, work.s, key);
        if (!at.is_present) continue;
        const u8* from = work.v + (at.page * p.at.v_page + at.row * p.at.v_token) * 2;
#pragma unroll
        for (u32 row = 0; row < ROW_TILES; row++) {
            KeyRange visible[2];
            visible_to_lane(visible, p, work, row);
#if QG_BITS
            // Hidden by the mask.
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 own = thread_index() / 32 * WARP_ROWS + row * 16 + thread_index() % 32 / 4 + 8 * i;
                const u32 query = least(work.first_query + own, work.last_query);
                const u8* of_query = mask_row(p, work.s, work.head, query);
                const u32 bits = mask_bits(p, of_query, visible[i], key / WORD_KEYS * WORD_KEYS);
                if (!(bits >> key % WORD_KEYS & 1u)) visible[i] = {0, 0};
            }
#endif
#pragma unroll
            for (u32 i = 0; i < SUMS; i++) {
                const u32 column = i / 4 * 8 + thread_index() % 4 * 2 + i % 2;
                const KeyRange& of_row = visible[i / 2 % 2];
                if (key < of_row.first || key >= of_row.end || column >= p.shape.v_dim) continue;
                const u32 half = ld_global_u16(from + column * 2);
                if (!is_finite(half)) rows.sums[row][i] += QG_KV == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
            }
        }
    }
}

// One K tile; MIXED applies the mask. Starts the copy
// of the next tile's keys and returns that tile.
template <bool MIXED>
QG_DEVICE u32 step(Rows& rows, const KernelParams& p, SharedStorage& shared, u32 tile) {
    {
        const Work work = Work::load(shared.work);
        copy_tile<QG_V>(p, work, work.v, p.at.v_page, p.at.v_token, p.shape.v_dim, tile, shared.v);
        cp_async_commit_group();
    }
    float scores[ROW_TILES][SCORES] = {};
    multiply_keys(scores, shared);
    u32 weights[ROW_TILES][QG_KEYS / MMA_K][4];
#pragma unroll
    for (u32 row = 0; row < ROW_TILES; row++) {
        if constexpr (QG_BOUNDED) {
#pragma unroll
            for (u32 i = 0; i < SCORES; i++) scores[row][i] = bounded(p, scores[row][i] * p.shape.factor);
        }
        if constexpr (MIXED) {
#if QG_BITS
            mask_scores_by_bits(scores[row], shared, row);
#else
            KeyRange visible[2];
            visible_to_lane(visible, p, Work::load(shared.work), row);
            mask_scores(scores[row], visible, tile);
#endif
            if (p.shape.table_width != 0) mask_pages(scores[row], shared);
        }
        float rescale[2];
        online_softmax(scores[row], rescale, rows.row_max[row], rows.row_sum[row], factor(p));
#pragma unroll
        for (u32 i = 0; i < SCORES / 2; i++)
            weights[row][i / 4][i % 4] = opaque_register(rounded_pair(scores[row][2 * i], scores[row][2 * i + 1]));
        if (!needs_rescale(rescale)) continue;
#pragma unroll
        for (u32 i = 0; i < SUMS; i++) rows.sums[row][i] *= rescale[i / 2 % 2];
    }

    wait_for_copies();
    const u32 next = tile_behind(p, Work::load(shared.work), shared, tile);
    if (next < ld_shared(&shared.work.keys.end)) copy_keys(p, Work::load(shared.work), shared, next);
    if constexpr (MIXED) {
        zero_not_finite(shared);
        cta_barrier();
    }
    multiply_values(rows, weights, shared);
    return next;
}

// Stores the lane's row ROW (0 or 1) of every row tile.
template <u32 ROW>
QG_DEVICE void store(const Rows& rows, const AttentionParams& p, const Work& work) {
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++) {
        const u32 row = thread_index() / 32 * WARP_ROWS + i * 16 + thread_index() % 32 / 4 + 8 * ROW;
        const u32 query = work.first_query + row;
        store_query<ROW>(rows.sums[i], p, work.s, work.head, query, query <= work.last_query,
                         max_exponent(rows.row_max[i][ROW], factor(p)), rows.row_sum[i][ROW]);
    }
}

// Work of a CTA; false if it has none. Within a
// group of heads, the last queries of causal
// sequences attend to the most keys and begin first.
QG_DEVICE bool work_of(const CpAsyncParams& params, u32 cta, Work& work) {
    const KernelParams& p = params.attention;
    const u32 of_head = p.shape.sequences * p.at.row_ctas;
    const u32 first_head = cta / (params.heads_together * of_head) * params.heads_together;
    const u32 heads = least(params.heads_together, p.shape.heads - first_head);
    cta -= first_head * of_head;
    work.head = first_head + cta % heads;
    cta /= heads;
    work.first_query = (p.at.row_ctas - 1 - cta / p.shape.sequences) * ROWS;
    work.s = sequence_of(p, cta % p.shape.sequences);
    if (work.first_query >= work.s.queries) return false;
    work.last_query = least(work.first_query + ROWS, work.s.queries) - 1;
    const u32 kv_head = work.head / (p.shape.heads / p.shape.kv_heads);
    work.keys = visible_keys_of(p, work.s, work.first_query, work.last_query);
    work.visible_to_all = {visible_keys(p, work.s, work.last_query).first, visible_keys(p, work.s, work.first_query).end};
    work.k = reinterpret_cast<const u8*>(p.at.k) + kv_head * p.at.k_head * 2;
    work.v = reinterpret_cast<const u8*>(p.at.v) + kv_head * p.at.v_head * 2;
    return true;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm80_attention_cp_async(const __grid_constant__ CpAsyncParams params) {
    const KernelParams& p = params.attention;
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32 tile;
    {
        Work work;
        if (!work_of(params, cta_index().x, work)) return;
        if (thread_index() == 0) {
            Work::store(shared.work, work);
            st_shared(&shared.not_finite, 0u);
        }
        copy_queries(p, work, shared);
        tile = work.keys.first / QG_KEYS * QG_KEYS;
#if QG_BITS
        tile = TileBits<ROWS>::next(shared.tiles, p, masked_rows(work), tile, true);
        if (tile < work.keys.end) copy_keys(p, work, shared, tile);
#else
        if (work.keys.first < work.keys.end) copy_keys(p, work, shared, tile);
#endif
    }
    Rows rows = {};
#pragma unroll
    for (u32 i = 0; i < ROW_TILES * 2; i++) rows.row_max[i / 2][i % 2] = minus_infinity();
    for (;;) {
        wait_for_copies();
        const Work work = Work::load(shared.work);
        if (tile >= work.keys.end) break;
        if (is_mixed(p, work, shared, tile))
            tile = step<true>(rows, p, shared, tile);
        else
            tile = step<false>(rows, p, shared, tile);
    }
    const Work work = Work::load(shared.work);
    if (ld_shared(&shared.not_finite) != 0) add_not_finite(rows, p, work, shared);
    store<0>(rows, p, work);
    store<1>(rows, p, work);
}
