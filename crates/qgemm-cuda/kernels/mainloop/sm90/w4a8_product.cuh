// The product of a consumer warpgroup: 64 rows of W, decoded to E4M3 in registers, and all tokens of the CTA, whose codes the
// instructions read from shared memory.
//
// The instructions start from zero wherever a scale of W or X ends, and their sums are added in f32, times both.
#pragma once
#include "atoms/float.cuh"
#include "atoms/wgmma_fp8.cuh"
#include "mainloop/sm90/e4m3_weights.cuh"
#include "mainloop/sm90/w4a8_pipeline.cuh"
#include "mainloop/warp_tile.cuh"

// Columns of an instruction; columns of a run, which share scales, and its instructions.
constexpr u32 INSTRUCTION_K = 32, RUN_K = QG_SUB_BLOCK < STAGE_K ? QG_SUB_BLOCK : STAGE_K;
constexpr u32 RUNS = STAGE_K / RUN_K, RUN_STEPS = RUN_K / INSTRUCTION_K;
constexpr u32 K_TILE_STEPS = QG_K_TILE / INSTRUCTION_K;
static_assert(RUNS * RUN_K == STAGE_K && RUN_STEPS * INSTRUCTION_K == RUN_K, "runs are whole instructions");
static_assert(ROW_TILES == 1, "a warp has the rows of an instruction");

// Tokens of an instruction, and instructions side by side, one after another: sums of 128 tokens leave too few registers beside
// the accumulators of 256 (80 bytes spilled).
constexpr u32 PART_M = QG_TILE_M == 128 ? 128 : 64, PARTS = QG_TILE_M / PART_M;
static_assert(PARTS * PART_M == QG_TILE_M, "instructions have all tokens");
// Accumulators of a lane in a part, in the order of an instruction's: 4j + 2r + c are those of its row r and of token 8j + 2t + c.
constexpr u32 SUMS = PART_M / 2;

// For zero points that no nibble holds: the sums of X's codes over a run, of all tokens.
struct TokenSums {
    float value[QG_ZERO_POINTS ? QG_TILE_M : 4];

    // By the warp, for itself. `x` is the stage, whose tokens from `tokens` on are not there.
    QG_DEVICE void make(TokenSums& sums, const u8* x, u32 run, u32 tokens, u32 lane) {
        warp_barrier();
#pragma unroll 1
        for (u32 token = lane; token < QG_TILE_M; token += 32) {
            float sum = 0.0f;
#pragma unroll 1
            for (u32 word = run * RUN_K / 4; token < tokens && word < (run + 1) * RUN_K / 4; word++) {
                const u32 at = token * STAGE_K + (word / 4 ^ token % 8) * 16 + word % 4 * 4;
                const u32 codes = ld_shared(reinterpret_cast<const u32*>(x + at));
#pragma unroll
                for (u32 i = 0; i < 4; i++) sum += e4m3_to_f32(codes >> (8 * i) & 0xffu);
            }
            st_shared(&sums.value[token], sum);
        }
        warp_barrier();
    }
};

// What the lane's two rows have in a run.
struct RowScales {
    float scale[2];
    u32 zero_point[2];

    QG_DEVICE RowScales of(const KTile& k_tile, u32 sub) {
        RowScales s;
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            s.scale[row] = Dequant::scale(k_tile, row, sub);
            s.zero_point[row] = zero_point_of<Dequant>(k_tile, row, sub);
        }
        return s;
    }
    QG_DEVICE bool exceeds_nibbles(const RowScales& s) {
        return QG_ZERO_POINTS && ballot((s.zero_point[0] | s.zero_point[1]) > 15) != 0;
    }
};

// The A operands of a run. Their registers belong to the instructions until these are complete.
struct RunOperands {
    u32 a[RUN_STEPS][4];

    QG_DEVICE void make(RunOperands& operands, const KTile (&k_tiles)[STAGE_K_TILES], u32 run, const RowScales& rows,
                        const ColumnExchange& exchange) {
        const u32 offset[2] = {offset_bytes(rows.zero_point[0]), offset_bytes(rows.zero_point[1])};
#pragma unroll
        for (u32 i = 0; i < RUN_STEPS; i++) {
            const u32 step = run * RUN_STEPS + i;
            weights_e4m3(operands.a[i], k_tiles[step / K_TILE_STEPS], step % K_TILE_STEPS, offset, exchange);
            wgmma_fence_operand(operands.a[i]);
        }
    }
};

// From the tokens of a part to the next, in a descriptor.
constexpr u32 PART_STRIDE = PART_M * STAGE_K >> 4;

// sums = W · X over a run. Waits for the instructions.
QG_DEVICE void multiply_run(float (&sums)[SUMS], const RunOperands& operands, u64 x) {
    constexpr u32 STEP = INSTRUCTION_K >> 4;
    wgmma_fence_accumulators(sums);
    wgmma_fence();
    wgmma_k32_e4m3_e4m3<PART_M, 0>(sums, operands.a[0], x);
#pragma unroll
    for (u32 i = 1; i < RUN_STEPS; i++) wgmma_k32_e4m3_e4m3<PART_M, 1>(sums, operands.a[i], x + i * STEP);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(sums);
}

// acc += sums · scales, of the rows and, where X has them for 128 columns, of the tokens.
QG_DEVICE void promote(float (&acc)[SUMS], const float (&sums)[SUMS], const RowScales& rows, const float* x_scales, u32 lane) {
#pragma unroll
    for (u32 j = 0; j < SUMS / 4; j++) {
        f32x2 x = {1.0f, 1.0f};
        if constexpr (QG_X_BLOCK_SCALES) x = ld_shared(reinterpret_cast<const f32x2*>(x_scales + j * 8 + lane % 4 * 2));
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            float(&of_row)[2] = reinterpret_cast<float(&)[2]>(acc[j * 4 + row * 2]);
            const float* sum = &sums[j * 4 + row * 2];
            of_row[0] = fma_f32(QG_X_BLOCK_SCALES ? x.x * rows.scale[row] : rows.scale[row], sum[0], of_row[0]);
            of_row[1] = fma_f32(QG_X_BLOCK_SCALES ? x.y * rows.scale[row] : rows.scale[row], sum[1], of_row[1]);
        }
    }
}

// Takes the upper nibbles of zero points, times the sums of X, off the sums.
QG_DEVICE void take_zero_points(float (&sums)[SUMS], const RowScales& rows, const float* tokens, u32 lane) {
    float high[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) high[row] = (float)(rows.zero_point[row] & 0xf0u) * (-1.0f / E4M3_UNITS);
#pragma unroll
    for (u32 i = 0; i < SUMS; i++)
        sums[i] = fma_f32(high[i / 2 % 2], ld_shared(tokens + i / 4 * 8 + lane % 4 * 2 + i % 2), sums[i]);
}

// acc = W · X over a work tile's stages.
QG_DEVICE void multiply_tile(Accumulators& all, Pipeline& pipeline, Position& at, TokenSums& token_sums, const W4A8Params& params,
                             const WorkTile& work, u32 warp, u32 lane) {
    float(&acc)[PARTS][SUMS] = reinterpret_cast<float(&)[PARTS][SUMS]>(all);
    all = {};
    const ColumnExchange exchange = ColumnExchange::of_lane(lane);
    const u32 first_token = work.m_tile * QG_TILE_M, m = params.gemm.shape.m;
#pragma unroll 1
    for (u32 count = work.end - work.begin; count > 0; count--) {
        mbarrier_wait(&pipeline.full[at.stage], at.parity);
        KTile k_tiles[STAGE_K_TILES];
#pragma unroll
        for (u32 i = 0; i < STAGE_K_TILES; i++) {
            const u8* bytes = pipeline.w[at.stage][warp] + i * QG_K_TILE_BYTES;
            KTile::load_scales<FromShared>(k_tiles[i], bytes, lane);
#pragma unroll
            for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) KTile::load_codes<FromShared>(k_tiles[i], bytes, k_block, lane);
        }
        const u64 x = wgmma_descriptor_128b(pipeline.x[at.stage]);
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            const u32 column = run * RUN_K;
            const RowScales rows = RowScales::of(k_tiles[column / QG_K_TILE], column % QG_K_TILE / QG_SUB_BLOCK);
            RunOperands operands;
            RunOperands::make(operands, k_tiles, run, rows, exchange);
            const bool has_token_sums = RowScales::exceeds_nibbles(rows);
            if (has_token_sums) TokenSums::make(token_sums, pipeline.x[at.stage], run, m - first_token, lane);
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) {
                float sums[SUMS];
                multiply_run(sums, operands, x + part * PART_STRIDE + (column >> 4));
                if (has_token_sums) take_zero_points(sums, rows, token_sums.value + part * PART_M, lane);
                promote(acc[part], sums, rows, pipeline.scales[at.stage] + part * PART_M, lane);
            }
        }
        Pipeline::release(pipeline, at.stage, lane);
        Position::next(at);
    }
    // Units become numbers; a scale a token acts here, and tokens beyond the last have any.
#pragma unroll
    for (u32 i = 0; i < PARTS * SUMS; i++) {
        float factor = E4M3_UNITS;
        if constexpr (!QG_X_BLOCK_SCALES) {
            const u32 own = first_token + i / 4 * 8 + lane % 4 * 2 + i % 2, token = own < m ? own : m - 1;
            factor *= bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(params.x.scales) + (u64)token * params.x.scales_row));
        }
        acc[i / SUMS][i % SUMS] *= factor;
    }
}
