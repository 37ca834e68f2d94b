// Attention of few queries by matrix instructions: the heads that share keys are the rows of one m16 tile, so that keys are read once for
// all of them. A CTA has sixteen rows and a part of the keys; each of its warps goes through every fourth sixteen keys by itself, with a
// softmax of its own and a ring of keys and values in flight, and meets the others only at the end, where results are added up in order.
#include "atoms/cp_async.cuh"
#include "atoms/fp8.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "mainloop/attention_keys.cuh"

constexpr u32 ROWS = 16, TILE = 16, WARPS = QG_THREADS / 32;
constexpr u32 MMA_K = 16, MMA_N = 8;
constexpr bool IS_E4M3 = QG_KV == KV_E4M3;
constexpr u32 BYTES = IS_E4M3 ? 1 : 2;
// Plain rows have no gap: their sixteen-byte chunks are exchanged by the row's number, so that the eight rows of a matrix lie in different
// banks. Rows of E4M3 are read by lanes four rows or four chunks apart, which their pitches spread over the banks.
constexpr u32 K_PITCH = IS_E4M3 ? (QG_QK % 128 == 0 ? QG_QK + 64 : QG_QK) : QG_QK * 2;
constexpr u32 V_PITCH = IS_E4M3 ? QG_V + 16 : QG_V * 2;
constexpr u32 STAGE_BYTES = TILE * (K_PITCH + V_PITCH);
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

QG_DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    if constexpr (QG_X == DTYPE_BF16)
        mma_m16n8k16_bf16(d, a, b);
    else
        mma_m16n8k16_f16(d, a, b);
}

// Two numbers, rounded to the operands' type.
QG_DEVICE u32 rounded_pair(float low, float high) {
    return QG_X == DTYPE_BF16 ? f32_to_bf16x2(low, high) : f32_to_f16x2(low, high);
}

#if QG_VARIANT >= 89
// Two E4M3 numbers as operands, exactly.
QG_DEVICE u32 operand_pair(u32 codes) {
    const u32 pair = cvt_f16x2_e4m3x2(codes & 0xffffu);
    if constexpr (QG_X == DTYPE_F16) return pair;
    return f32_to_bf16x2(f16_to_f32(pair & 0xffffu), f16_to_f32(pair >> 16));
}
#endif

QG_DEVICE float stored_number(const u8* at) {
    if constexpr (IS_E4M3) return Eight<KV_E4M3>::e4m3_to_f32_or_nan(ld_shared(at));
    const u32 half = ld_shared(reinterpret_cast<const u16*>(at));
    return QG_X == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Where a chunk of a row of keys or values is.
template <u32 PITCH>
QG_DEVICE u32 place_of(u32 row, u32 chunk) {
    return row * PITCH + (IS_E4M3 ? chunk : chunk ^ (row & 7u)) * 16;
}
// A feature of a value.
QG_DEVICE u32 place_of_value(u32 row, u32 column) {
    return place_of<V_PITCH>(row, column * BYTES / 16) + column * BYTES % 16;
}

// Copies rows of COLUMNS numbers, of which `columns` are there, of the keys that `there` has; zeros of others. `offset` is the offset of
// the lane's key in bytes, that of key `lane % 16`.
template <u32 COLUMNS, u32 PITCH>
QG_DEVICE void copy_rows(const u8* base, u64 offset, u32 there, u32 columns, bool wide, u8* to) {
    const u32 lane = thread_index() % 32;
    constexpr u32 CHUNKS = COLUMNS * BYTES / 16;
#pragma unroll
    for (u32 i = 0; i < TILE * CHUNKS / 32; i++) {
        const u32 row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const u32 low = shfl_idx_u32((u32)offset, row), high = shfl_idx_u32((u32)(offset >> 32), row);
        const u8* from = base + ((u64)high << 32 | low) + chunk * 16;
        const u32 place = place_of<PITCH>(row, chunk);
        const bool is_there = there >> row & 1u;
        if (wide) {
            const bool wanted = is_there && chunk * 16 < columns * BYTES;
            cp_async_16_or_zeros(wanted, shared_address(to + place), wanted ? from : base);
        } else {
            // Rows of bytes may begin at multiples of eight.
#pragma unroll
            for (u32 half = 0; half < 16; half += 8) {
                const bool wanted = is_there && chunk * 16 + half < columns * BYTES;
                cp_async_8(to + place + half, wanted ? from + half : base, wanted ? 8 : 0);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_attention_decode(const __grid_constant__ AttentionParams p) {
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

    const u8* k_base = reinterpret_cast<const u8*>(p.at.k) + kv_head * p.at.k_head * BYTES;
    const u8* v_base = reinterpret_cast<const u8*>(p.at.v) + kv_head * p.at.v_head * BYTES;
    const u64 all_strides = p.at.k_page | p.at.k_token | p.at.k_head | p.at.v_page | p.at.v_token | p.at.v_head;
    const bool wide = !IS_E4M3 || ((p.at.k | p.at.v | all_strides) % 16 == 0 && (p.shape.qk_dim | p.shape.v_dim) % 16 == 0);
    // Which keys of the tiles in flight are there: sixteen bits a stage, the oldest lowest.
    u64 masks = 0;
    const u32 first_tile = keys.first / TILE * TILE + warp * TILE;
    const auto copy_tile = [&](u32 tile, u32 slot, u32 place) {
        u64 k_offset = 0, v_offset = 0;
        const u32 key = tile + lane % TILE;
        bool is_there = key >= keys.first && key < keys.end;
        if (is_there) {
            const KeyPlace at = place_of_key(p, s, key);
            is_there = at.is_there;
            k_offset = (at.page * p.at.k_page + at.row * p.at.k_token) * BYTES;
            v_offset = (at.page * p.at.v_page + at.row * p.at.v_token) * BYTES;
        }
        const u32 there = ballot(is_there) & 0xffffu;
        masks |= (u64)there << (16 * place);
        if (tile < keys.end) {
            u8* to = ring + slot * STAGE_BYTES;
            copy_rows<QG_QK, K_PITCH>(k_base, k_offset, there, p.shape.qk_dim, wide, to);
            copy_rows<QG_V, V_PITCH>(v_base, v_offset, there, p.shape.v_dim, wide, to + TILE * K_PITCH);
        }
        cp_async_commit_group();
    };
#pragma unroll
    for (u32 i = 0; i + 1 < QG_STAGES; i++) copy_tile(first_tile + i * WARPS * TILE, i, i);

    // The rows of this lane, the second eight below the first; those that are not there do as the last one.
    u32 q[QG_QK / MMA_K][4];
    KeyRange seen[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 row = least(first_row + g + 8 * i, last_row);
        seen[i] = keys_seen(p, s, row / heads);
        const u64 token = s.token + row / heads;
        const u32 head = kv_head * heads + row % heads;
        const u8* from = reinterpret_cast<const u8*>(p.at.q) + (token * p.at.q_token + head * p.at.q_head) * 2;
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
        const u8* k_rows = ring + slot * STAGE_BYTES;
        const u8* v_rows = k_rows + TILE * K_PITCH;
        slot = slot + 1 == QG_STAGES ? 0 : slot + 1;

        float scores[2][4] = {};
        if constexpr (IS_E4M3) {
#if QG_VARIANT >= 89
#pragma unroll
            for (u32 block = 0; block < QG_QK / 64; block++) {
#pragma unroll
                for (u32 n = 0; n < 2; n++) {
                    const u32x4 codes =
                        ld_shared(reinterpret_cast<const u32x4*>(k_rows + (n * 8 + g) * K_PITCH + block * 64 + t * 16));
                    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
                    for (u32 k = 0; k < 4; k++)
                        multiply_add(scores[n], q[block * 4 + k], operand_pair(words[k]), operand_pair(words[k] >> 16));
                }
            }
#endif
        } else {
            const u32 row = lane / 16 * 8 + lane % 8;
#pragma unroll
            for (u32 k = 0; k < QG_QK / MMA_K; k++) {
                u32 b[4];
                ldmatrix_x4(b, k_rows + place_of<K_PITCH>(row, k * 2 + lane / 8 % 2));
                multiply_add(scores[0], q[k], b[0], b[1]);
                multiply_add(scores[1], q[k], b[2], b[3]);
            }
        }

        // Keys that some rows see and others do not.
        const u32 low = most(tile, keys.first), high = least(tile + TILE, keys.end);
        const bool is_mixed = low < of_all.first || high > of_all.end;
        const bool is_masked = is_mixed || there != 0xffffu;
        float above[2] = {largest[0], largest[1]};
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float& score = scores[n][i];
                score = bounded(p, score * factor);
                if (is_masked) {
                    const u32 column = n * MMA_N + t * 2 + i % 2, key = tile + column;
                    const bool is_seen = key >= seen[i / 2].first && key < seen[i / 2].end;
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

        if (is_mixed) {
            // A value that a row does not see may be no number: each row adds those that it sees.
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
                        const u32 own = t * 2 + i % 2, column = IS_E4M3 ? own * V_TILES + m : m * MMA_N + own;
                        const bool is_seen = tile + j >= seen[i / 2].first && tile + j < seen[i / 2].end;
                        if (is_seen)
                            sums[m][i] = fma_f32(weight[i / 2], stored_number(v_rows + place_of_value(j, column)), sums[m][i]);
                    }
                }
            }
            continue;
        }
        const u32 a[4] = {rounded_pair(scores[0][0], scores[0][1]), rounded_pair(scores[0][2], scores[0][3]),
                          rounded_pair(scores[1][0], scores[1][1]), rounded_pair(scores[1][2], scores[1][3])};
        if constexpr (IS_E4M3) {
#if QG_VARIANT >= 89
            // Of each of four keys, the features `g · V / 8` and those after it: column g of all tiles.
            constexpr u32 WORDS = QG_V / 32;
            u32 codes[4][WORDS];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u8* from = v_rows + (t * 2 + i % 2 + i / 2 * 8) * V_PITCH + g * (QG_V / 8);
                if constexpr (WORDS == 4) {
                    const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(from));
                    codes[i][0] = v.x, codes[i][1] = v.y, codes[i][2] = v.z, codes[i][3] = v.w;
                } else {
                    const u32x2 v = ld_shared(reinterpret_cast<const u32x2*>(from));
                    codes[i][0] = v.x, codes[i][1] = v.y;
                }
            }
#pragma unroll
            for (u32 word = 0; word < WORDS; word++) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    // Pairs of neighbouring keys, of two features.
                    const u32 selector = half ? 0x7362 : 0x5140;
                    const u32 low_keys = prmt(codes[0][word], codes[1][word], selector);
                    const u32 high_keys = prmt(codes[2][word], codes[3][word], selector);
                    const u32 n = word * 4 + half * 2;
                    multiply_add(sums[n], a, operand_pair(low_keys), operand_pair(high_keys));
                    multiply_add(sums[n + 1], a, operand_pair(low_keys >> 16), operand_pair(high_keys >> 16));
                }
            }
#endif
        } else {
#pragma unroll
            for (u32 n = 0; n < V_TILES; n += 2) {
                u32 b[4];
                ldmatrix_x4_trans(b, v_rows + place_of<V_PITCH>(lane % 16, n + lane / 16));
                multiply_add(sums[n], a, b[0], b[1]);
                multiply_add(sums[n + 1], a, b[2], b[3]);
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
            if constexpr (IS_E4M3) {
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
