// Attention of few queries by matrix instructions, of keys as they are or in codes: the heads that share keys are the rows of one m16 tile, so that keys are read once for
// all of them. A CTA has sixteen rows and a part of the keys; each of its warps goes through every fourth sixteen keys by itself, with a
// softmax of its own and a ring of keys and values in flight, and meets the others only at the end, where results are added up in order.
#include "atoms/cp_async.cuh"
#include "atoms/ldmatrix.cuh"
#include "mainloop/attention_bits.cuh"
#include "mainloop/attention_codes.cuh"

constexpr u32 ROWS = 16, TILE = 16, WARPS = QG_THREADS / 32;
constexpr u32 MMA_K = 16, MMA_N = 8;
constexpr bool IS_E4M3 = QG_KV == KV_E4M3;
QG_DEVICE constexpr u32 bytes_of(u32 numbers) {
    return numbers * KV_BITS / 8;
}
// Plain rows have no gap: their sixteen-byte chunks are exchanged by the row's number, so that the eight rows of a matrix lie in different
// banks. Rows of codes are read by lanes four rows or four chunks apart, which their pitches spread over the banks.
constexpr u32 E4M3_PITCH = QG_QK % 128 == 0 ? QG_QK + 64 : QG_QK;
constexpr u32 K_PITCH = !IS_CODES ? QG_QK * 2 : IS_E4M3 ? E4M3_PITCH : bytes_of(QG_QK) + (KV_BITS == 8 ? 32 : 16);
constexpr u32 V_PITCH = IS_CODES ? bytes_of(QG_V) + 16 : QG_V * 2;
// Scales of a key, and behind those of all of them those of values: as many.
constexpr u32 SCALES = QG_QK / KV_BLOCK, SCALE_BYTES = HAS_SCALES ? SCALES * 2 : 0;
static_assert(!HAS_SCALES || QG_QK == QG_V, "a lane copies the scales of a key or a value");
// What scales begin at a multiple of where a lane copies those of a key at once.
constexpr u32 SCALES_ALIGNED = HAS_SCALES ? SCALE_BYTES : 1;
constexpr u32 SCALES_AT = TILE * (K_PITCH + V_PITCH), STAGE_BYTES = SCALES_AT + 2 * TILE * SCALE_BYTES;
constexpr u32 RING_BYTES = QG_STAGES * STAGE_BYTES;
constexpr u32 V_TILES = QG_V / MMA_N, SUM_PITCH = QG_V + 4;
static_assert(QG_SHARED_BYTES == WARPS * RING_BYTES, "the host computes another size");
static_assert(QG_STAGES <= 4, "masks of all stages are in 64 bits");
static_assert(QG_QK % 64 == 0 && QG_V % 64 == 0, "eight chunks are exchanged");

// What a warp leaves for the others, in the place of its ring.
struct WarpResult {
    float sums[ROWS][SUM_PITCH];
    float largest[ROWS], total[ROWS];
};
static_assert(sizeof(WarpResult) <= RING_BYTES, "results take the place of the ring");

QG_DEVICE float stored_number(const u8* at) {
    const u32 half = ld_shared(reinterpret_cast<const u16*>(at));
    return QG_X == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Where a chunk of a row of keys or values is.
template <u32 PITCH>
QG_DEVICE u32 place_of(u32 row, u32 chunk) {
    return row * PITCH + (IS_CODES ? chunk : chunk ^ (row & 7u)) * 16;
}
// Feature `column` of value `row` of a stage.
QG_DEVICE float value_of(const u8* v_rows, const u8* v_scales, u32 row, u32 column) {
    if constexpr (IS_CODES) {
        float scale = 1.0f;
        if constexpr (HAS_SCALES)
            scale = f16_to_f32(ld_shared(reinterpret_cast<const u16*>(v_scales + row * SCALE_BYTES + column / KV_BLOCK * 2)));
        return CodeRows::number(v_rows + row * V_PITCH, column, scale);
    }
    return stored_number(v_rows + place_of<V_PITCH>(row, column / 8) + column % 8 * 2);
}

// Copies rows of COLUMNS numbers, of which `columns` are there, of the keys that `there` has; zeros of others. `offset` is the offset of
// the lane's key in bytes, that of key `lane % 16`.
template <u32 COLUMNS, u32 PITCH>
QG_DEVICE void copy_rows(const u8* base, u64 offset, u32 there, u32 columns, bool wide, u8* to) {
    const u32 lane = thread_index() % 32;
    constexpr u32 CHUNKS = bytes_of(COLUMNS) / 16;
    static_assert(TILE * CHUNKS % 32 == 0, "every lane copies as many chunks");
#pragma unroll
    for (u32 i = 0; i < TILE * CHUNKS / 32; i++) {
        const u32 row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const u32 low = shfl_idx_u32((u32)offset, row), high = shfl_idx_u32((u32)(offset >> 32), row);
        const u8* from = base + ((u64)high << 32 | low) + chunk * 16;
        const u32 place = place_of<PITCH>(row, chunk);
        const bool is_there = there >> row & 1u;
        if (wide) {
            const bool wanted = is_there && chunk * 16 < bytes_of(columns);
            cp_async_16_or_zeros(wanted, shared_address(to + place), wanted ? from : base);
        } else {
            // Rows of bytes may begin at multiples of eight, rows of nibbles at multiples of four.
            constexpr u32 STEP = KV_BITS == 4 ? 4 : 8;
#pragma unroll
            for (u32 half = 0; half < 16; half += STEP) {
                const bool wanted = is_there && chunk * 16 + half < bytes_of(columns);
                if constexpr (STEP == 4)
                    cp_async_4(to + place + half, wanted ? from + half : base, wanted ? 4 : 0);
                else
                    cp_async_8(to + place + half, wanted ? from + half : base, wanted ? 8 : 0);
            }
        }
    }
}

// Copies the scales of the lane's key, or in the upper lanes those of its value: `bytes` bytes from `from` on, and zeros behind them; zeros
// where the key is not there. Not `wide`: scales begin anywhere, and are there when this returns.
QG_DEVICE void copy_scales(const u8* base, const u8* from, bool is_there, u32 bytes, bool wide, u8* to) {
    if (!wide) {
#pragma unroll
        for (u32 i = 0; i < SCALE_BYTES; i += 2) {
            const u32 scale = is_there && i < bytes ? ld_global_u16(from + i) : 0;
            st_shared(reinterpret_cast<u16*>(to + i), (u16)scale);
        }
    } else if constexpr (SCALE_BYTES == 4) {
        cp_async_4(to, is_there ? from : base, is_there ? bytes : 0);
    } else {
        cp_async_8(to, is_there ? from : base, is_there ? bytes : 0);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_attention_decode(const __grid_constant__ KernelParams p) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, g = lane / 4, t = lane % 4;
    u8* ring = reinterpret_cast<u8*>(dynamic_shared()) + warp * RING_BYTES;
    u32 cta = cta_index().x;
    const u32 row_cta = cta % p.at.row_ctas;
    cta /= p.at.row_ctas;
    const u32 part = cta % p.at.parts;
    cta /= p.at.parts;
    const u32 kv_head = cta % p.shape.kv_heads;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Sequence s = sequence_of(p, cta / p.shape.kv_heads);
    const u32 heads = p.shape.heads / p.shape.kv_heads;
    const u32 first_row = row_cta * ROWS, all_rows = s.queries * heads;
    if (first_row >= all_rows) return;
    const u32 last_row = least(first_row + ROWS, all_rows) - 1;
    const u32 part_first = part * p.at.part_keys;
    KeyRange keys = keys_seen_by(p, s, first_row / heads, last_row / heads);
    keys = {most(keys.first, part_first), least(keys.end, part_first + p.at.part_keys)};
    // Nobody reads the partial result of a part that no row sees anything of.
    if (p.at.parts > 1 && keys.first >= keys.end) return;
    // What all rows see.
    const KeyRange of_all = {keys_seen(p, s, last_row / heads).first, keys_seen(p, s, first_row / heads).end};

    const u64 k_first = kv_head * p.at.k_head, v_first = kv_head * p.at.v_head;
    const u8* k_base = reinterpret_cast<const u8*>(p.at.k) + Eight<QG_KV>::offset_of(k_first);
    const u8* v_base = reinterpret_cast<const u8*>(p.at.v) + Eight<QG_KV>::offset_of(v_first);
    const u64 all_strides = p.at.k_page | p.at.k_token | p.at.k_head | p.at.v_page | p.at.v_token | p.at.v_head;
    // Strides and features of blocks are whole chunks.
    const bool has_chunks = HAS_SCALES || (all_strides | p.shape.qk_dim | p.shape.v_dim) % 16 == 0;
    const bool wide = !IS_CODES || ((p.at.k | p.at.v) % 16 == 0 && has_chunks);
    const bool wide_scales = HAS_SCALES && ((p.at.k_scales | p.at.v_scales) % SCALES_ALIGNED == 0 && all_strides % QG_QK == 0);
    // Which keys of the tiles in flight are there: sixteen bits a stage, the oldest lowest.
    u64 masks = 0;
#ifdef QG_BITS
    // Which keys of them the row `lane % 16` sees: as many bits.
    u64 row_masks = 0;
    const u32 mask_row_number = least(first_row + lane % ROWS, last_row);
    const KeyRange mask_seen = keys_seen(p, s, mask_row_number / heads);
    const u8* mask = mask_row(p, s, kv_head * heads + mask_row_number % heads, mask_row_number / heads);
#endif
    const u32 first_tile = keys.first / TILE * TILE + warp * TILE;
    const auto copy_tile = [&](u32 tile, u32 slot, u32 place) {
        u64 k_element = 0, v_element = 0;
        const u32 key = tile + lane % TILE;
        bool is_there = key >= keys.first && key < keys.end;
#ifdef QG_BITS
        {
            const u32 first = tile / WORD_KEYS * WORD_KEYS;
            const u32 own = tile < keys.end ? mask_bits(p, mask, mask_seen, first) >> tile % WORD_KEYS & 0xffffu : 0;
            row_masks |= (u64)own << (16 * place);
            u32 any = own;
#pragma unroll
            for (u32 distance = 1; distance < ROWS; distance *= 2) any |= shfl_xor_u32(any, distance);
            is_there = is_there && (any >> lane % TILE & 1u);
        }
#endif
        if (is_there) {
            const KeyPlace at = place_of_key(p, s, key);
            is_there = at.is_there;
            k_element = at.page * p.at.k_page + at.row * p.at.k_token;
            v_element = at.page * p.at.v_page + at.row * p.at.v_token;
        }
        const u64 k_offset = Eight<QG_KV>::offset_of(k_element), v_offset = Eight<QG_KV>::offset_of(v_element);
        const u32 there = ballot(is_there) & 0xffffu;
        masks |= (u64)there << (16 * place);
        if (tile < keys.end) {
            u8* to = ring + slot * STAGE_BYTES;
            copy_rows<QG_QK, K_PITCH>(k_base, k_offset, there, p.shape.qk_dim, wide, to);
            copy_rows<QG_V, V_PITCH>(v_base, v_offset, there, p.shape.v_dim, wide, to + TILE * K_PITCH);
            if constexpr (HAS_SCALES) {
                const bool is_value = lane >= TILE;
                const u8* base = reinterpret_cast<const u8*>(is_value ? p.at.v_scales : p.at.k_scales);
                const u64 scale = (is_value ? v_first + v_element : k_first + k_element) / KV_BLOCK;
                const u32 bytes = (is_value ? p.shape.v_dim : p.shape.qk_dim) / KV_BLOCK * 2;
                copy_scales(base, base + scale * 2, is_there, bytes, wide_scales, to + SCALES_AT + lane * SCALE_BYTES);
            }
        }
        cp_async_commit_group();
    };
#pragma unroll
    for (u32 i = 0; i + 1 < QG_STAGES; i++) copy_tile(first_tile + i * WARPS * TILE, i, i);

    // The rows of this lane, the second eight below the first; those that are not there do as the last one.
    u32 q[QG_QK / MMA_K][4];
#ifndef QG_BITS
    KeyRange seen[2];
#endif
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 row = least(first_row + g + 8 * i, last_row);
#ifndef QG_BITS
        seen[i] = keys_seen(p, s, row / heads);
#endif
        const u64 token = s.token + row / heads;
        const u32 head = kv_head * heads + row % heads;
        const u8* from = reinterpret_cast<const u8*>(p.at.q) + (token * p.at.q_token + head * p.at.q_head) * 2;
        if constexpr (HAS_SCALES) {
#pragma unroll
            for (u32 block = 0; block < SCALES; block++) {
                u32 pairs[4];
                const u32 column = block * KV_BLOCK + t * 8;
                CodeRows::query_pairs(pairs, column < p.shape.qk_dim ? ld_global_v4(from + column * 2) : u32x4{0, 0, 0, 0});
#pragma unroll
                for (u32 pair = 0; pair < 4; pair++) q[block * 2 + pair / 2][pair % 2 * 2 + i] = pairs[pair];
            }
            continue;
        }
#pragma unroll
        for (u32 k = 0; k < QG_QK / MMA_K; k++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // Of E4M3, a lane reads sixteen neighbours of 64 features: Q's take the same places.
                const u32 column = IS_E4M3 ? k / 4 * 64 + t * 16 + k % 4 * 4 + half * 2 : k * MMA_K + half * 8 + t * 2;
                q[k][half * 2 + i] = column < p.shape.qk_dim ? ld_global_u32(from + column * 2) : 0;
            }
        }
    }
    float sums[V_TILES][4] = {};
    float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
    const float factor = key_factor(p, kv_head);

    u32 slot = 0;
    for (u32 tile = first_tile; tile < keys.end; tile += WARPS * TILE) {
        cp_async_wait_group<QG_STAGES - 2>();
        // The copies of all lanes are complete, and nobody reads the stage that is written next.
        warp_barrier();
        const u32 next_slot = slot == 0 ? QG_STAGES - 1 : slot - 1;
        copy_tile(tile + (QG_STAGES - 1) * WARPS * TILE, next_slot, QG_STAGES - 1);
        const u32 there = (u32)masks & 0xffffu;
        masks >>= 16;
#ifdef QG_BITS
        const u32 own_bits = (u32)row_masks & 0xffffu;
        row_masks >>= 16;
#endif
        const u8* k_rows = ring + slot * STAGE_BYTES;
        const u8* v_rows = k_rows + TILE * K_PITCH;
        const u8* k_scales = k_rows + SCALES_AT;
        const u8* v_scales = k_scales + TILE * SCALE_BYTES;
        slot = slot + 1 == QG_STAGES ? 0 : slot + 1;
#ifdef QG_BITS
        // No row sees a key of the tile.
        if (there == 0) continue;
        u32 row_bits[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) row_bits[i] = shfl_idx_u32(own_bits, g + 8 * i);
#endif

        float scores[2][4] = {};
        if constexpr (HAS_SCALES) {
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                // Those of two keys, which are neighbours.
                u32 scales[SCALES];
#pragma unroll
                for (u32 i = 0; i < SCALES; i += 2) {
                    const u32x2 v = ld_shared(reinterpret_cast<const u32x2*>(k_scales + (n * 8 + t * 2) * SCALE_BYTES + i * 4));
                    scales[i] = v.x, scales[i + 1] = v.y;
                }
#pragma unroll
                for (u32 block = 0; block < SCALES; block++) {
                    u32 pairs[4];
                    CodeRows::key_pairs(pairs, k_rows + (n * 8 + g) * K_PITCH, block, t);
                    float products[4] = {};
                    multiply_add<QG_X>(products, q[block * 2], pairs[0], pairs[1]);
                    multiply_add<QG_X>(products, q[block * 2 + 1], pairs[2], pairs[3]);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const float scale = f16_to_f32(scales[i % 2 * (SCALES / 2) + block / 2] >> (block % 2 * 16) & 0xffffu);
                        scores[n][i] = fma_f32(products[i], scale, scores[n][i]);
                    }
                }
            }
        } else if constexpr (IS_E4M3) {
#pragma unroll
            for (u32 block = 0; block < QG_QK / 64; block++) {
#pragma unroll
                for (u32 n = 0; n < 2; n++) {
                    const u32x4 codes =
                        ld_shared(reinterpret_cast<const u32x4*>(k_rows + (n * 8 + g) * K_PITCH + block * 64 + t * 16));
                    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
                    for (u32 k = 0; k < 4; k++)
                        multiply_add<QG_X>(scores[n], q[block * 4 + k], e4m3_operand(words[k]), e4m3_operand(words[k] >> 16));
                }
            }
        } else {
            const u32 row = lane / 16 * 8 + lane % 8;
#pragma unroll
            for (u32 k = 0; k < QG_QK / MMA_K; k++) {
                u32 b[4];
                ldmatrix_x4(b, k_rows + place_of<K_PITCH>(row, k * 2 + lane / 8 % 2));
                multiply_add<QG_X>(scores[0], q[k], b[0], b[1]);
                multiply_add<QG_X>(scores[1], q[k], b[2], b[3]);
            }
        }

        // Keys that some rows see and others do not.
#ifdef QG_BITS
        const bool is_mixed = ballot((own_bits & there) != there) != 0;
#else
        const u32 low = most(tile, keys.first), high = least(tile + TILE, keys.end);
        const bool is_mixed = low < of_all.first || high > of_all.end;
#endif
        const bool is_masked = is_mixed || there != 0xffffu;
        float above[2] = {largest[0], largest[1]};
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float& score = scores[n][i];
                score = bounded(p, score * factor);
                if (is_masked) {
                    const u32 column = n * MMA_N + t * 2 + i % 2;
#ifdef QG_BITS
                    const bool is_seen = row_bits[i / 2] >> column & 1u;
#else
                    const u32 key = tile + column;
                    const bool is_seen = key >= seen[i / 2].first && key < seen[i / 2].end;
#endif
                    if (!is_seen || !(there >> column & 1u)) score = minus_infinity();
                }
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
        for (u32 n = 0; n < 2; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                scores[n][i] = ex2_approx(scores[n][i] - base[i / 2]);
                total[i / 2] += scores[n][i];
            }
        }
        // The largest seldom changes.
        if (ballot(kept[0] != 1.0f || kept[1] != 1.0f) != 0) {
#pragma unroll
            for (u32 n = 0; n < V_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[n][i] *= kept[i / 2];
            }
        }

        // Scales of values, two a lane.
        bool is_large = false;
        if constexpr (HAS_SCALES)
            is_large = ballot(lane * 4 < TILE * SCALE_BYTES && may_overflow(ld_shared(reinterpret_cast<const u32*>(v_scales + lane * 4)))) != 0;
        if (is_mixed || is_large) {
            // A value that a row does not see may be no number, and one with a large scale may be too large for an operand: each row
            // adds those that it sees.
            for (u32 j = 0; j < TILE; j++) {
                if (!(there >> j & 1u)) continue;
                const u32 holder = g * 4 + j % 8 / 2, n = j / 8, odd = j % 2;
                float weight[2];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const float even_weight = n == 0 ? scores[0][2 * i] : scores[1][2 * i];
                    const float odd_weight = n == 0 ? scores[0][2 * i + 1] : scores[1][2 * i + 1];
                    weight[i] = bits_to_f32(shfl_idx_u32(f32_to_bits(odd ? odd_weight : even_weight), holder));
                }
#pragma unroll
                for (u32 m = 0; m < V_TILES; m++) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 own = t * 2 + i % 2, column = IS_CODES ? own * V_TILES + m : m * MMA_N + own;
#ifdef QG_BITS
                        const bool is_seen = row_bits[i / 2] >> j & 1u;
#else
                        const bool is_seen = tile + j >= seen[i / 2].first && tile + j < seen[i / 2].end;
#endif
                        if (is_seen)
                            sums[m][i] = fma_f32(weight[i / 2], value_of(v_rows, v_scales, j, column), sums[m][i]);
                    }
                }
            }
            continue;
        }
        const u32 a[4] = {rounded_pair(scores[0][0], scores[0][1]), rounded_pair(scores[0][2], scores[0][3]),
                          rounded_pair(scores[1][0], scores[1][1]), rounded_pair(scores[1][2], scores[1][3])};
        if constexpr (IS_CODES) {
            // Of each of four keys, the features `g · V / 8` and those after it: column g of all tiles.
            constexpr u32 WORDS = CodeRows::VALUE_WORDS, FEATURES = CodeRows::WORD_FEATURES;
            u32 codes[4][WORDS], scales[4] = {};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 row = t * 2 + i % 2 + i / 2 * 8;
                CodeRows::load_value(codes[i], v_rows + row * V_PITCH + bytes_of(g * V_TILES));
                if constexpr (HAS_SCALES)
                    scales[i] = ld_shared(reinterpret_cast<const u16*>(v_scales + row * SCALE_BYTES + g * V_TILES / KV_BLOCK * 2));
            }
            const u32 low_scales = scales[0] | scales[1] << 16, high_scales = scales[2] | scales[3] << 16;
#pragma unroll
            for (u32 word = 0; word < WORDS; word++) {
                u32 low[FEATURES], high[FEATURES];
                CodeRows::value_pairs(low, codes[0][word], codes[1][word], low_scales);
                CodeRows::value_pairs(high, codes[2][word], codes[3][word], high_scales);
#pragma unroll
                for (u32 i = 0; i < FEATURES; i++) multiply_add<VALUE_TYPE>(sums[word * FEATURES + i], a, low[i], high[i]);
            }
        } else {
#pragma unroll
            for (u32 n = 0; n < V_TILES; n += 2) {
                u32 b[4];
                ldmatrix_x4_trans(b, v_rows + place_of<V_PITCH>(lane % 16, n + lane / 16));
                multiply_add<VALUE_TYPE>(sums[n], a, b[0], b[1]);
                multiply_add<VALUE_TYPE>(sums[n + 1], a, b[2], b[3]);
            }
        }
    }

    // What is still in flight is nothing but zeros' groups; the ring's place is free then.
    cp_async_wait_group<0>();
    warp_barrier();
    WarpResult& own = *reinterpret_cast<WarpResult*>(ring);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 mask = 1; mask <= 2; mask *= 2) total[i] += shfl_xor(total[i], mask);
        const u32 row = g + 8 * i;
        if (t == 0) {
            st_shared(&own.largest[row], largest[i]);
            st_shared(&own.total[row], total[i]);
        }
#pragma unroll
        for (u32 n = 0; n < V_TILES; n++) {
            if constexpr (IS_CODES) {
                st_shared(&own.sums[row][t * 2 * V_TILES + n], sums[n][2 * i]);
                st_shared(&own.sums[row][(t * 2 + 1) * V_TILES + n], sums[n][2 * i + 1]);
            } else {
                st_shared(reinterpret_cast<f32x2*>(&own.sums[row][n * MMA_N + t * 2]), {sums[n][2 * i], sums[n][2 * i + 1]});
            }
        }
    }
    cta_barrier();
    // Eight threads a row.
    const u32 row = thread_index() / 8;
    if (first_row + row > last_row) return;
    const auto result_of = [&](u32 w) -> const WarpResult& {
        return *reinterpret_cast<const WarpResult*>(reinterpret_cast<const u8*>(dynamic_shared()) + w * RING_BYTES);
    };
    float most_of_all = minus_infinity(), all = 0.0f, weights[WARPS];
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        const float other = ld_shared(&result_of(w).largest[row]);
        most_of_all = other > most_of_all ? other : most_of_all;
    }
    const float base = most_of_all == minus_infinity() ? 0.0f : most_of_all;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        weights[w] = ex2_approx(ld_shared(&result_of(w).largest[row]) - base);
        all += weights[w] * ld_shared(&result_of(w).total[row]);
    }
    const u64 token = s.token + (first_row + row) / heads;
    const u32 head = kv_head * heads + (first_row + row) % heads;
    const bool is_partial = p.at.parts > 1;
    const float scale = is_partial ? 1.0f : all == 0.0f ? 0.0f : value_factor(p, kv_head) / all;
    float* to = is_partial ? partial_result(p, token, head, part) : nullptr;
#pragma unroll
    for (u32 c = thread_index() % 8 * 8; c < QG_V; c += 64) {
        float values[8] = {};
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            const f32x4* from = reinterpret_cast<const f32x4*>(&result_of(w).sums[row][c]);
            const f32x4 low = ld_shared(from), high = ld_shared(from + 1);
            const float others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++) values[i] = fma_f32(weights[w], others[i], values[i]);
        }
        if (c >= p.shape.v_dim) continue;
#pragma unroll
        for (u32 i = 0; i < 8; i++) values[i] *= scale;
        if (is_partial) {
            st_global_f32x4(reinterpret_cast<f32x4*>(to + 4 + c), {values[0], values[1], values[2], values[3]});
            st_global_f32x4(reinterpret_cast<f32x4*>(to + 8 + c), {values[4], values[5], values[6], values[7]});
        } else {
            store_results(p, token * p.at.d_token + head * p.at.d_head + c, values);
        }
    }
    if (thread_index() % 8 != 0) return;
    if (is_partial)
        st_global_f32x4(reinterpret_cast<f32x4*>(to), {most_of_all, all, 0.0f, 0.0f});
    else if (p.shape.flags & QG_FLAG_LSE)
        st_global_f32(reinterpret_cast<float*>(p.at.lse) + token * p.shape.heads + head, log_sum_exp(most_of_all, all));
}
