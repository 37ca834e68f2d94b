// Decode attention with MMA, for plain and quantized K
// and V. The query heads of a KV head are the rows of
// one tile, so that keys are read once. A CTA has 16
// rows, or 8 for quantized keys, and a part of the keys
// (split-KV). Each warp has its own K tiles, softmax
// and ring; warps are combined in order at the end.
//
// With QG_PAIRS, a CTA has eight rows of each of two
// KV heads, and two warps, one per head, share a ring.
#include "atoms/ldmatrix.cuh"
#include "mainloop/attention_decode_queries.cuh"
#include "mainloop/attention_decode_store.cuh"

// Split-KV combine: columns per lane, and warps
// per row. Fewer warps have more registers each.
constexpr u32 LANE_COLUMNS = IS_TRANSPOSED || QG_V == 64 ? 2 : 4, ROW_WARPS = QG_V / LANE_COLUMNS / 32;

// Shared memory of the split-KV combine.
struct SplitKvCombine {
    u32 is_last;
    alignas(16) f32x4 weights[WARPS][PartSums<LANE_COLUMNS>::BATCH / 2];
};
constexpr u32 COMBINE_AT = (sizeof(WarpResult) + 15) / 16 * 16;
static_assert(COMBINE_AT + sizeof(SplitKvCombine) <= WARPS * RING_BYTES, "an ending takes the place of rings");
// The saved work follows the rings.
constexpr u32 SAVED_AT = ALL_RINGS;
static_assert(QG_SHARED_BYTES == SAVED_AT + SAVED_BYTES, "the host computes another size");

QG_DEVICE float stored_number(const u8* at) {
    const u32 half = ld_shared(reinterpret_cast<const u16*>(at));
    return QG_X == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Feature `column` of value row `row` of a slot, as f32.
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
#if QG_PAIRS
    qg_attention_decode(const __grid_constant__ TmaParams params) {
    const KernelParams& p = params.attention;
#else
    qg_attention_decode(const __grid_constant__ KernelParams p) {
#endif
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, g = lane / 4, t = lane % 4;
    u8* const rings = reinterpret_cast<u8*>(dynamic_shared());
    u8* own_ring = rings + warp * RING_BYTES;
    // Scratch of the warp to transpose P.
#if QG_PAIRS
    u8* scratch = rings + WEIGHTS_AT + warp * WEIGHT_BYTES;
    TileRing::set_up(rings);
    cta_barrier();
#else
    u8* scratch = own_ring + SLOTS * SLOT_BYTES;
#endif
    griddepcontrol_launch_dependents();
    // Overlap with the previous launch: compute everything
    // that does not depend on it before
    // griddepcontrol_wait. The store of `digest` keeps the
    // compiler from sinking the computation below the wait.
    Work work = Work::of_shape(p, WorkIndex::of(p, cta_index().x));
    const WorkIndex& place = work.place;
    const u32 kv_head = place.kv_head + own_head(), heads = place.heads, first_row = place.first_row;
    KeyRange keys = work.keys(p);
#if QG_PAIRS
    TileRing ring(params, work.s, keys, place.kv_head / KV_HEADS, rings);
#else
    TileRing ring(p, work.s, keys, kv_head, own_ring);
#endif
    u32* const saved = reinterpret_cast<u32*>(reinterpret_cast<u8*>(dynamic_shared()) + SAVED_AT);
    if (thread_index() == 0) st_shared(saved, work.digest(keys) ^ ring.digest());
    griddepcontrol_wait();
    if (Work::depends_on_operands(p)) {
        work = Work::of(p, place, sequence_of(p, place.sequence));
        keys = work.keys(p);
    }
    if (!work.has_rows()) return;
    const Sequence& s = work.s;
    const u32 last_row = work.last_row();
    // Parts without visible keys write no result. If no key
    // is visible at all, part 0 writes the empty result.
    if (keys.first >= keys.end && !work.is_first_of_no_keys()) return;

#if QG_BITS
    const u32 mask_row_number = least(first_row + lane % ROWS, last_row);
    ring.mask_range = visible_keys(p, s, mask_row_number / heads);
    ring.mask = mask_row(p, s, kv_head * heads + mask_row_number % heads, mask_row_number / heads);
#endif
#if QG_PAIRS
    const u32 first_tile = keys.first / TILE * TILE + own_group() * TILE;
    const auto fill_ring = [&] { ring.fill(first_tile); };
#else
    const u32 first_tile = keys.first / TILE * TILE + warp * TILE;
    // With few tiles, further copies start after
    // the first K tile has arrived. K comes
    // sooner, and QKᵀ overlaps with the copy of V.
    constexpr u32 FEW_TILES = IS_CODES ? 1 : IS_TRANSPOSED ? 2 : 0;
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
    // Loads issued after the copies wait for them. The
    // offset correction needs Q early, so it loads Q first.
    QueryOperands q;
    if constexpr (CodeRows::HAS_KEY_OFFSET) q.load(p, work);
    fill_ring();
    if constexpr (!CodeRows::HAS_KEY_OFFSET) q.load(p, work);
#if !QG_BITS
    KeyRange visible[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) visible[i] = visible_keys(p, s, least(first_row + lane_row(i), last_row) / heads);
#endif
    if (thread_index() == 0) SavedWork::of(p, work).save(saved);
#if !QG_BITS
    // Tiles that begin below `mixed_before`
    // or end above `mixed_from` need a mask.
    const KeyRange visible_to_all = {visible_keys(p, s, work.last_query()).first, visible_keys(p, s, place.first_query).end};
    const u32 mixed_before = keys.first < visible_to_all.first ? visible_to_all.first : 0, mixed_from = keys.end > visible_to_all.end ? visible_to_all.end : ~0u;
#endif
    float sums[SUM_TILES][4] = {};
    float row_max[2] = {minus_infinity(), minus_infinity()}, row_sum[2] = {0.0f, 0.0f};
    // Without a soft cap, the softmax applies the factor to
    // exponents. Otherwise `bounded` needs scaled scores.
    const float key_product_factor = key_factor(p, kv_head) / CodeRows::KEY_UNIT;
    const bool has_plain_scores = !(p.shape.flags & QG_FLAG_SOFT_CAP) && key_product_factor > 0.0f;
    const float factor = has_plain_scores ? key_product_factor : 1.0f;

    // S = Q · Kᵀ of a tile.
    const auto multiply_keys = [&](float (&scores)[SCORE_TILES][4], const u8* k_rows) {
        const u8* k_scales = k_rows + ring.template scales_at<false>();
        if constexpr (HAS_SCALES) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
                // Scales of the lane's two keys.
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
                    // Offset correction as a TF32 MMA: rows of A are keys, its
                    // columns are block scales, repeated for the two halves of the
                    // offset. It follows the products, when registers are free.
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
        } else if constexpr (IS_TRANSPOSED) {
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
    // Online softmax step: masks scores, turns them
    // into probabilities and rescales the accumulators.
    const auto softmax_step = [&](float (&scores)[SCORE_TILES][4], const auto& is_visible, bool is_mixed, u32 present) {
        if (!has_plain_scores) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) scores[n][i] = bounded(p, scores[n][i] * key_product_factor);
            }
        }
        if (is_mixed || present != ALL_PRESENT) {
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 column = n * TILE_KEYS + lane_key(i);
                    if (!is_visible(row_of(i), column) || !(present >> column & 1u)) scores[n][i] = minus_infinity();
                }
            }
        }
        float rescale[2];
        online_softmax(scores, rescale, row_max, row_sum, factor);
        // row_max seldom changes.
        if (ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) != 0) {
#pragma unroll
            for (u32 n = 0; n < SUM_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[n][i] *= rescale[row_of(i)];
            }
        }
    };
    // Scales of two adjacent values.
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
    // O += P · V of a tile. In a mixed tile,
    // some rows do not attend to all keys.
    const auto add_values = [&](float (&scores)[SCORE_TILES][4], const auto& is_visible, bool is_mixed, u32 present, const u8* v_rows) {
        const u8* v_scales = v_rows + ring.template scales_at<true>();
        bool is_row_by_row = false;
        if constexpr (HAS_SCALES) {
            // Each lane checks the scales of its value.
#pragma unroll
            for (u32 i = 0; i < SCALE_BYTES; i += 4)
                is_row_by_row = is_row_by_row || may_overflow(ld_shared(reinterpret_cast<const u32*>(v_scales + lane * SCALE_PITCH + i)));
            is_row_by_row = ballot(is_row_by_row) != 0;
        } else if (is_mixed) {
            is_row_by_row = has_not_finite(v_rows);
        }
        if (is_row_by_row) {
            // Slow path, row by row. V has infinities or NaN in
            // a mixed tile, or probability × scale may overflow
            // f16. Each row then adds only visible values, in
            // f32. The fast path would compute 0 · inf = NaN.
#pragma unroll 1
            for (u32 j = 0; j < TILE; j++) {
                // Shift the next tile's probabilities into place:
                // registers cannot be indexed at run time.
                if (j % TILE_KEYS == 0 && j != 0) {
#pragma unroll
                    for (u32 i = 0; i < (SCORE_TILES - 1) * 4; i++) scores[i / 4][i % 4] = scores[i / 4 + 1][i % 4];
                }
                if (!(present >> j & 1u)) continue;
                // A row has two probabilities in a lane: their
                // keys are adjacent, or eight apart if transposed.
                const bool is_second = IS_TRANSPOSED ? j / 8 % 2 : j % 2;
                const u32 holder = IS_TRANSPOSED ? j % 8 * 4 + t : g * 4 + j % 8 / 2;
                float weight[2];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const float own = is_second ? scores[0][IS_TRANSPOSED ? i + 2 : 2 * i + 1] : scores[0][IS_TRANSPOSED ? i : 2 * i];
                    weight[i] = bits_to_f32(shfl_idx_u32(f32_to_bits(own), holder));
                }
#pragma unroll
                for (u32 m = 0; m < SUM_TILES; m++) {
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        if (is_visible(row_of(i), j))
                            sums[m][i] = fma_f32(weight[row_of(i)], value_of(v_rows, v_scales, j, lane_feature(m, i)), sums[m][i]);
                    }
                }
            }
            return;
        }
        u32 weights[TILE / 16][2];
        if constexpr (IS_TRANSPOSED) {
            // Transpose P from [key][8 rows] to operand B.
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
                // ldmatrix.trans moves 16-bit units of several adjacent
                // codes. A lane receives the units of two keys.
                u32 low_scales[SCALES], high_scales[SCALES];
                load_scales(low_scales, v_scales + (pair * 16 + t * 2) * SCALE_PITCH);
                load_scales(high_scales, v_scales + (pair * 16 + 8 + t * 2) * SCALE_PITCH);
                // MMA tiles per 16-byte chunk; a chunk lies within one block.
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
                // A lane loads V / 8 features of four keys, from `g · V / 8`
                // on. They become rows g and g + 8 of all tiles.
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
            } else if constexpr (IS_TRANSPOSED) {
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
#if !QG_PAIRS
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
    // Refills the free slot with the next K or V tile in turn.
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
#if QG_PAIRS
        const u8* const k_rows = ring.wait();
        const u32 present = ring.present();
#else
        const u32 present = ring.present[0];
#endif
#if QG_BITS
        const u32 own_bits = ring.row_bits[0];
        u32 row_bits[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) row_bits[i] = shfl_idx_u32(own_bits, lane_row(i));
        const auto is_visible = [&](u32 i, u32 column) { return (bool)(row_bits[i] >> column & 1u); };
        const bool is_mixed = ballot((own_bits & present) != present) != 0;
        const bool any_visible = present != 0;
#else
        const auto is_visible = [&](u32 i, u32 column) { return tile + column >= visible[i].first && tile + column < visible[i].end; };
        const bool is_mixed = tile < mixed_before || tile + TILE > mixed_from;
        constexpr bool any_visible = true;
#endif
        float scores[SCORE_TILES][4] = {};
#if QG_PAIRS
        if (any_visible) multiply_keys(scores, k_rows);
        ring.pass();
        if (any_visible) softmax_step(scores, is_visible, is_mixed, present);
        ring.refill<true>(tile);
        const u8* const v_rows = ring.wait();
        if (any_visible) add_values(scores, is_visible, is_mixed, present, v_rows);
        ring.pass();
        ring.refill<false>(tile);
#else
        cp_async_wait_group<SLOTS - 1>();
        // Copies of all lanes are complete.
        warp_barrier();
        if (any_visible) multiply_keys(scores, own_ring + slot * SLOT_BYTES);
        // All lanes have read the slot.
        warp_barrier();
        copy_next(tile, SLOTS % 2 == 0);
        if (any_visible) softmax_step(scores, is_visible, is_mixed, present);
        cp_async_wait_group<SLOTS - 1>();
        warp_barrier();
        if (any_visible) add_values(scores, is_visible, is_mixed, present, own_ring + slot * SLOT_BYTES);
        warp_barrier();
        copy_next(tile, SLOTS % 2 != 0);
#endif
    }
    // row_max as a base-2 exponent.
#pragma unroll
    for (u32 i = 0; i < 2; i++) row_max[i] = row_max[i] == minus_infinity() ? row_max[i] : row_max[i] * factor - WEIGHT_EXPONENT;

#if QG_PAIRS
    // Results overwrite the codes of other warps.
    cta_barrier();
#else
    // Only empty groups are in flight;
    // after this the ring is free.
    cp_async_wait_group<0>();
    warp_barrier();
#endif
    WarpResult& own = *reinterpret_cast<WarpResult*>(own_ring);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 peer = FIRST_PEER; peer <= LAST_PEER; peer *= 2) row_sum[i] += shfl_xor(row_sum[i], peer);
        const u32 row = lane_row(i);
        if (IS_TRANSPOSED ? g == 0 : t == 0) st_shared(&own.stats[row], f32x2{row_max[i], row_sum[i]});
#pragma unroll
        for (u32 n = 0; n < SUM_TILES; n++) {
            const u32 first = IS_TRANSPOSED ? i : 2 * i, second = IS_TRANSPOSED ? i + 2 : 2 * i + 1;
            if constexpr (IS_TRANSPOSED && !IS_CODES) {
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
    const SavedWork of_cta = SavedWork::from(saved);
    const bool is_partial = of_cta.is_partial(p);
    // Head of the pair that row `i` belongs to: rows
    // of the first head, then rows of the second.
    const auto head_of = [&](u32 i) -> u32 { return KV_HEADS > 1 && i >= of_cta.rows; };
    // Four columns a thread.
    constexpr u32 COLUMNS = 4, ROW_THREADS = QG_V / COLUMNS;
#pragma unroll 1
    for (u32 i = thread_index() / ROW_THREADS; i < KV_HEADS * of_cta.rows; i += QG_THREADS / ROW_THREADS) {
        const u32 head = head_of(i), row = i - head * of_cta.rows;
        const SavedWork end = of_cta.of_head(head);
        const u32 c = thread_index() % ROW_THREADS * COLUMNS;
        f32x2 stats[KEY_GROUPS];
        f32x4 others[KEY_GROUPS];
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) stats[w] = ld_shared(&result_of(w, head).stats[row]);
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) others[w] = ld_shared(reinterpret_cast<const f32x4*>(&result_of(w, head).sums[row][c]));
        float cta_max = minus_infinity(), cta_sum = 0.0f;
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) cta_max = stats[w].x > cta_max ? stats[w].x : cta_max;
        const float base = cta_max == minus_infinity() ? 0.0f : cta_max;
        float values[COLUMNS] = {};
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) {
            const float weight = ex2_approx(stats[w].x - base);
            cta_sum += weight * stats[w].y;
            const float of_warp[COLUMNS] = {others[w].x, others[w].y, others[w].z, others[w].w};
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) values[j] = fma_f32(weight, of_warp[j], values[j]);
        }
        if (is_partial) {
            const PartResults results = end.results_of(p, row);
            f32x4 *header = results.headers + end.part, *sums = reinterpret_cast<f32x4*>(results.sums(end.part, c));
            if (!SavedWork::combines_in_kernel(p)) {
                header = end.result_of_launch(p, row);
                sums = header + 1 + c / 4;
            }
            if (c < p.shape.v_dim) st_global_f32x4(sums, {values[0], values[1], values[2], values[3]});
            if (c == 0) st_global_f32x4(header, {cta_max, cta_sum, 0.0f, 0.0f});
        } else {
            store_row(p, end, row, c, values, cta_max, cta_sum);
        }
    }
    if (!is_partial || !SavedWork::combines_in_kernel(p)) return;
    u32* counter = reinterpret_cast<u32*>(p.at.workspace) + of_cta.tile;
    SplitKvCombine& ending = *reinterpret_cast<SplitKvCombine*>(reinterpret_cast<u8*>(dynamic_shared()) + COMBINE_AT);
    // The first row that a warp combines:
    // its parts and partial results.
    PartRange of_row = {};
    PartResults results = {};
    const auto look_up = [&](u32 i) {
        const u32 head = head_of(i / ROW_WARPS), row = i / ROW_WARPS - head * of_cta.rows;
        if (row >= of_cta.rows) return;
        of_row = of_cta.parts_of_row(p, row);
        results = of_cta.of_head(head).results_of(p, row);
    };
    // The last warp arrives for the CTA, so it looks
    // up before. With few rows it was idle above.
    if (warp == WARPS - 1) look_up(warp);
    if (!is_last_of(counter, of_cta.end_part - of_cta.first_part, &ending.is_last, [&] { look_up(warp); })) return;
#pragma unroll 1
    for (u32 i = warp; i < KV_HEADS * of_cta.rows * ROW_WARPS; i += WARPS) {
        if (i != warp) look_up(i);
        const u32 c = (i % ROW_WARPS * 32 + lane) * LANE_COLUMNS;
        const auto sums_of = PartSums<LANE_COLUMNS>::of(results, of_row, c, c < p.shape.v_dim, ending.weights[warp]);
        const u32 head = head_of(i / ROW_WARPS);
        store_row(p, of_cta.of_head(head), i / ROW_WARPS - head * of_cta.rows, c, sums_of.sums, sums_of.row_max, sums_of.row_sum);
    }
}
