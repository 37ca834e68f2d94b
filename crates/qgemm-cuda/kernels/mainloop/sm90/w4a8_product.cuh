// The product of a consumer warpgroup: 64 rows of W, decoded to bytes in registers, and all tokens of the CTA, whose codes the
// instructions read from shared memory. Which bytes, and what sums they have, `e4m3_weights.cuh` or `s8_weights.cuh` says, included before.
//
// The instructions start from zero wherever a scale of W or X ends, and their sums are added in f32, times both, while the other warpgroup's
// instructions run.
#pragma once
#include "atoms/float.cuh"
#include "atoms/mma_fp8.cuh"
#include "mainloop/sm90/w4a8_pipeline.cuh"
#include "mainloop/warp_tile.cuh"

// Columns of an instruction; columns of a run, which share scales, and its instructions.
constexpr u32 INSTRUCTION_K = 32, RUN_K = QG_SUB_BLOCK < STAGE_K && !QG_TAKES_SCALES ? QG_SUB_BLOCK : STAGE_K;
constexpr u32 RUNS = STAGE_K / RUN_K, RUN_STEPS = RUN_K / INSTRUCTION_K;
static_assert(RUNS * RUN_K == STAGE_K && RUN_STEPS * INSTRUCTION_K == RUN_K, "runs are whole instructions");
static_assert(ROW_TILES == 1, "a warp has the rows of an instruction");

// Tokens of an instruction: sums of more would leave too few registers, and these do where runs follow one another in a stage. Instructions side
// by side.
constexpr u32 PART_M = QG_TILE_M < 128 ? QG_TILE_M : 128, PARTS = QG_TILE_M / PART_M;
static_assert(PARTS * PART_M == QG_TILE_M && (RUNS == 1 || PARTS == 1), "instructions have all tokens");
// Accumulators of a lane in a part, in the order of an instruction's: 4j + 2r + c are those of its row r and of token 8j + 2t + c.
constexpr u32 SUMS = PART_M / 2;
// Whether the first half of the next run is decoded behind the first part's sums, so that there is about as much to do behind every part.
// Meanwhile it lies in shared memory: there are no registers for it, and elsewhere the compiler decodes both halves at once (INT4, 4096 tokens
// on an H200: 454 us instead of 485 us). With scales of X for every stage halves gain nothing.
constexpr bool IN_HALVES = RUNS == 1 && PARTS > 1 && !QG_X_BLOCK_SCALES;
// Whether the two warpgroups take turns, with barriers of which the first is warpgroup 0's: where there is more to do behind a part than another
// part takes (the same with scales of X for every stage: 603 us instead of 652 us; MXFP4: 530 us instead of 613 us; but INT4 with a token's in
// halves 472 us). Shorter runs end before a turn has passed.
constexpr bool TAKES_TURNS = RUNS == 1 && (!IN_HALVES || QG_TAKES_SCALES);
constexpr u32 TURN = 2;
static_assert(QG_CONSUMERS == 256, "two warpgroups take turns");

#if !QG_SUMS_OF_X
// For what operands leave of zero points: the sums of X's codes over a run, of the tokens of a part.
struct TokenSums {
    Sum value[QG_ZERO_POINTS ? PART_M : 4];

    // By the warp, for itself. `x` are the part's tokens in a stage, of which those from `tokens` on are not there.
    QG_DEVICE void make(TokenSums& sums, const u8* x, u32 run, u32 tokens, u32 lane) {
        warp_barrier();
#pragma unroll 1
        for (u32 token = lane; token < PART_M; token += 32) {
            Sum sum = 0;
#pragma unroll 1
            for (u32 word = run * RUN_K / 4; token < tokens && word < (run + 1) * RUN_K / 4; word++) {
                const u32 at = token * STAGE_K + (word / 4 ^ token % 8) * 16 + word % 4 * 4;
                sum = add_codes(sum, ld_shared(reinterpret_cast<const u32*>(x + at)));
            }
            st_shared(&sums.value[token], sum);
        }
        warp_barrier();
    }
};
#else
static_assert(RUNS == 1, "a producer adds the codes of a stage up");
struct TokenSums {};
#endif

// What the lane's two rows have in a run.
struct RowScales {
    float scale[2];
    // Whether one of the warp's rows has what operands do not: a part of a zero point, or a scale far from the largest.
    bool exceeds;
};

// The A operands of a run. Their registers belong to the instructions until these are complete.
struct RunOperands {
    u32 a[RUN_STEPS][4];

    QG_DEVICE void fence(RunOperands& operands) {
#pragma unroll
        for (u32 step = 0; step < RUN_STEPS; step++) wgmma_fence_operand(operands.a[step]);
    }
};

// The records of k-tile `tile` of a stage.
QG_DEVICE KTile records_of(const u8* k_tiles, u32 tile, u32 lane) {
    KTile k_tile;
    KTile::load_scales<FromShared>(k_tile, k_tiles + tile * QG_K_TILE_BYTES, lane);
    return k_tile;
}

// What a run's operands are made with, and its sums multiplied.
struct RunRows {
    RowScales scales;
    RowCodes codes[2];

    QG_DEVICE RunRows of(const u8* k_tiles, u32 run, u32 lane) {
        RunRows rows = {};
        bool exceeds = false;
#if !QG_TAKES_SCALES
        const u32 column = run * RUN_K, sub = column % QG_K_TILE / QG_SUB_BLOCK;
        const KTile records = records_of(k_tiles, column / QG_K_TILE, lane);
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const u32 zero_point = Dequant::zero_point(records, row, sub);
            rows.codes[row] = RowCodes::of(zero_point);
            rows.scales.scale[row] = Dequant::scale(records, row, sub);
            exceeds |= RowCodes::leaves(zero_point);
        }
#else
        static_assert(RUN_STEPS == 4, "a run's exponents are a word");
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            u32 exponents = 0, largest = 0;
#pragma unroll
            for (u32 step = 0; step < RUN_STEPS; step++) {
                const u32 exponent = exponent_of(k_tiles, row, step, lane);
                exponents |= exponent << (8 * step);
                largest = exponent > largest ? exponent : largest;
            }
            rows.codes[row] = {exponents, largest};
            rows.scales.scale[row] = scale_of_power(largest, HALF_EXPONENT);
#pragma unroll
            for (u32 step = 0; step < RUN_STEPS; step++) exceeds |= RowCodes::is_far(rows.codes[row], step);
        }
#endif
        rows.scales.exceeds = ballot(exceeds) != 0;
        return rows;
    }
#if QG_TAKES_SCALES
    // The scale of the columns of instruction `step` of a stage.
    QG_DEVICE u32 exponent_of(const u8* k_tiles, u32 row, u32 step, u32 lane) {
        const u32 column = step * INSTRUCTION_K;
        const KTile records = records_of(k_tiles, column / QG_K_TILE, lane);
        return KTile::Scales0::byte(records.scales0, row, column % QG_K_TILE / QG_SUB_BLOCK);
    }
#endif
};

// Instructions of a k-block, and k-blocks of a stage that a run has columns of.
constexpr u32 BLOCK_STEPS = K_BLOCK / INSTRUCTION_K, RUN_BLOCKS = RUN_STEPS > BLOCK_STEPS ? RUN_STEPS / BLOCK_STEPS : 1;

// K-block `block` of a stage.
QG_DEVICE KTile block_of(const u8* k_tiles, u32 block, const ColumnPlace& place) {
    return columns_of(k_tiles + block / K_BLOCKS * QG_K_TILE_BYTES, block % K_BLOCKS, place);
}
// Makes the operands of those of a run's instructions that block number `block` of it has. Columns with scales far from a row's largest are left
// out (`add_far_columns`).
QG_DEVICE void decode(RunOperands& operands, KTile words, u32 run, u32 block, const RunRows& rows) {
    constexpr u32 STEPS = RUN_STEPS < BLOCK_STEPS ? RUN_STEPS : BLOCK_STEPS;
#if QG_TAKES_SCALES
    if (rows.scales.exceeds) {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (RowCodes::is_far(rows.codes[i / 2], block * STEPS + i % 2)) words.codes0.word[i] = 0;
    }
#endif
#pragma unroll
    for (u32 i = block * STEPS; i < (block + 1) * STEPS; i++)
        decode_step(operands.a[i], words, RUN_STEPS < BLOCK_STEPS ? run * RUN_STEPS + i : i, rows.codes);
}

// The operands of half a run, for a warp. Each lane loads its own.
struct HalfRun {
    u32x4 a[IN_HALVES ? BLOCK_STEPS : 1][IN_HALVES ? 32 : 1];

    QG_DEVICE void store(HalfRun& half, const RunOperands& operands, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_STEPS; i++)
            st_shared(&half.a[i][lane], u32x4{operands.a[i][0], operands.a[i][1], operands.a[i][2], operands.a[i][3]});
    }
    QG_DEVICE void load(const HalfRun& half, RunOperands& operands, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_STEPS; i++) {
            const u32x4 v = ld_shared(&half.a[i][lane]);
            operands.a[i][0] = v.x, operands.a[i][1] = v.y, operands.a[i][2] = v.z, operands.a[i][3] = v.w;
        }
    }
};

// What a warp has in shared memory of its own.
struct WarpScratch {
    HalfRun half;
    TokenSums sums;
};

// From the tokens of a part to the next, in a descriptor.
constexpr u32 PART_STRIDE = PART_M * STAGE_K >> 4;

// A descriptor of what lies `units` of 16 bytes further. They are added to its lower word, which they do not leave.
QG_DEVICE u64 further(u64 descriptor, u32 units) {
    return (descriptor & 0xffffffff00000000) | ((u32)descriptor + units);
}

// Begins sums = W · X over a run, at warpgroup `group`'s turn. Code that touches sums or operands next must finish it first.
QG_DEVICE void start_run(Sum (&sums)[SUMS], const RunOperands& operands, u64 x, u32 group) {
    constexpr u32 STEP = INSTRUCTION_K >> 4;
    wgmma_fence_accumulators(sums);
    if constexpr (TAKES_TURNS) barrier_sync(TURN + group, QG_CONSUMERS);
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < RUN_STEPS; i++) {
        // The last instruction is a group of its own.
        if (TAKES_TURNS && i == RUN_STEPS - 1) wgmma_commit_group();
        if (i == 0)
            multiply_codes<PART_M, 0>(sums, operands.a[i], x);
        else
            multiply_codes<PART_M, 1>(sums, operands.a[i], further(x, i * STEP));
    }
    wgmma_commit_group();
}
// Waits for the instructions, and passes the turn when only the last still runs, so that others follow it at once. Operands keep their
// registers until then.
QG_DEVICE void finish_run(Sum (&sums)[SUMS], RunOperands& operands, u32 group) {
    if constexpr (TAKES_TURNS) {
        wgmma_wait_group<1>();
        barrier_arrive(TURN + 1 - group, QG_CONSUMERS);
    }
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(sums);
    RunOperands::fence(operands);
}

// acc += sums · scales, of the rows and, where X has them for 128 columns, of the tokens.
QG_DEVICE void promote(float (&acc)[SUMS], const Sum (&sums)[SUMS], const RowScales& rows, const float* x_scales, u32 lane) {
    if constexpr (QG_X_BLOCK_SCALES) {
#pragma unroll
        for (u32 j = 0; j < SUMS / 4; j++) {
            const f32x2 x = ld_shared(reinterpret_cast<const f32x2*>(x_scales + j * 8 + lane % 4 * 2));
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                const u32 i = j * 4 + row * 2;
                acc[i] = fma_f32(x.x * rows.scale[row], number_of(sums[i]), acc[i]);
                acc[i + 1] = fma_f32(x.y * rows.scale[row], number_of(sums[i + 1]), acc[i + 1]);
            }
        }
    } else {
        // One factor after the other, so that the next sum finds it where operands are collected.
#pragma unroll
        for (u32 row = 0; row < 2; row++)
#pragma unroll
            for (u32 i = row * 2; i < SUMS; i += 4) {
                acc[i] = fma_f32(rows.scale[row], number_of(sums[i]), acc[i]);
                acc[i + 1] = fma_f32(rows.scale[row], number_of(sums[i + 1]), acc[i + 1]);
            }
    }
}

#if !QG_TAKES_SCALES
// Takes what operands left of zero points, times the sums of X's codes, of the tokens of a part, off the sums.
QG_DEVICE void take_rests(Sum (&sums)[SUMS], const KTile& records, u32 sub, const Sum* of_x, u32 lane) {
    Sum rest[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) rest[row] = RowCodes::rest(Dequant::zero_point(records, row, sub));
#pragma unroll
    for (u32 i = 0; i < SUMS; i++)
        sums[i] = add_product(rest[i / 2 % 2], ld_shared(of_x + i / 4 * 8 + lane % 4 * 2 + i % 2), sums[i]);
}
#else
// acc += the columns that `decode` left out, times the tokens `x` of a part in a stage and, where X has them, their scales. Rows of X from
// `tokens` on were never copied to shared memory.
QG_DEVICE void add_far_columns(float (&acc)[SUMS], const u8* k_tiles, const u8* x, const float* x_scales, const ColumnPlace& place, u32 tokens,
                               u32 lane) {
    // Any that E4M3 has for all codes.
    constexpr u32 HALF = 6;
    const RunRows rows = RunRows::of(k_tiles, 0, lane);
#pragma unroll 1
    for (u32 step = 0; step < RUN_STEPS; step++) {
        bool is_far[2];
        float scale[2];
        u32 a[4];
        const KTile words = block_of(k_tiles, step / 2, place);
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            is_far[row] = RowCodes::is_far(rows.codes[row], step);
            scale[row] = scale_of_power(rows.codes[row].exponents >> (8 * step) & 0xffu, HALF);
            const u32 word = step % 2 == 0 ? words.codes0.word[row * 2] : words.codes0.word[row * 2 + 1];
            Magnitudes::look_up(Magnitudes::of(HALF), is_far[row] ? word : 0, a[row], a[2 + row]);
        }
        if (ballot(is_far[0] || is_far[1]) == 0) continue;
#pragma unroll
        for (u32 j = 0; j < SUMS / 4; j++) {
            const u32 token = j * 8 + lane / 4;
            u32 b[2] = {};
            if (token < tokens) {
#pragma unroll
                for (u32 i = 0; i < 2; i++)
                    b[i] = ld_shared(reinterpret_cast<const u32*>(x + token * STAGE_K + ((step * 2 + i) ^ token % 8) * 16 + lane % 4 * 4));
            }
            float sums[4] = {};
            mma_m16n8k32_e4m3(sums, a, b);
            f32x2 of_tokens = {1.0f, 1.0f};
            if constexpr (QG_X_BLOCK_SCALES) of_tokens = ld_shared(reinterpret_cast<const f32x2*>(x_scales + j * 8 + lane % 4 * 2));
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                acc[j * 4 + i] = fma_f32((i % 2 == 0 ? of_tokens.x : of_tokens.y) * scale[i / 2], sums[i], acc[j * 4 + i]);
        }
    }
}
#endif

// The state of a work tile in a warp.
struct Product {
    // Of the caller, in the order of parts.
    float (&acc)[PARTS][SUMS];
    // Tokens from the first of the tile on.
    u32 tokens, warp, lane;
    ColumnPlace place;
    // Of the next run.
    RunOperands operands;
    RunRows rows;

    // Before the first tile: warpgroup 0 begins.
    QG_DEVICE void give_first_turn(u32 warp) {
        if (TAKES_TURNS && warp >= 4) barrier_arrive(TURN, QG_CONSUMERS);
    }

    // Makes all that the first run of a tile needs.
    QG_DEVICE void begin(Product& product, const Pipeline& pipeline, const Position& at) {
        const u8* k_tiles = pipeline.w[at.stage][product.warp];
        product.rows = RunRows::of(k_tiles, 0, product.lane);
#pragma unroll
        for (u32 i = 0; i < RUN_BLOCKS; i++) decode(product.operands, block_of(k_tiles, i, product.place), 0, i, product.rows);
    }

    // Adds the sums of a run of the tokens of part `part`.
    QG_DEVICE void add(Product& product, Sum (&sums)[SUMS], const RowScales& rows, Pipeline& pipeline, const Position& at, u32 run,
                       [[maybe_unused]] TokenSums& token_sums, u32 part) {
        [[maybe_unused]] const u8* x = pipeline.x[at.stage] + part * PART_M * STAGE_K;
        const u8* k_tiles = pipeline.w[at.stage][product.warp];
        const u32* of_tokens = pipeline.of_tokens[at.stage] + part * PART_M;
        const float* x_scales = reinterpret_cast<const float*>(of_tokens);
        [[maybe_unused]] const u32 before = part * PART_M, tokens = product.tokens > before ? product.tokens - before : 0;
#if !QG_TAKES_SCALES
        if (rows.exceeds) {
#if QG_SUMS_OF_X
            mbarrier_wait(&pipeline.added[at.stage], at.parity);
            const Sum* of_x = reinterpret_cast<const Sum*>(of_tokens);
#else
            TokenSums::make(token_sums, x, run, tokens, product.lane);
            const Sum* of_x = token_sums.value;
#endif
            const u32 column = run * RUN_K;
            const KTile records = records_of(k_tiles, column / QG_K_TILE, product.lane);
            take_rests(sums, records, column % QG_K_TILE / QG_SUB_BLOCK, of_x, product.lane);
        }
        promote(product.acc[part], sums, rows, x_scales, product.lane);
#else
        promote(product.acc[part], sums, rows, x_scales, product.lane);
        if (rows.exceeds) add_far_columns(product.acc[part], k_tiles, x, x_scales, product.place, tokens, product.lane);
#endif
    }

    // Multiplies a stage. `has_next` says whether another follows, whose first run is decoded then; without, this one's is once more, and not
    // used.
    QG_DEVICE void multiply_stage(Product& product, Pipeline& pipeline, WarpScratch& scratch, Position& at, bool has_next) {
        const Position own = at;
        const u32 group = product.warp / 4;
        const u64 x = wgmma_descriptor_128b(pipeline.x[own.stage]);
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            const u32 next_run = (run + 1) % RUNS;
            const RowScales scales = product.rows.scales;
            RunOperands operands = product.operands, next;
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) {
                const bool is_last = part == PARTS - 1, begins_next = IN_HALVES ? part == 0 : is_last;
                if (begins_next && next_run == 0 && has_next) {
                    Position::next(at);
                    mbarrier_wait(&pipeline.full[at.stage], at.parity);
                }
                Sum sums[SUMS];
                start_run(sums, operands, further(x, part * PART_STRIDE + (run * RUN_K >> 4)), group);
                const u8* k_tiles = pipeline.w[at.stage][product.warp];
                if (begins_next) product.rows = RunRows::of(k_tiles, next_run, product.lane);
                KTile words[RUN_BLOCKS];
#pragma unroll
                for (u32 i = 0; i < RUN_BLOCKS; i++)
                    if (IN_HALVES ? i == part : is_last) words[i] = block_of(k_tiles, next_run * RUN_K / K_BLOCK + i, product.place);
                finish_run(sums, operands, group);
                if (IN_HALVES && is_last) HalfRun::load(scratch.half, next, product.lane);
                add(product, sums, scales, pipeline, own, run, scratch.sums, part);
#pragma unroll
                for (u32 i = 0; i < RUN_BLOCKS; i++)
                    if (IN_HALVES ? i == part : is_last) decode(next, words[i], next_run, i, product.rows);
                if (IN_HALVES && part == 0) HalfRun::store(scratch.half, next, product.lane);
            }
            product.operands = next;
        }
        Pipeline::release(pipeline, own.stage, product.lane);
    }
};
static_assert(!IN_HALVES || (PARTS == 2 && RUN_BLOCKS == 2), "a half behind each part");

// What sums of tokens are multiplied with in the end: units become numbers, and a scale a token acts here. Lanes have every 32nd token's.
struct TokenScales {
    float value[QG_TILE_M / 32];

    QG_DEVICE TokenScales load(const W4A8Params& params, const TileRows& rows, u32 lane) {
        TokenScales scales;
#pragma unroll
        for (u32 i = 0; i < QG_TILE_M / 32; i++) {
            scales.value[i] = UNITS;
            if constexpr (QG_X_BLOCK_SCALES) continue;
            // Tokens beyond the last have any.
            const u32 own = i * 32 + lane, token = rows.first + (own < rows.count ? own : rows.count - 1);
            const u8* at = reinterpret_cast<const u8*>(params.x.scales) + (u64)token * params.x.scales_row;
            scales.value[i] *= bits_to_f32(ld_global_u32(at));
        }
        return scales;
    }
    QG_DEVICE void apply(float (&acc)[PARTS][SUMS], const W4A8Params& params, const TileRows& rows, u32 lane) {
        const TokenScales scales = load(params, rows, lane);
#pragma unroll
        for (u32 j = 0; j < QG_TILE_M / 8; j++) {
            float(&of_tokens)[4] = reinterpret_cast<float(&)[4]>(acc[j * 4 / SUMS][j * 4 % SUMS]);
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                float scale = UNITS;
                if constexpr (!QG_X_BLOCK_SCALES)
                    scale = bits_to_f32(shfl_idx_u32(f32_to_bits(scales.value[j / 4]), j % 4 * 8 + lane % 4 * 2 + c));
                of_tokens[c] *= scale, of_tokens[2 + c] *= scale;
            }
        }
    }
};

// acc = W · X over a work tile's stages.
QG_DEVICE void multiply_tile(Accumulators& all, Pipeline& pipeline, Position& at, WarpScratch& scratch, const W4A8Params& params,
                             const WorkTile& work, u32 warp, u32 lane) {
    const TileRows rows = TileRows::of(params.gemm, work);
    float(&acc)[PARTS][SUMS] = reinterpret_cast<float(&)[PARTS][SUMS]>(all);
    all = {};
    Product product = {acc, rows.count, warp, lane, ColumnPlace::of_lane(lane)};
    mbarrier_wait(&pipeline.full[at.stage], at.parity);
    Product::begin(product, pipeline, at);
#pragma unroll 1
    for (u32 count = work.end - work.begin; count > 0; count--)
        Product::multiply_stage(product, pipeline, scratch, at, count > 1);
    Position::next(at);
    TokenScales::apply(acc, params, rows, lane);
}
