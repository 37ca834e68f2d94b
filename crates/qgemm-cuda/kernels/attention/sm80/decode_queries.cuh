// Decode attention: Q fragments in registers.
#pragma once
#include "attention/sm80/decode_tile.cuh"

// Q fragments of a lane. Rows beyond the last repeat
// the last row. With eight rows, Q is operand B: a lane
// loads one row and holds scores of two other rows.
struct QueryOperands {
    // [MMA k-step][register]: operand B
    // has two registers, operand A four.
    u32 b[QG_QK / MMA_K][4];
    // Correction of Q4_0 scores: the sum of row `g` over block
    // `t`, times `-KEY_OFFSET`, split into two TF32 numbers.
    u32 offsets[2];

    __device__ __forceinline__ void load(const KernelParams& p, const Work& work) {
        constexpr u32 LANE_ROWS = ROWS / 8;
        const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4, heads = work.place.heads;
#pragma unroll
        for (u32 i = 0; i < LANE_ROWS; i++) {
            const u32 row = least(work.place.first_row + g + 8 * i, work.last_row());
            const u64 token = work.s.token + row / heads;
            const u32 head = (work.place.kv_head + own_head()) * heads + row % heads;
            const u8* from = reinterpret_cast<const u8*>(p.at.q) + (token * p.at.q_token + head * p.at.q_head) * 2;
            if constexpr (HAS_SCALES) {
#pragma unroll
                for (u32 block = 0; block < SCALES; block++) {
                    u32 pairs[4];
                    const u32 column = block * KV_BLOCK + t * 8;
                    CodeRows::query_pairs(pairs, column < p.shape.qk_dim ? ld_global_v4(from + column * 2) : u32x4{0, 0, 0, 0});
#pragma unroll
                    for (u32 pair = 0; pair < 4; pair++) b[block * 2 + pair / 2][pair % 2] = pairs[pair];
                }
                continue;
            }
#pragma unroll
            for (u32 k = 0; k < QG_QK / MMA_K; k++) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    // E4M3: a lane reads 16 adjacent bytes of
                    // 64 features, so Q is permuted alike.
                    const u32 column = IS_E4M3 ? k / 4 * 64 + t * 16 + k % 4 * 4 + half * 2 : k * MMA_K + half * 8 + t * 2;
                    b[k][half * LANE_ROWS + i] = column < p.shape.qk_dim ? ld_global_u32(from + column * 2) : 0;
                }
            }
        }
        if constexpr (CodeRows::HAS_KEY_OFFSET) find_offsets(g);
    }

    // Sums Q over each block with one MMA: column `2 · block`
    // of B has ones, so lane `t` receives the sum of block `t`.
    __device__ __forceinline__ void find_offsets(u32 g) {
        float of_block[4] = {};
#pragma unroll
        for (u32 k = 0; k < QG_QK / MMA_K; k++) {
            const bool is_own = g == k * MMA_K / KV_BLOCK * 2;
            const u32 a[4] = {b[k][0], 0, b[k][1], 0};
            multiply_add<QG_X>(of_block, a, is_own ? CodeRows::ONES : 0, is_own ? CodeRows::UPPER_ONES : 0);
        }
        const float offset = of_block[0] * -CodeRows::KEY_OFFSET;
        // Round both to nearest: truncation
        // would lose two bits of f32.
        offsets[0] = f32_to_tf32(offset);
        offsets[1] = f32_to_tf32(offset - bits_to_f32(offsets[0]));
    }
};
