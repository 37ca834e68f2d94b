// Attention of few queries by matrix instructions, of keys as they are or in codes: the heads that share keys are the rows of one tile, so
// that keys are read once for all of them. A CTA has sixteen rows, of codes eight, and a part of the keys; its warps take tiles of them in
// turn, each with a softmax of its own and a ring of keys and values in flight, and meet the others only at the end, where results are added
// up in order.
#include "atoms/ldmatrix.cuh"
#include "atoms/max.cuh"
#include "mainloop/attention_decode_ring.cuh"
#include "mainloop/attention_decode_store.cuh"
#include "mainloop/attention_decode_work.cuh"

constexpr u32 MMA_K = 16, MMA_N = 8;
constexpr u32 V_TILES = QG_V / MMA_N, SUM_PITCH = QG_V + 4;
// Of eight rows, tiles of scores are those of sixteen keys by eight rows, and tiles of sums sixteen features by eight rows, so that no half
// of a tile is empty where groups of heads are small; otherwise, sixteen rows by eight keys or features.
static_assert(ROWS == 16 || IS_TURNED, "scores and sums are laid out for eight rows or sixteen");
constexpr u32 TILE_KEYS = IS_TURNED ? 16 : 8, SCORE_TILES = TILE / TILE_KEYS, SUM_TILES = IS_TURNED ? V_TILES / 2 : V_TILES;
// Of a tile, a lane has four scores and four sums, of two rows. This says which of both number `i` is of.
QG_DEVICE constexpr u32 row_of(u32 i) {
    return IS_TURNED ? i % 2 : i / 2;
}
// Which row of the CTA the first or second of them is.
QG_DEVICE u32 lane_row(u32 i) {
    const u32 lane = thread_index() % 32;
    return IS_TURNED ? lane % 4 * 2 + i : lane / 4 + 8 * i;
}
// Which key of a tile score `i` is of.
QG_DEVICE u32 lane_key(u32 i) {
    const u32 lane = thread_index() % 32;
    return IS_TURNED ? lane / 4 + i / 2 * 8 : lane % 4 * 2 + i % 2;
}
// Which feature sum `i` of tile `m` is of; sums 0 and 2, or 1 and 3, of codes are of neighbours.
QG_DEVICE u32 lane_feature(u32 m, u32 i) {
    const u32 g = thread_index() % 32 / 4, t = thread_index() % 4;
    if constexpr (!IS_TURNED) return m * MMA_N + t * 2 + i % 2;
    if constexpr (!IS_CODES) return m * 16 + g + i / 2 * 8;
    if constexpr (QG_KV == KV_Q8_0) return m * 16 + g * 2 + i / 2;
    if constexpr (QG_KV == KV_Q4_0) return m / 2 * 32 + g * 4 + m % 2 * 2 + i / 2;
    return g * V_TILES + m * 2 + i / 2;
}
// Lanes that have scores of the same rows differ in these bits.
constexpr u32 FIRST_PEER = IS_TURNED ? 4 : 1, LAST_PEER = IS_TURNED ? 16 : 2;

// What a warp leaves for the others, in the place of its ring.
struct WarpResult {
    float sums[ROWS][SUM_PITCH];
    // The largest exponent of each row and the sum of its weights.
    f32x2 stats[ROWS];
};
static_assert(sizeof(WarpResult) <= RING_BYTES, "results take the place of the ring");

// Columns of a lane that adds parts up, and warps that a row takes: few warps have more registers.
constexpr u32 LANE_COLUMNS = IS_TURNED || QG_V == 64 ? 2 : 4, ROW_WARPS = QG_V / LANE_COLUMNS / 32;

// What the CTA that adds parts up has in shared memory.
struct Ending {
    u32 is_last;
    alignas(16) f32x4 weights[WARPS][PartSums<LANE_COLUMNS>::BATCH / 2];
};
constexpr u32 ENDING_AT = (sizeof(WarpResult) + 15) / 16 * 16;
static_assert(ENDING_AT + sizeof(Ending) <= WARPS * RING_BYTES, "an ending takes the place of rings");
// Behind the rings, what the end needs to know.
constexpr u32 PARKED_AT = WARPS * RING_BYTES;
static_assert(QG_SHARED_BYTES == PARKED_AT + PARKED_BYTES, "the host computes another size");

QG_DEVICE float stored_number(const u8* at) {
    const u32 half = ld_shared(reinterpret_cast<const u16*>(at));
    return QG_X == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Feature `column` of value `row` of a slot.
QG_DEVICE float value_of(const u8* v_rows, const u8* v_scales, u32 row, u32 column) {
    const u32 byte = bytes_of(column);
    const u8* at = v_rows + value_place(row, byte / 16) + byte % 16;
    if constexpr (IS_CODES) {
        float scale = 1.0f;
        if constexpr (HAS_SCALES)
            scale = f16_to_f32(ld_shared(reinterpret_cast<const u16*>(v_scales + row * SCALE_BYTES + column / KV_BLOCK * 2)));
        return CodeRows::number(at, column, scale);
    }
    return stored_number(at);
}

// Scores become weights: powers of 2 of their products with `factor`, which is positive, less those of the largest so far. What sums so far
// are multiplied with is `kept`, which is 1 where the largest stays; `total` is the lane's share of the sum of weights.
QG_DEVICE void weigh(float (&scores)[SCORE_TILES][4], float (&kept)[2], float (&largest)[2], float (&total)[2], float factor) {
    // Two chains a row.
    float above[2][2] = {{largest[0], minus_infinity()}, {largest[1], minus_infinity()}};
#pragma unroll
    for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float& of_chain = above[row_of(i)][IS_TURNED ? i / 2 : i % 2];
            of_chain = max_f32(scores[n][i], of_chain);
        }
    }
    float base[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        float next = max_f32(above[row][0], above[row][1]);
#pragma unroll
        for (u32 peer = FIRST_PEER; peer <= LAST_PEER; peer *= 2) next = max_f32(shfl_xor(next, peer), next);
        // Of minus infinities no power is taken of a difference of two.
        base[row] = next == minus_infinity() ? 0.0f : next * factor;
        // The products of the same largest are the same, so that their difference is nothing.
        kept[row] = ex2_approx(largest[row] * factor - base[row]);
        base[row] -= WEIGHT_EXPONENT;
        largest[row] = next;
        total[row] *= kept[row];
    }
#pragma unroll
    for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            scores[n][i] = ex2_approx(fma_f32(scores[n][i], factor, -base[row_of(i)]));
            total[row_of(i)] += scores[n][i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_attention_decode(const __grid_constant__ KernelParams p) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, g = lane / 4, t = lane % 4;
    u8* own_ring = reinterpret_cast<u8*>(dynamic_shared()) + warp * RING_BYTES;
    // Where weights are turned round.
    u8* scratch = own_ring + SLOTS * SLOT_BYTES;
    griddepcontrol_launch_dependents();
    // What depends on no earlier launch is computed while that still runs. The compiler would do it behind the wait: one word of all of it has
    // to be there before.
    Work work = Work::of_shape(p, WorkPlace::of(p, cta_index().x));
    const WorkPlace& place = work.place;
    const u32 kv_head = place.kv_head, heads = place.heads, first_row = place.first_row;
    KeyRange keys = work.keys(p);
    TileRing ring(p, work.s, keys, kv_head, own_ring);
    u32* const parked = reinterpret_cast<u32*>(reinterpret_cast<u8*>(dynamic_shared()) + PARKED_AT);
    if (thread_index() == 0) st_shared(parked, work.digest(keys) ^ ring.digest());
    griddepcontrol_wait();
    if (Work::depends_on_operands(p)) {
        work = Work::of(p, place, sequence_of(p, place.sequence));
        keys = work.keys(p);
    }
    if (!work.has_rows()) return;
    const Sequence& s = work.s;
    const u32 last_row = work.last_row();
    // Parts that no row sees anything of have no result; where there is no other, the first part's is that of no keys.
    if (keys.first >= keys.end && !work.is_first_of_none()) return;

#ifdef QG_BITS
    const u32 mask_row_number = least(first_row + lane % ROWS, last_row);
    ring.mask_seen = keys_seen(p, s, mask_row_number / heads);
    ring.mask = mask_row(p, s, kv_head * heads + mask_row_number % heads, mask_row_number / heads);
#endif
    const u32 first_tile = keys.first / TILE * TILE + warp * TILE;
    if (ring.has_pages) ring.ask_pages(first_tile);
#pragma unroll 1
    for (u32 i = 0; i < SLOTS; i += 2) {
        ring.copy_keys(first_tile + i / 2 * WARPS * TILE, i);
        if (i + 1 < SLOTS) ring.copy_values(i + 1);
    }

    // The rows of this lane; those that are not there do as the last one. Of eight, a lane multiplies one row and has scores of two others.
    constexpr u32 Q_ROWS = ROWS / 8;
    u32 q[QG_QK / MMA_K][4];
#ifndef QG_BITS
    KeyRange seen[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) seen[i] = keys_seen(p, s, least(first_row + lane_row(i), last_row) / heads);
#endif
#pragma unroll
    for (u32 i = 0; i < Q_ROWS; i++) {
        const u32 row = least(first_row + g + 8 * i, last_row);
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
                for (u32 pair = 0; pair < 4; pair++) q[block * 2 + pair / 2][pair % 2] = pairs[pair];
            }
            continue;
        }
#pragma unroll
        for (u32 k = 0; k < QG_QK / MMA_K; k++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // Of E4M3, a lane reads sixteen neighbours of 64 features: Q's take the same places.
                const u32 column = IS_E4M3 ? k / 4 * 64 + t * 16 + k % 4 * 4 + half * 2 : k * MMA_K + half * 8 + t * 2;
                q[k][half * Q_ROWS + i] = column < p.shape.qk_dim ? ld_global_u32(from + column * 2) : 0;
            }
        }
    }
    if (thread_index() == 0) ParkedWork::of(p, work).park(parked);
#ifndef QG_BITS
    // Tiles before the first of these keys, and those that have one from the second on, have some that not all rows see.
    const KeyRange of_all = {keys_seen(p, s, work.last_query()).first, keys_seen(p, s, place.first_query).end};
    const u32 mixed_before = keys.first < of_all.first ? of_all.first : 0, mixed_from = keys.end > of_all.end ? of_all.end : ~0u;
#endif
    float sums[SUM_TILES][4] = {};
    float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
    // Without a soft cap, the factor of scores is one of the exponents; otherwise scores are multiplied with it before.
    const float key_product_factor = key_factor(p, kv_head);
    const bool has_plain_scores = !(p.shape.flags & QG_FLAG_SOFT_CAP) && key_product_factor > 0.0f;
    const float factor = has_plain_scores ? key_product_factor : 1.0f;

    // Products of the rows with the keys of a tile.
    const auto multiply_keys = [&](float (&scores)[SCORE_TILES][4], const u8* k_rows) {
        const u8* k_scales = k_rows + ring.k.SCALES_AT;
        if constexpr (HAS_SCALES) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
                // Those of the lane's two keys.
                u32 scales[2][SCALES / 2];
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
#pragma unroll
                    for (u32 i = 0; i < SCALES / 2; i++)
                        scales[half][i] = ld_shared(reinterpret_cast<const u32*>(k_scales + (n * 16 + half * 8 + g) * SCALE_BYTES + i * 4));
                }
#pragma unroll
                for (u32 block = 0; block < SCALES; block++) {
                    const u32 byte = bytes_of(block * KV_BLOCK + t * CodeRows::KEY_FEATURES);
                    u32 low[4], high[4];
                    CodeRows::key_pairs(low, k_rows + key_place(n * 16 + g, byte / 16) + byte % 16);
                    CodeRows::key_pairs(high, k_rows + key_place(n * 16 + 8 + g, byte / 16) + byte % 16);
                    float products[4] = {};
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
                        const u32 a[4] = {low[half * 2], high[half * 2], low[half * 2 + 1], high[half * 2 + 1]};
                        multiply_add<QG_X>(products, a, q[block * 2 + half][0], q[block * 2 + half][1]);
                    }
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const float scale = f16_to_f32(scales[i / 2][block / 2] >> (block % 2 * 16) & 0xffffu);
                        scores[n][i] = fma_f32(products[i], scale, scores[n][i]);
                    }
                }
            }
        } else if constexpr (IS_E4M3) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
                for (u32 block = 0; block < QG_QK / 64; block++) {
                    u32 words[2][4];
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
                        const u8* at = k_rows + key_place(n * 16 + half * 8 + g, block * 4 + t);
                        const u32x4 codes = ld_shared(reinterpret_cast<const u32x4*>(at));
                        words[half][0] = codes.x, words[half][1] = codes.y, words[half][2] = codes.z, words[half][3] = codes.w;
                    }
#pragma unroll
                    for (u32 k = 0; k < 4; k++) {
                        const u32 low = words[0][k], high = words[1][k];
                        const u32 a[4] = {e4m3_operand<0>(low), e4m3_operand<0>(high), e4m3_operand<1>(low), e4m3_operand<1>(high)};
                        multiply_add<QG_X>(scores[n], a, q[block * 4 + k][0], q[block * 4 + k][1]);
                    }
                }
            }
        } else if constexpr (IS_TURNED) {
#pragma unroll
            for (u32 k = 0; k < QG_QK / MMA_K; k++) {
#pragma unroll
                for (u32 n = 0; n < SCORE_TILES; n++) {
                    u32 a[4];
                    ldmatrix_x4(a, k_rows + key_place(n * 16 + lane % 16, k * 2 + lane / 16));
                    multiply_add<QG_X>(scores[n], a, q[k][0], q[k][1]);
                }
            }
        } else {
            const u32 row = lane / 16 * 8 + lane % 8;
#pragma unroll
            for (u32 k = 0; k < QG_QK / MMA_K; k++) {
#pragma unroll
                for (u32 pair = 0; pair < TILE / 16; pair++) {
                    u32 b[4];
                    ldmatrix_x4(b, k_rows + key_place(pair * 16 + row, k * 2 + lane / 8 % 2));
                    multiply_add<QG_X>(scores[pair * 2], q[k], b[0], b[1]);
                    multiply_add<QG_X>(scores[pair * 2 + 1], q[k], b[2], b[3]);
                }
            }
        }
    };
    // Scores become weights; what was added up before is multiplied with what the largest so far has become.
    const auto weigh_scores = [&](float (&scores)[SCORE_TILES][4], const auto& is_seen, bool is_mixed, u32 there) {
        if (!has_plain_scores) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) scores[n][i] = bounded(p, scores[n][i] * key_product_factor);
            }
        }
        if (is_mixed || there != ALL_THERE) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 column = n * TILE_KEYS + lane_key(i);
                    if (!is_seen(row_of(i), column) || !(there >> column & 1u)) scores[n][i] = minus_infinity();
                }
            }
        }
        float kept[2];
        weigh(scores, kept, largest, total, factor);
        // The largest seldom changes.
        if (ballot(kept[0] != 1.0f || kept[1] != 1.0f) != 0) {
#pragma unroll
            for (u32 n = 0; n < SUM_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[n][i] *= kept[row_of(i)];
            }
        }
    };
    // The scales of a value and of the next.
    const auto load_scales = [&](u32 (&scales)[SCALES], const u8* at) {
        if constexpr (SCALES == 4) {
            const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(at));
            scales[0] = v.x, scales[1] = v.y, scales[2] = v.z, scales[3] = v.w;
        } else {
            const u32x2 v = ld_shared(reinterpret_cast<const u32x2*>(at));
            scales[0] = v.x, scales[1] = v.y;
        }
    };
    // Adds the values of a tile, times weights. Of a mixed tile, some rows see keys that others do not.
    const auto add_values = [&](float (&scores)[SCORE_TILES][4], const auto& is_seen, bool is_mixed, u32 there, const u8* v_rows) {
        const u8* v_scales = v_rows + ring.v.SCALES_AT;
        bool is_apart = false;
        if constexpr (HAS_SCALES) {
            // A lane looks at those of its value.
#pragma unroll
            for (u32 i = 0; i < SCALE_BYTES; i += 4)
                is_apart = is_apart || may_overflow(ld_shared(reinterpret_cast<const u32*>(v_scales + lane * SCALE_BYTES + i)));
            is_apart = ballot(is_apart) != 0;
        } else if (is_mixed) {
            is_apart = has_not_finite(v_rows);
        }
        if (is_apart) {
            // Where a row does not see a value that is no number, or one with a large scale may be too large for an operand, each row adds
            // those that it sees. Otherwise weights of nothing add nothing.
#pragma unroll 1
            for (u32 j = 0; j < TILE; j++) {
                // Weights of a tile move to the place of the first, so that registers have no index.
                if (j % TILE_KEYS == 0 && j != 0) {
#pragma unroll
                    for (u32 i = 0; i < (SCORE_TILES - 1) * 4; i++) scores[i / 4][i % 4] = scores[i / 4 + 1][i % 4];
                }
                if (!(there >> j & 1u)) continue;
                // Of two weights of a row, the second is of the key after the first, or eight after it.
                const bool is_second = IS_TURNED ? j / 8 % 2 : j % 2;
                const u32 holder = IS_TURNED ? j % 8 * 4 + t : g * 4 + j % 8 / 2;
                float weight[2];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const float own = is_second ? scores[0][IS_TURNED ? i + 2 : 2 * i + 1] : scores[0][IS_TURNED ? i : 2 * i];
                    weight[i] = bits_to_f32(shfl_idx_u32(f32_to_bits(own), holder));
                }
#pragma unroll
                for (u32 m = 0; m < SUM_TILES; m++) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        if (is_seen(row_of(i), j))
                            sums[m][i] = fma_f32(weight[row_of(i)], value_of(v_rows, v_scales, j, lane_feature(m, i)), sums[m][i]);
                    }
                }
            }
            return;
        }
        u32 weights[TILE / 16][2];
        if constexpr (IS_TURNED) {
            // Rows of eight weights of a key become columns.
#pragma unroll
            for (u32 i = 0; i < TILE / 8; i++) {
                const u32 pair = rounded_pair(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);
                st_shared(reinterpret_cast<u32*>(scratch + lane * 4 + i * 128), pair);
            }
            warp_barrier();
            u32 columns[4];
            ldmatrix_x4_trans(columns, scratch + lane % TILE * 16);
#pragma unroll
            for (u32 i = 0; i < TILE / 8; i++) weights[i / 2][i % 2] = columns[i];
        }
#pragma unroll
        for (u32 pair = 0; pair < TILE / 16; pair++) {
            if constexpr (HAS_SCALES) {
                // Neighbours of sixteen bits of a value are a column; a lane gets those of two keys.
                u32 low_scales[SCALES], high_scales[SCALES];
                load_scales(low_scales, v_scales + (pair * 16 + t * 2) * SCALE_BYTES);
                load_scales(high_scales, v_scales + (pair * 16 + 8 + t * 2) * SCALE_BYTES);
                // Of sixteen bytes of each, all of them in a block.
                constexpr u32 CHUNK_TILES = 128 / KV_BITS / 16;
#pragma unroll
                for (u32 chunk = 0; chunk < bytes_of(QG_V) / 16; chunk += 2) {
                    u32 both[4];
                    ldmatrix_x4_trans(both, v_rows + value_place(pair * 16 + lane % 16, chunk + lane / 16));
#pragma unroll
                    for (u32 of = 0; of < 2; of++) {
                        const u32 block = (chunk + of) * CHUNK_TILES / 2;
                        const u32 b[2] = {CodeRows::scaled_weights(weights[pair][0], low_scales, block),
                                          CodeRows::scaled_weights(weights[pair][1], high_scales, block)};
                        u32 low[4], high[4];
                        CodeRows::value_pairs(low, both[of * 2]);
                        CodeRows::value_pairs(high, both[of * 2 + 1]);
#pragma unroll
                        for (u32 i = 0; i < CodeRows::NEIGHBOURS; i += 2) {
                            const u32 a[4] = {low[i], low[i + 1], high[i], high[i + 1]};
                            multiply_add<VALUE_TYPE>(sums[(chunk + of) * CHUNK_TILES + i / 2], a, b[0], b[1]);
                        }
                    }
                }
            } else if constexpr (IS_CODES) {
                // Of each of four keys, the features `g · V / 8` and those after it: rows g and g + 8 of all tiles.
                constexpr u32 WORDS = CodeRows::VALUE_WORDS;
                u32 codes[4][WORDS];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 row = pair * 16 + t * 2 + i % 2 + i / 2 * 8, byte = bytes_of(g * V_TILES);
                    CodeRows::load_value(codes[i], v_rows + value_place(row, byte / 16) + byte % 16);
                }
#pragma unroll
                for (u32 word = 0; word < WORDS; word++) {
                    u32 low[4], high[4];
                    CodeRows::e4m3_pairs(low, codes[0][word], codes[1][word]);
                    CodeRows::e4m3_pairs(high, codes[2][word], codes[3][word]);
#pragma unroll
                    for (u32 i = 0; i < 4; i += 2) {
                        const u32 a[4] = {low[i], low[i + 1], high[i], high[i + 1]};
                        multiply_add<VALUE_TYPE>(sums[(word * 4 + i) / 2], a, weights[pair][0], weights[pair][1]);
                    }
                }
            } else if constexpr (IS_TURNED) {
#pragma unroll
                for (u32 n = 0; n < V_TILES; n += 2) {
                    u32 a[4];
                    ldmatrix_x4_trans(a, v_rows + value_place(pair * 16 + lane % 8 + lane / 16 * 8, n + lane / 8 % 2));
                    multiply_add<VALUE_TYPE>(sums[n / 2], a, weights[pair][0], weights[pair][1]);
                }
            } else {
                const float(&low)[4] = scores[pair * 2], (&high)[4] = scores[pair * 2 + 1];
                const u32 a[4] = {rounded_pair(low[0], low[1]), rounded_pair(low[2], low[3]), rounded_pair(high[0], high[1]),
                                  rounded_pair(high[2], high[3])};
#pragma unroll
                for (u32 n = 0; n < V_TILES; n += 2) {
                    u32 b[4];
                    ldmatrix_x4_trans(b, v_rows + value_place(pair * 16 + lane % 16, n + lane / 16));
                    multiply_add<VALUE_TYPE>(sums[n], a, b[0], b[1]);
                    multiply_add<VALUE_TYPE>(sums[n + 1], a, b[2], b[3]);
                }
            }
        }
    };
    u32 slot = 0;
    const auto next_slot = [&] { slot = slot + 1 == SLOTS ? 0 : slot + 1; };
    // In the slot that is free, the keys or values are copied whose turn it is.
    const auto copy_next = [&](u32 tile, bool of_keys) {
        if (of_keys)
            ring.copy_keys(tile + (SLOTS + 1) / 2 * WARPS * TILE, slot);
        else
            ring.copy_values(slot);
        next_slot();
    };
#pragma unroll 1
    for (u32 tile = first_tile; tile < keys.end; tile += WARPS * TILE) {
        const u32 there = ring.there[0];
#ifdef QG_BITS
        const u32 own_bits = ring.row_bits[0];
        u32 row_bits[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) row_bits[i] = shfl_idx_u32(own_bits, lane_row(i));
        const auto is_seen = [&](u32 i, u32 column) { return (bool)(row_bits[i] >> column & 1u); };
        const bool is_mixed = ballot((own_bits & there) != there) != 0;
        const bool is_any_seen = there != 0;
#else
        const auto is_seen = [&](u32 i, u32 column) { return tile + column >= seen[i].first && tile + column < seen[i].end; };
        const bool is_mixed = tile < mixed_before || tile + TILE > mixed_from;
        constexpr bool is_any_seen = true;
#endif
        float scores[SCORE_TILES][4] = {};
        cp_async_wait_group<SLOTS - 1>();
        // The copies of all lanes are complete.
        warp_barrier();
        if (is_any_seen) multiply_keys(scores, own_ring + slot * SLOT_BYTES);
        // All lanes have read the slot.
        warp_barrier();
        copy_next(tile, SLOTS % 2 == 0);
        if (is_any_seen) weigh_scores(scores, is_seen, is_mixed, there);
        cp_async_wait_group<SLOTS - 1>();
        warp_barrier();
        if (is_any_seen) add_values(scores, is_seen, is_mixed, there, own_ring + slot * SLOT_BYTES);
        warp_barrier();
        copy_next(tile, SLOTS % 2 != 0);
    }
    // Exponents of the largest scores.
#pragma unroll
    for (u32 i = 0; i < 2; i++) largest[i] = largest[i] == minus_infinity() ? largest[i] : largest[i] * factor - WEIGHT_EXPONENT;

    // What is still in flight is nothing but zeros' groups; the ring's place is free then.
    cp_async_wait_group<0>();
    warp_barrier();
    WarpResult& own = *reinterpret_cast<WarpResult*>(own_ring);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 peer = FIRST_PEER; peer <= LAST_PEER; peer *= 2) total[i] += shfl_xor(total[i], peer);
        const u32 row = lane_row(i);
        if (IS_TURNED ? g == 0 : t == 0) st_shared(&own.stats[row], f32x2{largest[i], total[i]});
#pragma unroll
        for (u32 n = 0; n < SUM_TILES; n++) {
            const u32 first = IS_TURNED ? i : 2 * i, second = IS_TURNED ? i + 2 : 2 * i + 1;
            if constexpr (IS_TURNED && !IS_CODES) {
                st_shared(&own.sums[row][lane_feature(n, first)], sums[n][first]);
                st_shared(&own.sums[row][lane_feature(n, second)], sums[n][second]);
            } else {
                st_shared(reinterpret_cast<f32x2*>(&own.sums[row][lane_feature(n, first)]), {sums[n][first], sums[n][second]});
            }
        }
    }
    cta_barrier();
    const auto result_of = [&](u32 w) -> const WarpResult& {
        return *reinterpret_cast<const WarpResult*>(reinterpret_cast<const u8*>(dynamic_shared()) + w * RING_BYTES);
    };
    const ParkedWork end = ParkedWork::from(parked);
    const bool is_partial = end.is_partial(p);
    // Four columns a thread.
    constexpr u32 COLUMNS = 4, ROW_THREADS = QG_V / COLUMNS;
#pragma unroll 1
    for (u32 row = thread_index() / ROW_THREADS; row < end.rows; row += QG_THREADS / ROW_THREADS) {
        const u32 c = thread_index() % ROW_THREADS * COLUMNS;
        f32x2 stats[WARPS];
        f32x4 others[WARPS];
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) stats[w] = ld_shared(&result_of(w).stats[row]);
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) others[w] = ld_shared(reinterpret_cast<const f32x4*>(&result_of(w).sums[row][c]));
        float most_of_all = minus_infinity(), all = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) most_of_all = stats[w].x > most_of_all ? stats[w].x : most_of_all;
        const float base = most_of_all == minus_infinity() ? 0.0f : most_of_all;
        float values[COLUMNS] = {};
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            const float weight = ex2_approx(stats[w].x - base);
            all += weight * stats[w].y;
            const float of_warp[COLUMNS] = {others[w].x, others[w].y, others[w].z, others[w].w};
#pragma unroll
            for (u32 i = 0; i < COLUMNS; i++) values[i] = fma_f32(weight, of_warp[i], values[i]);
        }
        if (is_partial) {
            const PartResults results = end.results_of(p, row);
            f32x4 *header = results.headers + end.part, *sums = reinterpret_cast<f32x4*>(results.sums(end.part, c));
            if (!ParkedWork::adds_up(p)) {
                header = end.result_of_launch(p, row);
                sums = header + 1 + c / 4;
            }
            if (c < p.shape.v_dim) st_global_f32x4(sums, {values[0], values[1], values[2], values[3]});
            if (c == 0) st_global_f32x4(header, {most_of_all, all, 0.0f, 0.0f});
        } else {
            store_row(p, end, row, c, values, most_of_all, all);
        }
    }
    if (!is_partial || !ParkedWork::adds_up(p)) return;
    u32* counter = reinterpret_cast<u32*>(p.at.workspace) + end.tile;
    Ending& ending = *reinterpret_cast<Ending*>(reinterpret_cast<u8*>(dynamic_shared()) + ENDING_AT);
    // What a warp adds up first: its parts, and where their results are.
    PartRange of_row = {};
    PartResults results = {};
    const auto look_up = [&](u32 i) {
        const u32 row = i / ROW_WARPS;
        if (row >= end.rows) return;
        of_row = end.parts_of_row(p, row);
        results = end.results_of(p, row);
    };
    // The last warp, which arrives for all, has nothing to do above where there are few rows.
    if (warp == WARPS - 1) look_up(warp);
    if (!is_last_of(counter, end.end_part - end.first_part, &ending.is_last, [&] { look_up(warp); })) return;
#pragma unroll 1
    for (u32 i = warp; i < end.rows * ROW_WARPS; i += WARPS) {
        if (i != warp) look_up(i);
        const u32 c = (i % ROW_WARPS * 32 + lane) * LANE_COLUMNS;
        const auto sums_of = PartSums<LANE_COLUMNS>::of(results, of_row, c, c < p.shape.v_dim, ending.weights[warp]);
        store_row(p, end, i / ROW_WARPS, c, sums_of.sums, sums_of.largest, sums_of.total);
    }
}
