// Decode attention: S = Q · Kᵀ of a tile.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "attention/sm80/decode_queries.cuh"

// Adds the products of Q and a
// K tile. `k_scales`: the block
// scales of its keys.
QG_DEVICE void multiply_keys(float (&scores)[SCORE_TILES][4], const QueryOperands& q, const u8* k_rows, const u8* k_scales) {
    const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
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
}
