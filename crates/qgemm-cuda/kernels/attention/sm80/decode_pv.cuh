// Decode attention: O += P · V of a tile.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "attention/sm80/decode_softmax.cuh"

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

// Scales of two adjacent values.
QG_DEVICE void load_scales(u32 (&scales)[SCALES], const u8* at) {
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
}

// O += P · V of a tile. In a mixed tile,
// some rows do not attend to all keys.
// `scratch`: shared memory of
// the warp to transpose P.
template <class IsVisible>
QG_DEVICE void add_values(LaneRows& rows, float (&scores)[SCORE_TILES][4], const IsVisible& is_visible, bool is_mixed, u32 present,
                          const u8* v_rows, const u8* v_scales, u8* scratch) {
    const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    bool is_row_by_row = false;
    if constexpr (HAS_SCALES) {
        // Lanes check the scales of their values.
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
                        rows.sums[m][i] = fma_f32(weight[row_of(i)], value_of(v_rows, v_scales, j, lane_feature(m, i)), rows.sums[m][i]);
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
            // MMA tiles per 16-byte chunk,
            // which lies within one block.
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
                        multiply_add<VALUE_TYPE>(rows.sums[(chunk + of) * CHUNK_TILES + i / 2], a, b[0], b[1]);
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
                    multiply_add<VALUE_TYPE>(rows.sums[(word * 4 + i) / 2], a, weights[pair][0], weights[pair][1]);
                }
            }
        } else if constexpr (IS_TRANSPOSED) {
#pragma unroll
            for (u32 n = 0; n < V_TILES; n += 2) {
                u32 a[4];
                ldmatrix_x4_trans(a, v_rows + value_place(pair * 16 + lane % 8 + lane / 16 * 8, n + lane / 8 % 2));
                multiply_add<VALUE_TYPE>(rows.sums[n / 2], a, weights[pair][0], weights[pair][1]);
            }
        } else {
            const float(&low)[4] = scores[pair * 2], (&high)[4] = scores[pair * 2 + 1];
            const u32 a[4] = {rounded_pair(low[0], low[1]), rounded_pair(low[2], low[3]), rounded_pair(high[0], high[1]),
                              rounded_pair(high[2], high[3])};
#pragma unroll
            for (u32 n = 0; n < V_TILES; n += 2) {
                u32 b[4];
                ldmatrix_x4_trans(b, v_rows + value_place(pair * 16 + lane % 16, n + lane / 16));
                multiply_add<VALUE_TYPE>(rows.sums[n], a, b[0], b[1]);
                multiply_add<VALUE_TYPE>(rows.sums[n + 1], a, b[2], b[3]);
            }
        }
    }
}
