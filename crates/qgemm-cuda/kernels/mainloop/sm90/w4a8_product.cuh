// The product of a consumer warpgroup: 64 rows of W, decoded to E4M3 in registers, and all tokens of the CTA, whose codes the
// instructions read from shared memory.
//
// The instructions start from zero wherever a scale of W or X ends, and their sums are added in f32, times both: while those of one group are
// added, and the operands of the next run are decoded, another group's instructions run.
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

// Tokens of an instruction: sums of more would leave too few registers for those of two groups. Instructions side by side.
constexpr u32 PART_M = 64, PARTS = QG_TILE_M / PART_M;
static_assert(PARTS * PART_M == QG_TILE_M, "instructions have all tokens");
// Accumulators of a lane in a part, in the order of an instruction's: 4j + 2r + c are those of its row r and of token 8j + 2t + c.
constexpr u32 SUMS = PART_M / 2;
// Groups of instructions in flight. Where scales end within a stage, there are registers for one beside the accumulators of 256 tokens.
constexpr u32 IN_FLIGHT = QG_TILE_M > 128 && RUNS > 1 ? 1 : 2;
static_assert(PARTS == 1 || PARTS % IN_FLIGHT == 0, "a part's groups have the registers of the same turn");
// Sets of operands. With one, which is all that there are registers for beside the accumulators of 256 tokens, a run's groups are complete before
// the next run is decoded, and the other warpgroup's instructions run meanwhile.
constexpr u32 OPERAND_SETS = QG_TILE_M > 128 ? 1 : 2;
static_assert(OPERAND_SETS == 2 || PARTS >= IN_FLIGHT, "a run fills the groups");
// Stages in one round of the loop, so that runs alternate between the sets, and groups between their registers.
constexpr u32 LOOP_STAGES = RUNS % 2 == 0 || OPERAND_SETS == 1 ? 1 : 2;

// For zero points that no nibble holds: the sums of X's codes over a run, of the tokens of a part.
struct TokenSums {
    float value[QG_ZERO_POINTS ? PART_M : 4];

    // By the warp, for itself. `x` are the part's tokens in a stage, of which those from `tokens` on are not there.
    QG_DEVICE void make(TokenSums& sums, const u8* x, u32 run, u32 tokens, u32 lane) {
        warp_barrier();
#pragma unroll 1
        for (u32 token = lane; token < PART_M; token += 32) {
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
    // Whether the upper nibble of a zero point of the warp's rows is not 0.
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

// A group of instructions: a run over the tokens of a part.
struct Group {
    float sums[SUMS];
    RowScales rows;
    // Where it reads X and its scales, until its sums are added. No later group reads the stage `frees`, where that is one.
    u32 stage, run, frees;

    // None yet: nothing is added, whose scales of X are those of a stage that is there.
    QG_DEVICE Group none(u32 stage) { return {{}, {}, stage, 0, QG_X_STAGES}; }

    // Begins sums = W · X. Code that touches sums or operands next must wait first.
    QG_DEVICE void start(Group& group, const RunOperands& operands, u64 x) {
        constexpr u32 STEP = INSTRUCTION_K >> 4;
        wgmma_fence_accumulators(group.sums);
        wgmma_fence();
        wgmma_k32_e4m3_e4m3<PART_M, 0>(group.sums, operands.a[0], x);
#pragma unroll
        for (u32 i = 1; i < RUN_STEPS; i++) wgmma_k32_e4m3_e4m3<PART_M, 1>(group.sums, operands.a[i], x + i * STEP);
        wgmma_commit_group();
    }
};

// From the tokens of a part to the next, in a descriptor.
constexpr u32 PART_STRIDE = PART_M * STAGE_K >> 4;

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

// The state of a work tile in a warp.
struct Product {
    // Of the caller, in the order of parts.
    float (&acc)[PARTS][SUMS];
    RunOperands operands[OPERAND_SETS];
    // Tokens from the first of the tile on.
    u32 tokens;

    // Adds the sums of a group that is complete, of the tokens of part `part`.
    QG_DEVICE void add(Product& product, Group& group, Pipeline& pipeline, TokenSums& token_sums, u32 part, u32 lane) {
        wgmma_fence_accumulators(group.sums);
        if (RowScales::exceeds_nibbles(group.rows)) {
            const u8* x = pipeline.x[group.stage] + part * PART_M * STAGE_K;
            const u32 before = part * PART_M, tokens = product.tokens > before ? product.tokens - before : 0;
            TokenSums::make(token_sums, x, group.run, tokens, lane);
            take_zero_points(group.sums, group.rows, token_sums.value, lane);
        }
        promote(product.acc[part], group.sums, group.rows, pipeline.scales[group.stage] + part * PART_M, lane);
        if (group.frees < QG_X_STAGES) Pipeline::release(pipeline, group.frees, lane);
    }

    // Adds the sums of all groups: those of the last parts.
    QG_DEVICE void add_all(Product& product, Group (&groups)[IN_FLIGHT], Pipeline& pipeline, TokenSums& token_sums, u32 lane) {
        wgmma_wait_group<0>();
#pragma unroll
        for (u32 turn = 0; turn < IN_FLIGHT; turn++)
            add(product, groups[turn], pipeline, token_sums, PARTS == 1 ? 0 : PARTS - IN_FLIGHT + turn, lane);
    }

    // Begins all groups of a stage, number NUMBER in a round of the loop, and adds the sums of those before; with one set of operands, of all.
    template <u32 NUMBER>
    QG_DEVICE void multiply_stage(Product& product, Group (&groups)[IN_FLIGHT], Pipeline& pipeline, TokenSums& token_sums,
                                  Position& at, const ColumnExchange& exchange, u32 warp, u32 lane) {
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
            const u32 number = NUMBER * RUNS + run, column = run * RUN_K;
            RunOperands& operands = product.operands[number % OPERAND_SETS];
            const RowScales rows = RowScales::of(k_tiles[column / QG_K_TILE], column % QG_K_TILE / QG_SUB_BLOCK);
            // The group before the last one read the same operands.
            if constexpr (PARTS == 1) {
                wgmma_wait_group<IN_FLIGHT - 1>();
                add(product, groups[number % IN_FLIGHT], pipeline, token_sums, 0, lane);
            }
            RunOperands::make(operands, k_tiles, run, rows, exchange);
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) {
                Group& group = groups[(number * PARTS + part) % IN_FLIGHT];
                if (OPERAND_SETS == 1 ? part >= IN_FLIGHT : PARTS > 1) {
                    wgmma_wait_group<IN_FLIGHT - 1>();
                    add(product, group, pipeline, token_sums, (part + PARTS - IN_FLIGHT) % PARTS, lane);
                }
                group.rows = rows, group.stage = at.stage, group.run = run;
                group.frees = run + 1 == RUNS && part + 1 == PARTS ? at.stage : QG_X_STAGES;
                Group::start(group, operands, x + part * PART_STRIDE + (column >> 4));
            }
            if constexpr (OPERAND_SETS == 1) add_all(product, groups, pipeline, token_sums, lane);
        }
        Position::next(at);
    }

    // Multiplies `count` stages. Groups of one begin while the last of the one before run.
    QG_DEVICE void multiply_stages(Product& product, u32 count, Pipeline& pipeline, TokenSums& token_sums, Position& at,
                                   const ColumnExchange& exchange, u32 warp, u32 lane) {
        Group groups[IN_FLIGHT];
        const auto begin = [&] {
            // What none adds is times a scale of X, which must be there.
            mbarrier_wait(&pipeline.full[at.stage], at.parity);
#pragma unroll
            for (u32 turn = 0; turn < IN_FLIGHT; turn++) groups[turn] = Group::none(at.stage);
        };
        begin();
#pragma unroll 1
        for (; count >= LOOP_STAGES; count -= LOOP_STAGES) {
            multiply_stage<0>(product, groups, pipeline, token_sums, at, exchange, warp, lane);
            if constexpr (LOOP_STAGES > 1)
                multiply_stage<1>(product, groups, pipeline, token_sums, at, exchange, warp, lane);
        }
        add_all(product, groups, pipeline, token_sums, lane);
        if (count == 0) return;
        begin();
        multiply_stage<0>(product, groups, pipeline, token_sums, at, exchange, warp, lane);
        add_all(product, groups, pipeline, token_sums, lane);
    }
};

// What sums of tokens are multiplied with in the end: units become numbers, and a scale a token acts here. Lanes have every 32nd token's.
struct TokenScales {
    float value[QG_TILE_M / 32];

    QG_DEVICE TokenScales load(const W4A8Params& params, u32 first_token, u32 lane) {
        TokenScales scales;
#pragma unroll
        for (u32 i = 0; i < QG_TILE_M / 32; i++) {
            scales.value[i] = E4M3_UNITS;
            if constexpr (QG_X_BLOCK_SCALES) continue;
            // Tokens beyond the last have any.
            const u32 m = params.gemm.shape.m, own = first_token + i * 32 + lane, token = own < m ? own : m - 1;
            const u8* at = reinterpret_cast<const u8*>(params.x.scales) + (u64)token * params.x.scales_row;
            scales.value[i] *= bits_to_f32(ld_global_u32(at));
        }
        return scales;
    }
    QG_DEVICE void apply(float (&acc)[PARTS][SUMS], const W4A8Params& params, u32 first_token, u32 lane) {
        const TokenScales scales = load(params, first_token, lane);
#pragma unroll
        for (u32 j = 0; j < QG_TILE_M / 8; j++) {
            float(&of_tokens)[4] = reinterpret_cast<float(&)[4]>(acc[j * 4 / SUMS][j * 4 % SUMS]);
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                float scale = E4M3_UNITS;
                if constexpr (!QG_X_BLOCK_SCALES)
                    scale = bits_to_f32(shfl_idx_u32(f32_to_bits(scales.value[j / 4]), j % 4 * 8 + lane % 4 * 2 + c));
                of_tokens[c] *= scale, of_tokens[2 + c] *= scale;
            }
        }
    }
};

// acc = W · X over a work tile's stages.
QG_DEVICE void multiply_tile(Accumulators& all, Pipeline& pipeline, Position& at, TokenSums& token_sums, const W4A8Params& params,
                             const WorkTile& work, u32 warp, u32 lane) {
    const ColumnExchange exchange = ColumnExchange::of_lane(lane);
    const u32 first_token = work.m_tile * QG_TILE_M, m = params.gemm.shape.m;
    float(&acc)[PARTS][SUMS] = reinterpret_cast<float(&)[PARTS][SUMS]>(all);
    all = {};
    Product product = {acc, {}, m - first_token};
    const u32 count = work.end - work.begin;
    if constexpr (OPERAND_SETS == 1) {
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            Group groups[IN_FLIGHT];
            Product::multiply_stage<0>(product, groups, pipeline, token_sums, at, exchange, warp, lane);
        }
    } else {
        Product::multiply_stages(product, count, pipeline, token_sums, at, exchange, warp, lane);
    }
    TokenScales::apply(acc, params, first_token, lane);
}
