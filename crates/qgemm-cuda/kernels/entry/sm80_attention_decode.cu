// Attention of few queries by matrix instructions, of keys as they are or in codes: the heads that share keys are the rows of one tile, so
// that keys are read once for all of them. A CTA has sixteen rows, of codes eight, and a part of the keys; its warps take tiles of them in
// turn, each with a softmax of its own and a ring of keys and values in flight, and meet the others only at the end, where results are added
// up in order.
// Of pairs (QG_PAIRS), a CTA has eight rows of each of two heads of keys, and two warps, of a head each, share a ring.
#include "atoms/ldmatrix.cuh"
#include "mainloop/attention_decode_queries.cuh"
#include "mainloop/attention_decode_store.cuh"

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
constexpr u32 PARKED_AT = ALL_RINGS;
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
            scale = f16_to_f32(ld_shared(reinterpret_cast<const u16*>(v_scales + row * SCALE_PITCH + column / KV_BLOCK * 2)));
        return CodeRows::number(at, column, scale);
    }
    return stored_number(at);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
#ifdef QG_PAIRS
    qg_attention_decode(const __grid_constant__ TmaParams params) {
    const KernelParams& p = params.attention;
#else
    qg_attention_decode(const __grid_constant__ KernelParams p) {
#endif
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, g = lane / 4, t = lane % 4;
    u8* const rings = reinterpret_cast<u8*>(dynamic_shared());
    u8* own_ring = rings + warp * RING_BYTES;
    // Where weights are turned round.
#ifdef QG_PAIRS
    u8* scratch = rings + WEIGHTS_AT + warp * WEIGHT_BYTES;
    TileRing::set_up(rings);
    cta_barrier();
#else
    u8* scratch = own_ring + SLOTS * SLOT_BYTES;
#endif
    griddepcontrol_launch_dependents();
    // What depends on no earlier launch is computed while that still runs. The compiler would do it behind the wait: one word of all of it has
    // to be there before.
    Work work = Work::of_shape(p, WorkPlace::of(p, cta_index().x));
    const WorkPlace& place = work.place;
    const u32 kv_head = place.kv_head + own_head(), heads = place.heads, first_row = place.first_row;
    KeyRange keys = work.keys(p);
#ifdef QG_PAIRS
    TileRing ring(params, work.s, keys, place.kv_head / KV_HEADS, rings);
#else
    TileRing ring(p, work.s, keys, kv_head, own_ring);
#endif
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
#ifdef QG_PAIRS
    const u32 first_tile = keys.first / TILE * TILE + own_group() * TILE;
    const auto fill_ring = [&] { ring.fill(first_tile); };
#else
    const u32 first_tile = keys.first / TILE * TILE + warp * TILE;
    // Of few tiles, what follows the first keys is asked for when these are there, which come sooner so, and are multiplied while values come.
    constexpr u32 FEW_TILES = IS_CODES ? 1 : IS_TURNED ? 2 : 0;
    const bool has_few_tiles = FEW_TILES != 0 && first_tile + FEW_TILES * WARPS * TILE >= keys.end;
    const auto fill_ring = [&] {
        if (ring.has_pages) ring.ask_pages(first_tile);
#pragma unroll 1
        for (u32 i = 0; i < SLOTS; i += 2) {
            ring.copy_keys(first_tile + i / 2 * WARPS * TILE, i);
            if (has_few_tiles) break;
            if (i + 1 < SLOTS) ring.copy_values(i + 1);
        }
    };
#endif
    // What is loaded behind copies waits for them. Queries that have to be computed with before keys are multiplied come first.
    QueryOperands q;
    if constexpr (CodeRows::HAS_KEY_OFFSET) q.load(p, work);
    fill_ring();
    if constexpr (!CodeRows::HAS_KEY_OFFSET) q.load(p, work);
#ifndef QG_BITS
    KeyRange seen[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) seen[i] = keys_seen(p, s, least(first_row + lane_row(i), last_row) / heads);
#endif
    if (thread_index() == 0) ParkedWork::of(p, work).park(parked);
#ifndef QG_BITS
    // Tiles before the first of these keys, and those that have one from the second on, have some that not all rows see.
    const KeyRange of_all = {keys_seen(p, s, work.last_query()).first, keys_seen(p, s, place.first_query).end};
    const u32 mixed_before = keys.first < of_all.first ? of_all.first : 0, mixed_from = keys.end > of_all.end ? of_all.end : ~0u;
#endif
    float sums[SUM_TILES][4] = {};
    float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
    // Without a soft cap, the factor of scores is one of the exponents; otherwise scores are multiplied with it before.
    const float key_product_factor = key_factor(p, kv_head) / CodeRows::KEY_UNIT;
    const bool has_plain_scores = !(p.shape.flags & QG_FLAG_SOFT_CAP) && key_product_factor > 0.0f;
    const float factor = has_plain_scores ? key_product_factor : 1.0f;

    // Products of the rows with the keys of a tile.
    const auto multiply_keys = [&](float (&scores)[SCORE_TILES][4], const u8* k_rows) {
        const u8* k_scales = k_rows + ring.template scales_at<false>();
        if constexpr (HAS_SCALES) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
                // Those of the lane's two keys.
                u32 scales[2][SCALES / 2];
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
#pragma unroll
                    for (u32 i = 0; i < SCALES / 2; i++)
                        scales[half][i] = ld_shared(reinterpret_cast<const u32*>(k_scales + (n * 16 + half * 8 + g) * SCALE_PITCH + i * 4));
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
                        multiply_add<QG_X>(products, a, q.b[block * 2 + half][0], q.b[block * 2 + half][1]);
                    }
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const float scale = f16_to_f32(scales[i / 2][block / 2] >> (block % 2 * 16) & 0xffffu);
                        scores[n][i] = fma_f32(products[i], scale, scores[n][i]);
                    }
                }
                if constexpr (CodeRows::HAS_KEY_OFFSET) {
                    // Rows are keys, and columns of A blocks, each twice. Behind the products, what it takes has registers.
                    u32 a[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u8* at = k_scales + (n * 16 + i % 2 * 8 + g) * SCALE_PITCH + t % SCALES * 2;
                        a[i] = f32_to_bits(f16_to_f32(ld_shared(reinterpret_cast<const u16*>(at))));
                    }
                    mma_m16n8k8_tf32(scores[n], a, q.offsets);
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
                        multiply_add<QG_X>(scores[n], a, q.b[block * 4 + k][0], q.b[block * 4 + k][1]);
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
                    multiply_add<QG_X>(scores[n], a, q.b[k][0], q.b[k][1]);
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
                    multiply_add<QG_X>(scores[pair * 2], q.b[k], b[0], b[1]);
                    multiply_add<QG_X>(scores[pair * 2 + 1], q.b[k], b[2], b[3]);
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
        if constexpr (SCALES == 4 && SCALE_PITCH > SCALE_BYTES) {
            const u32x2 low = ld_shared(reinterpret_cast<const u32x2*>(at)), high = ld_shared(reinterpret_cast<const u32x2*>(at + SCALE_PITCH));
            scales[0] = low.x, scales[1] = low.y, scales[2] = high.x, scales[3] = high.y;
        } else if constexpr (SCALES == 4) {
            const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(at));
            scales[0] = v.x, scales[1] = v.y, scales[2] = v.z, scales[3] = v.w;
        } else {
            const u32x2 v = ld_shared(reinterpret_cast<const u32x2*>(at));
            scales[0] = v.x, scales[1] = v.y;
        }
    };
    // Adds the values of a tile, times weights. Of a mixed tile, some rows see keys that others do not.
    const auto add_values = [&](float (&scores)[SCORE_TILES][4], const auto& is_seen, bool is_mixed, u32 there, const u8* v_rows) {
        const u8* v_scales = v_rows + ring.template scales_at<true>();
        bool is_apart = false;
        if constexpr (HAS_SCALES) {
            // A lane looks at those of its value.
#pragma unroll
            for (u32 i = 0; i < SCALE_BYTES; i += 4)
                is_apart = is_apart || may_overflow(ld_shared(reinterpret_cast<const u32*>(v_scales + lane * SCALE_PITCH + i)));
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
                load_scales(low_scales, v_scales + (pair * 16 + t * 2) * SCALE_PITCH);
                load_scales(high_scales, v_scales + (pair * 16 + 8 + t * 2) * SCALE_PITCH);
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
#ifndef QG_PAIRS
    if (has_few_tiles) {
        cp_async_wait_group<0>();
        ring.copy_values(1);
#pragma unroll
        for (u32 i = 2; i < SLOTS; i++) {
            const u32 next = first_tile + i / 2 * WARPS * TILE;
            if (i / 2 >= FEW_TILES || next >= keys.end)
                ring.copy_nothing(i % 2 == 0);
            else if (i % 2 == 0)
                ring.copy_keys(next, i);
            else
                ring.copy_values(i);
        }
    }
    u32 slot = 0;
    const auto next_slot = [&] { slot = slot + 1 == SLOTS ? 0 : slot + 1; };
    // In the slot that is free, the keys or values are copied whose turn it is.
    const auto copy_next = [&](u32 tile, bool of_keys) {
        const u32 next = tile + (SLOTS + 1) / 2 * WARPS * TILE;
        if (of_keys ? next >= keys.end : ring.tile >= keys.end)
            ring.copy_nothing(of_keys);
        else if (of_keys)
            ring.copy_keys(next, slot);
        else
            ring.copy_values(slot);
        next_slot();
    };
#endif
#pragma unroll 1
    for (u32 tile = first_tile; tile < keys.end; tile += KEY_GROUPS * TILE) {
#ifdef QG_PAIRS
        const u8* const k_rows = ring.wait();
        const u32 there = ring.there();
#else
        const u32 there = ring.there[0];
#endif
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
#ifdef QG_PAIRS
        if (is_any_seen) multiply_keys(scores, k_rows);
        ring.pass();
        if (is_any_seen) weigh_scores(scores, is_seen, is_mixed, there);
        ring.refill<true>(tile);
        const u8* const v_rows = ring.wait();
        if (is_any_seen) add_values(scores, is_seen, is_mixed, there, v_rows);
        ring.pass();
        ring.refill<false>(tile);
#else
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
#endif
    }
    // Exponents of the largest scores.
#pragma unroll
    for (u32 i = 0; i < 2; i++) largest[i] = largest[i] == minus_infinity() ? largest[i] : largest[i] * factor - WEIGHT_EXPONENT;

#ifdef QG_PAIRS
    // Results lie where other warps' codes did.
    cta_barrier();
#else
    // What is still in flight is nothing but zeros' groups; the ring's place is free then.
    cp_async_wait_group<0>();
    warp_barrier();
#endif
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
    const auto result_of = [&](u32 w, u32 head) -> const WarpResult& {
        w = w * KV_HEADS + head;
        return *reinterpret_cast<const WarpResult*>(reinterpret_cast<const u8*>(dynamic_shared()) + w * RING_BYTES);
    };
    const ParkedWork of_cta = ParkedWork::from(parked);
    const bool is_partial = of_cta.is_partial(p);
    // Which head of keys a row of the CTA's is of: those of the first, then those of the other.
    const auto head_of = [&](u32 i) -> u32 { return KV_HEADS > 1 && i >= of_cta.rows; };
    // Four columns a thread.
    constexpr u32 COLUMNS = 4, ROW_THREADS = QG_V / COLUMNS;
#pragma unroll 1
    for (u32 i = thread_index() / ROW_THREADS; i < KV_HEADS * of_cta.rows; i += QG_THREADS / ROW_THREADS) {
        const u32 head = head_of(i), row = i - head * of_cta.rows;
        const ParkedWork end = of_cta.of_head(head);
        const u32 c = thread_index() % ROW_THREADS * COLUMNS;
        f32x2 stats[KEY_GROUPS];
        f32x4 others[KEY_GROUPS];
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) stats[w] = ld_shared(&result_of(w, head).stats[row]);
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) others[w] = ld_shared(reinterpret_cast<const f32x4*>(&result_of(w, head).sums[row][c]));
        float most_of_all = minus_infinity(), all = 0.0f;
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) most_of_all = stats[w].x > most_of_all ? stats[w].x : most_of_all;
        const float base = most_of_all == minus_infinity() ? 0.0f : most_of_all;
        float values[COLUMNS] = {};
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) {
            const float weight = ex2_approx(stats[w].x - base);
            all += weight * stats[w].y;
            const float of_warp[COLUMNS] = {others[w].x, others[w].y, others[w].z, others[w].w};
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) values[j] = fma_f32(weight, of_warp[j], values[j]);
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
    u32* counter = reinterpret_cast<u32*>(p.at.workspace) + of_cta.tile;
    Ending& ending = *reinterpret_cast<Ending*>(reinterpret_cast<u8*>(dynamic_shared()) + ENDING_AT);
    // What a warp adds up first: its parts, and where their results are.
    PartRange of_row = {};
    PartResults results = {};
    const auto look_up = [&](u32 i) {
        const u32 head = head_of(i / ROW_WARPS), row = i / ROW_WARPS - head * of_cta.rows;
        if (row >= of_cta.rows) return;
        of_row = of_cta.parts_of_row(p, row);
        results = of_cta.of_head(head).results_of(p, row);
    };
    // The last warp, which arrives for all, has nothing to do above where there are few rows.
    if (warp == WARPS - 1) look_up(warp);
    if (!is_last_of(counter, of_cta.end_part - of_cta.first_part, &ending.is_last, [&] { look_up(warp); })) return;
#pragma unroll 1
    for (u32 i = warp; i < KV_HEADS * of_cta.rows * ROW_WARPS; i += WARPS) {
        if (i != warp) look_up(i);
        const u32 c = (i % ROW_WARPS * 32 + lane) * LANE_COLUMNS;
        const auto sums_of = PartSums<LANE_COLUMNS>::of(results, of_row, c, c < p.shape.v_dim, ending.weights[warp]);
        const u32 head = head_of(i / ROW_WARPS);
        store_row(p, of_cta.of_head(head), i / ROW_WARPS - head * of_cta.rows, c, sums_of.sums, sums_of.largest, sums_of.total);
    }
}
