// Attention by matrix instructions of a warp: a CTA has 64 queries of a head, a warp 16 of them, whose products with QG_KEYS keys
// at a time, online softmax and results stay in its registers. The keys of the next tile and the values of this one are copied to
// shared memory meanwhile (from Ampere on in the background).
#include "atoms/cp_async.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "mainloop/attention_tile_bits.cuh"

constexpr u32 ROWS = 64, WARPS = QG_THREADS / 32, WARP_ROWS = 16;
static_assert(WARPS * WARP_ROWS == ROWS, "each warp has sixteen queries");
constexpr u32 MMA_K = 16, MMA_N = 8;
// Sixteen bytes more than a row: eight rows of a matrix then lie in different banks.
constexpr u32 QK_PITCH = QG_QK * 2 + 16, V_PITCH = QG_V * 2 + 16;
// Words that have a bit for each key of a tile, and the bits of the last that stand for none.
constexpr u32 THERE_WORDS = (QG_KEYS + 31) / 32, NO_KEYS = QG_KEYS < 32 ? ~0u << QG_KEYS % 32 : 0;
constexpr u32 KEY_TILES = QG_KEYS / MMA_N, V_TILES = QG_V / MMA_N;

struct SharedStorage {
    u8 q[ROWS * QK_PITCH];
    u8 k[QG_KEYS * QK_PITCH];
    u8 v[QG_KEYS * V_PITCH];
    // Which keys the table names a page for: a bit each.
    u32 there[2];
    // Whether a value of the key is infinite or NaN.
    u32 not_finite[QG_KEYS];
#ifdef QG_BITS
    TileBits<ROWS> tiles;
#endif
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

QG_DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if QG_VARIANT >= 80
    const u32 b[2] = {b0, b1};
    if constexpr (QG_KV == DTYPE_BF16)
        mma_m16n8k16_bf16(d, a, b);
    else
        mma_m16n8k16_f16(d, a, b);
#else
    const u32 low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]};
    mma_m16n8k8_f16(d, low, b0);
    mma_m16n8k8_f16(d, high, b1);
#endif
}

// Two numbers, rounded to the operands' type.
QG_DEVICE u32 rounded_pair(float low, float high) {
    if constexpr (QG_KV == DTYPE_BF16) {
#if QG_VARIANT >= 80
        return f32_to_bf16x2(low, high);
#else
        return f32_to_bf16(low) | f32_to_bf16(high) << 16;
#endif
    }
#if QG_VARIANT >= 80
    return f32_to_f16x2(low, high);
#else
    return f32_to_f16(low) | f32_to_f16(high) << 16;
#endif
}

QG_DEVICE bool is_finite(u32 half) {
    constexpr u32 EXPONENT = QG_KV == DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    return (half & EXPONENT) != EXPONENT;
}

// Sixteen bytes from global to shared memory, or zeros.
QG_DEVICE void copy_16(bool wanted, u8* to, const u8* from) {
#if QG_VARIANT >= 80
    cp_async_16_or_zeros(wanted, shared_address(to), from);
#else
    u32x4 v = {0, 0, 0, 0};
    if (wanted) v = ld_global_v4(from);
    st_shared(reinterpret_cast<u32x4*>(to), v);
#endif
}

// Ends what was copied since the last such call.
QG_DEVICE void commit_copies() {
#if QG_VARIANT >= 80
    cp_async_commit_group();
#endif
}

// Waits for all copies of the CTA, and until nobody reads what was copied before.
QG_DEVICE void wait_for_copies() {
#if QG_VARIANT >= 80
    cp_async_wait_group<0>();
#endif
    cta_barrier();
}

// Copies a tile of keys or values from `tile` on: rows of COLUMNS numbers, of which `columns` are there; zeros of keys outside of
// `keys`.
template <u32 COLUMNS, u32 PITCH>
QG_DEVICE void copy_tile(const AttentionParams& p, const Sequence& s, const u8* base, u64 page_stride, u64 token_stride,
                         u32 columns, u32 tile, const KeyRange& keys, u8* to) {
    constexpr u32 CHUNKS = COLUMNS / 8;
#pragma unroll
    for (u32 i = 0; i < QG_KEYS * CHUNKS; i += QG_THREADS) {
        const u32 chunk = i + thread_index();
        if (QG_KEYS * CHUNKS % QG_THREADS != 0 && chunk >= QG_KEYS * CHUNKS) break;
        const u32 row = chunk / CHUNKS, column = chunk % CHUNKS * 8, key = tile + row;
        bool wanted = key >= keys.first && key < keys.end && column < columns;
        const u8* from = base;
        if (wanted) {
            const KeyPlace at = place_of_key(p, s, key);
            wanted = at.is_there;
            if (wanted) from += (at.page * page_stride + at.row * token_stride + column) * 2;
        }
        copy_16(wanted, to + row * PITCH + column * 2, from);
    }
}

// Notes which keys of a tile have a page.
QG_DEVICE void note_pages(const AttentionParams& p, const Sequence& s, u32 tile, const KeyRange& keys,
                          SharedStorage& shared) {
    if (p.shape.table_width == 0 || thread_index() / 32 >= THERE_WORDS) return;
    const u32 key = tile + thread_index();
    const bool is_seen = key >= keys.first && key < keys.end;
    const u32 there = ballot(is_seen && place_of_key(p, s, key).is_there);
    if (thread_index() % 32 == 0) st_shared(&shared.there[thread_index() / 32], there);
}

// Puts zeros in the place of values that are infinite or NaN, and notes whose they are: those of keys that a query does not see must
// not reach it.
QG_DEVICE void take_not_finite_away(SharedStorage& shared) {
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

// Where ptxas would spill for a CTA more on an SM, it is told how many are enough (`kernels.lock` shows no spills).
#ifdef QG_CTAS_PER_SM
#define QG_BOUNDS __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
#else
#define QG_BOUNDS __launch_bounds__(QG_THREADS)
#endif

extern "C" __global__ void QG_BOUNDS
    qg_attention_mma(const __grid_constant__ KernelParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    // The last queries of a causal sequence see the most keys: those begin first.
    u32 cta = cta_index().x;
    const u32 head = cta % p.shape.heads;
    cta /= p.shape.heads;
    const u32 row_cta = p.at.row_ctas - 1 - cta % p.at.row_ctas;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Sequence s = sequence_of(p, cta / p.at.row_ctas);
    const u32 first_query = row_cta * ROWS;
    if (first_query >= s.queries) return;
    const u32 last_query = least(first_query + ROWS, s.queries) - 1;
    const u32 kv_head = head / (p.shape.heads / p.shape.kv_heads);
    const KeyRange keys = keys_seen_by(p, s, first_query, last_query);
    const KeyRange of_all = {keys_seen(p, s, last_query).first, keys_seen(p, s, first_query).end};
    const u8* k_base = reinterpret_cast<const u8*>(p.at.k) + kv_head * p.at.k_head * 2;
    const u8* v_base = reinterpret_cast<const u8*>(p.at.v) + kv_head * p.at.v_head * 2;
#ifdef QG_BITS
    const MaskedRows mask_rows = {s, head, first_query, last_query, keys.end};
#endif
    const auto copy_keys = [&](u32 tile) {
#ifdef QG_BITS
        TileBits<ROWS>::note(shared.tiles, p, mask_rows, tile);
#endif
        note_pages(p, s, tile, keys, shared);
        copy_tile<QG_QK, QK_PITCH>(p, s, k_base, p.at.k_page, p.at.k_token, p.shape.qk_dim, tile, keys, shared.k);
        commit_copies();
    };

    {
        constexpr u32 CHUNKS = QG_QK / 8;
        const u8* q_base = reinterpret_cast<const u8*>(p.at.q) + (s.token * p.at.q_token + head * p.at.q_head) * 2;
        for (u32 chunk = thread_index(); chunk < ROWS * CHUNKS; chunk += QG_THREADS) {
            const u32 row = chunk / CHUNKS, column = chunk % CHUNKS * 8, query = first_query + row;
            const bool wanted = query <= last_query && column < p.shape.qk_dim;
            const u64 element = wanted ? query * p.at.q_token + column : 0;
            copy_16(wanted, shared.q + row * QK_PITCH + column * 2, q_base + element * 2);
        }
        // A group of its own: where there are no keys, nothing else commits it, and what is not committed is not waited for.
        commit_copies();
    }
    // The queries of this lane, the second eight below the first; those that are not there do as the last one.
    const u32 own_row = warp * WARP_ROWS + lane / 4;
    KeyRange seen[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) seen[i] = keys_seen(p, s, least(first_query + own_row + 8 * i, last_query));
    float sums[V_TILES][4] = {};
    float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
    const float factor = key_factor(p, kv_head);

    const u32 q_rows = shared_address(shared.q) + (warp * WARP_ROWS + lane % 16) * QK_PITCH + lane / 16 * 16;
    const u32 k_rows = shared_address(shared.k) + (lane / 16 * 8 + lane % 8) * QK_PITCH + lane / 8 % 2 * 16;
    const u8* v_rows = shared.v + lane % 16 * V_PITCH + lane / 16 * 16;
    u32 tile = keys.first / QG_KEYS * QG_KEYS, next;
#ifdef QG_BITS
    tile = TileBits<ROWS>::next(shared.tiles, p, mask_rows, tile, true);
    if (tile < keys.end) copy_keys(tile);
#else
    if (keys.first < keys.end) copy_keys(tile);
#endif
    for (; tile < keys.end; tile = next) {
        wait_for_copies();
        copy_tile<QG_V, V_PITCH>(p, s, v_base, p.at.v_page, p.at.v_token, p.shape.v_dim, tile, keys, shared.v);
        commit_copies();

        float scores[KEY_TILES][4] = {};
#pragma unroll
        for (u32 k = 0; k < QG_QK / MMA_K; k++) {
            u32 a[4];
            ldmatrix_x4(a, q_rows + k * MMA_K * 2);
#pragma unroll
            for (u32 n = 0; n < KEY_TILES; n += 2) {
                u32 b[4];
                ldmatrix_x4(b, k_rows + n * MMA_N * QK_PITCH + k * MMA_K * 2);
                multiply_add(scores[n], a, b[0], b[1]);
                multiply_add(scores[n + 1], a, b[2], b[3]);
            }
        }

#ifdef QG_BITS
        bool all_seen = TileBits<ROWS>::is_full(shared.tiles, tile);
#else
        bool all_seen = tile >= of_all.first && tile + QG_KEYS <= of_all.end;
#endif
        u32 there[2] = {~0u, ~0u};
        if (p.shape.table_width != 0) {
#pragma unroll
            for (u32 i = 0; i < THERE_WORDS; i++) {
                there[i] = ld_shared(&shared.there[i]);
                all_seen = all_seen && (there[i] | NO_KEYS) == ~0u;
            }
        }
#ifdef QG_BITS
        u32 bits[2][QG_KEYS / WORD_KEYS];
#pragma unroll
        for (u32 i = 0; i < 2 * QG_KEYS / WORD_KEYS; i++)
            bits[i % 2][i / 2] = ld_shared(&shared.tiles.of_row[own_row + 8 * (i % 2)][i / 2]) & there[i / 2];
#endif
        float above[2] = {largest[0], largest[1]};
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float& score = scores[n][i];
                score = bounded(p, score * factor);
#ifdef QG_BITS
                const u32 column = n * MMA_N + lane % 4 * 2 + i % 2;
                if (!(bits[i / 2][n * MMA_N / WORD_KEYS] >> column % WORD_KEYS & 1u)) score = minus_infinity();
#else
                if (!all_seen) {
                    const u32 column = n * MMA_N + lane % 4 * 2 + i % 2, key = tile + column;
                    const bool is_seen = key >= seen[i / 2].first && key < seen[i / 2].end;
                    if (!is_seen || !(there[column / 32] >> column % 32 & 1u)) score = minus_infinity();
                }
#endif
                above[i / 2] = score > above[i / 2] ? score : above[i / 2];
            }
        }
        float kept[2], base[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 mask = 1; mask <= 2; mask *= 2) {
                const float other = shfl_xor(above[i], mask);
                above[i] = other > above[i] ? other : above[i];
            }
            // Of minus infinities no power is taken of a difference of two.
            base[i] = above[i] == minus_infinity() ? 0.0f : above[i];
            kept[i] = ex2_approx(largest[i] - base[i]);
            largest[i] = above[i];
            total[i] *= kept[i];
        }
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                scores[n][i] = ex2_approx(scores[n][i] - base[i / 2]);
                total[i / 2] += scores[n][i];
            }
        }
#pragma unroll
        for (u32 n = 0; n < V_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[n][i] *= kept[i / 2];
        }

        wait_for_copies();
#ifdef QG_BITS
        next = TileBits<ROWS>::next(shared.tiles, p, mask_rows, tile + QG_KEYS, false);
#else
        next = tile + QG_KEYS;
#endif
        if (next < keys.end) copy_keys(next);
        if (!all_seen) {
            take_not_finite_away(shared);
            cta_barrier();
        }
#pragma unroll
        for (u32 k = 0; k < QG_KEYS / MMA_K; k++) {
            const float(&low)[4] = scores[2 * k];
            const float(&high)[4] = scores[2 * k + 1];
            const u32 a[4] = {rounded_pair(low[0], low[1]), rounded_pair(low[2], low[3]),
                              rounded_pair(high[0], high[1]), rounded_pair(high[2], high[3])};
#pragma unroll
            for (u32 n = 0; n < V_TILES; n += 2) {
                u32 b[4];
                ldmatrix_x4_trans(b, v_rows + k * MMA_K * V_PITCH + n * MMA_N * 2);
                multiply_add(sums[n], a, b[0], b[1]);
                multiply_add(sums[n + 1], a, b[2], b[3]);
            }
        }
        // What was taken away reaches the queries that see it.
        for (u32 j = 0; !all_seen && j < QG_KEYS; j++) {
            const u32 key = tile + j;
            if (ld_shared(&shared.not_finite[j]) == 0) continue;
            const KeyPlace at = place_of_key(p, s, key);
            const u8* from = v_base + (at.page * p.at.v_page + at.row * p.at.v_token) * 2;
#ifdef QG_BITS
            // Of the rows' words in shared memory those of the next tile have taken the place.
            u32 sees[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u8* row = mask_row(p, s, head, least(first_query + own_row + 8 * i, last_query));
                sees[i] = mask_bits(p, row, seen[i], key / WORD_KEYS * WORD_KEYS) >> key % WORD_KEYS & 1u;
            }
#endif
#pragma unroll
            for (u32 n = 0; n < V_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 column = n * MMA_N + lane % 4 * 2 + i % 2;
#ifdef QG_BITS
                    const bool is_seen = sees[i / 2];
#else
                    const bool is_seen = key >= seen[i / 2].first && key < seen[i / 2].end;
#endif
                    if (!is_seen || column >= p.shape.v_dim) continue;
                    const u32 half = ld_global_u16(from + column * 2);
                    if (!is_finite(half)) sums[n][i] += QG_KV == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
                }
            }
        }
    }

    u8* d = reinterpret_cast<u8*>(p.at.d);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 mask = 1; mask <= 2; mask *= 2) total[i] += shfl_xor(total[i], mask);
        const u32 query = first_query + own_row + 8 * i;
        if (query > last_query) continue;
        const float scale = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
        const u64 token = s.token + query;
        u8* row = d + (token * p.at.d_token + head * p.at.d_head) * 2;
#pragma unroll
        for (u32 n = 0; n < V_TILES; n++) {
            const u32 column = n * MMA_N + lane % 4 * 2;
            if (column >= p.shape.v_dim) continue;
            const u32 pair = rounded_pair(sums[n][2 * i] * scale, sums[n][2 * i + 1] * scale);
            if (p.shape.flags & QG_FLAG_D_ALIGNED) {
                st_global_u32(row + column * 2, pair);
            } else {
                st_global_u16(row + column * 2, pair);
                st_global_u16(row + column * 2 + 2, pair >> 16);
            }
        }
        if (lane % 4 == 0 && p.shape.flags & QG_FLAG_LSE)
            st_global_f32(reinterpret_cast<float*>(p.at.lse) + token * p.shape.heads + head,
                          log_sum_exp(largest[i], total[i]));
    }
#if QG_VARIANT >= 80
    // Queries of a CTA without keys are still in flight.
    cp_async_wait_group<0>();
#endif
}
