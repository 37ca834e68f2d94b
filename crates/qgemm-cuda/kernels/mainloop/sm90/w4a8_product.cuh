// W4A8 product of a consumer warpgroup: 64 rows of W, all
// tokens of the CTA.
// W is decoded to bytes in registers; wgmma reads the codes
// of X from shared memory.
// `e4m3_weights.cuh` or `s8_weights.cuh`, included before,
// defines the byte and sum types.
//
// wgmma starts from zero where a scale of W or X ends.
// Sums times both scales are added in f32 while the other
// warpgroup's wgmma runs.
#pragma once
#include "atoms/float.cuh"
#include "atoms/mma_fp8.cuh"
#include "mainloop/sm90/w4a8_pipeline.cuh"
#include "mainloop/warp_tile.cuh"

// Columns per instruction. A run is columns that share scales.
constexpr u32 INSTRUCTION_K = 32, RUN_K = QG_SUB_BLOCK < STAGE_K && !QG_TAKES_SCALES ? QG_SUB_BLOCK : STAGE_K;
constexpr u32 RUNS = STAGE_K / RUN_K, RUN_STEPS = RUN_K / INSTRUCTION_K;
static_assert(RUNS * RUN_K == STAGE_K && RUN_STEPS * INSTRUCTION_K == RUN_K, "runs are whole instructions");
static_assert(ROW_TILES == 1, "a warp has the rows of an instruction");

// Tokens per instruction, and parts of the token tile.
// More accumulators would leave too few registers. For the
// same reason a stage of several runs has one part.
constexpr u32 PART_M = QG_TILE_M < 128 ? QG_TILE_M : 128, PARTS = QG_TILE_M / PART_M;
static_assert(PARTS * PART_M == QG_TILE_M && (RUNS == 1 || PARTS == 1), "instructions have all tokens");
// Accumulators of a lane per part, in wgmma order.
// 4j + 2r + c belongs to row r and token 8j + 2t + c.
constexpr u32 SUMS = PART_M / 2;
// Whether half of the next run is decoded after each part, to
// balance the work between wgmma instructions.
// The first half waits in shared memory: registers are short,
// and otherwise the compiler decodes both halves at once.
// With scales of X per stage, halves are not faster.
constexpr bool IN_HALVES = RUNS == 1 && PARTS > 1 && !QG_X_BLOCK_SCALES;
// Whether the two warpgroups take turns in wgmma.
// This is faster where the work after a part takes longer
// than the other warpgroup's part.
// Shorter runs end before a turn has passed.
constexpr bool TAKES_TURNS = RUNS == 1 && (!IN_HALVES || QG_TAKES_SCALES);
// Named barrier of warpgroup 0's turn; the next is
// warpgroup 1's.
constexpr u32 TURN = 2;
static_assert(QG_CONSUMERS == 256, "two warpgroups take turns");

#if !QG_SUMS_OF_X
// Sums of X's codes over a run, for a part's tokens.
// They multiply zero points that operands do not absorb.
struct TokenSums {
    Sum value[QG_ZERO_POINTS ? PART_M : 4];

    // Each warp computes its own sums. `x`: the part's
    // tokens in a stage. Tokens from `tokens` on are missing.
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

// Scales of the lane's two rows in a run.
struct RowScales {
    float scale[2];
    // Whether operands of one of the warp's rows do not absorb
    // a zero point, or a scale far below the largest.
    bool exceeds;
};

// A operands of a run.
// wgmma owns the registers until it completes.
struct RunOperands {
    u32 a[RUN_STEPS][4];

    QG_DEVICE void fence(RunOperands& operands) {
#pragma unroll
        for (u32 step = 0; step < RUN_STEPS; step++) wgmma_fence_operand(operands.a[step]);
    }
};

// Scale records of k-tile `tile` of a stage.
QG_DEVICE KTile records_of(const u8* k_tiles, u32 tile, u32 lane) {
    KTile k_tile;
    KTile::load_scales<FromShared>(k_tile, k_tiles + tile * QG_K_TILE_BYTES, lane);
    return k_tile;
}

// Decoding constants and scales of the lane's rows in a run.
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
    // E8M0 scale of instruction `step` of a stage.
    QG_DEVICE u32 exponent_of(const u8* k_tiles, u32 row, u32 step, u32 lane) {
        const u32 column = step * INSTRUCTION_K;
        const KTile records = records_of(k_tiles, column / QG_K_TILE, lane);
        return KTile::Scales0::byte(records.scales0, row, column % QG_K_TILE / QG_SUB_BLOCK);
    }
#endif
};

// Instructions of a k-block, and k-blocks that a run touches.
constexpr u32 BLOCK_STEPS = K_BLOCK / INSTRUCTION_K, RUN_BLOCKS = RUN_STEPS > BLOCK_STEPS ? RUN_STEPS / BLOCK_STEPS : 1;

// K-block `block` of a stage.
QG_DEVICE KTile block_of(const u8* k_tiles, u32 block, const LaneColumns& place) {
    return columns_of(k_tiles + block / K_BLOCKS * QG_K_TILE_BYTES, block % K_BLOCKS, place);
}
// Decodes k-block `block` of a run to operands.
// Columns with scales far below a row's largest become zeros;
// `add_far_columns` adds them later.
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

// A operands of half a run, per warp.
// A lane loads only what it stored itself.
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

// Shared memory of one warp.
struct WarpScratch {
    HalfRun half;
    TokenSums sums;
};

// Descriptor stride between parts.
constexpr u32 PART_STRIDE = PART_M * STAGE_K >> 4;

// Descriptor moved by `units` of 16 bytes.
// The sum does not carry out of the lower word.
QG_DEVICE u64 further(u64 descriptor, u32 units) {
    return (descriptor & 0xffffffff00000000) | ((u32)descriptor + units);
}

// Starts sums = W · X over a run, on warpgroup `group`'s turn.
// Call `finish_run` before touching sums or operands.
QG_DEVICE void start_run(Sum (&sums)[SUMS], const RunOperands& operands, u64 x, u32 group) {
    constexpr u32 STEP = INSTRUCTION_K >> 4;
    wgmma_fence_accumulators(sums);
    if constexpr (TAKES_TURNS) barrier_sync(TURN + group, QG_CONSUMERS);
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < RUN_STEPS; i++) {
        // The last instruction has a separate wgmma group.
        if (TAKES_TURNS && i == RUN_STEPS - 1) wgmma_commit_group();
        if (i == 0)
            multiply_codes<PART_M, 0>(sums, operands.a[i], x);
        else
            multiply_codes<PART_M, 1>(sums, operands.a[i], further(x, i * STEP));
    }
    wgmma_commit_group();
}
// Waits for the run's wgmma.
// It passes the turn while the last instruction still runs:
// the other warpgroup's instructions follow at once.
// Operands keep their registers until the final wait.
QG_DEVICE void finish_run(Sum (&sums)[SUMS], RunOperands& operands, u32 group) {
    if constexpr (TAKES_TURNS) {
        wgmma_wait_group<1>();
        barrier_arrive(TURN + 1 - group, QG_CONSUMERS);
    }
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(sums);
    RunOperands::fence(operands);
}

// acc += sums · row scales (· token scales, if X has a scale
// per 128 columns).
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
        // Row by row: consecutive FMAs find the factor in the
        // operand reuse cache.
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
// Subtracts what operands did not absorb of zero points,
// times the sums of X's codes, for a part's tokens.
QG_DEVICE void take_rests(Sum (&sums)[SUMS], const KTile& records, u32 sub, const Sum* of_x, u32 lane) {
    Sum rest[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) rest[row] = RowCodes::rest(Dequant::zero_point(records, row, sub));
#pragma unroll
    for (u32 i = 0; i < SUMS; i++)
        sums[i] = add_product(rest[i / 2 % 2], ld_shared(of_x + i / 4 * 8 + lane % 4 * 2 + i % 2), sums[i]);
}
#else
// acc += W · X over the columns that `decode` zeroed.
// `x`: a part's tokens in a stage; `x_scales` only if X has
// block scales.
// Rows of X from `tokens` on were never copied to shared memory.
QG_DEVICE void add_far_columns(float (&acc)[SUMS], const u8* k_tiles, const u8* x, const float* x_scales, const LaneColumns& place, u32 tokens,
                               u32 lane) {
    // Any exponent for which E4M3 holds all codes.
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
            // Results of missing tokens are not stored.
            const u8* row = x + (token < tokens ? token : tokens - 1) * STAGE_K;
            u32 b[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                b[i] = ld_shared(reinterpret_cast<const u32*>(row + ((step * 2 + i) ^ token % 8) * 16 + lane % 4 * 4));
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

// State of a warp in a work tile.
struct Product {
    // The caller's accumulators: [part][sum].
    float (&acc)[PARTS][SUMS];
    // `tokens`: valid tokens of the tile.
    u32 tokens, warp, lane;
    LaneColumns place;
    // Operands and scales of the next run.
    RunOperands operands;
    RunRows rows;

    // Called once before the first tile: warpgroup 0 begins.
    QG_DEVICE void give_first_turn(u32 warp) {
        if (TAKES_TURNS && warp >= 4) barrier_arrive(TURN, QG_CONSUMERS);
    }

    // Decodes the first run of a tile.
    QG_DEVICE void begin(Product& product, const Pipeline& pipeline, const Position& at) {
        const u8* k_tiles = pipeline.w[at.stage][product.warp];
        product.rows = RunRows::of(k_tiles, 0, product.lane);
#pragma unroll
        for (u32 i = 0; i < RUN_BLOCKS; i++) decode(product.operands, block_of(k_tiles, i, product.place), 0, i, product.rows);
    }

    // Adds a run's sums to the accumulators of part `part`.
    QG_DEVICE void add(Product& product, Sum (&sums)[SUMS], const RowScales& rows, Pipeline& pipeline, const Position& at, u32 run,
                       [[maybe_unused]] TokenSums& token_sums, u32 part) {
        [[maybe_unused]] const u8* x = pipeline.x[at.stage] + part * PART_M * STAGE_K;
        const u8* k_tiles = pipeline.w[at.stage][product.warp];
        const u32* of_tokens = pipeline.of_tokens[at.stage] + part * PART_M;
        const float* x_scales = reinterpret_cast<const float*>(of_tokens);
        [[maybe_unused]] const u32 before = part * PART_M;
#if !QG_TAKES_SCALES
        if (rows.exceeds) {
#if QG_SUMS_OF_X
            mbarrier_wait(&pipeline.added[at.stage], at.parity);
            const Sum* of_x = reinterpret_cast<const Sum*>(of_tokens);
#else
            const u32 tokens = product.tokens > before ? product.tokens - before : 0;
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
        if (rows.exceeds) {
            const u32 valid = (u32)ld_shared(&token_sums.value[0]), tokens = valid > before ? valid - before : 0;
            if (tokens != 0) add_far_columns(product.acc[part], k_tiles, x, x_scales, product.place, tokens, product.lane);
        }
#endif
    }

    // Multiplies a stage, and decodes the next stage's first run
    // if `has_next`. Otherwise this stage's first run is decoded
    // again, and not used.
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

// Final scales of tokens: UNITS, times the token scale
// if X has one. A lane holds every 32nd token's.
struct TokenScales {
    float value[QG_TILE_M / 32];

    QG_DEVICE TokenScales load(const W4A8Params& params, const TileRows& rows, u32 lane) {
        TokenScales scales;
#pragma unroll
        for (u32 i = 0; i < QG_TILE_M / 32; i++) {
            scales.value[i] = UNITS;
            if constexpr (QG_X_BLOCK_SCALES) continue;
            // Tokens past the last read the last token's scale.
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

// acc = W · X over the stages of a work tile.
QG_DEVICE void multiply_tile(Accumulators& all, Pipeline& pipeline, Position& at, WarpScratch& scratch, const W4A8Params& params,
                             const WorkTile& work, u32 warp, u32 lane) {
    const TileRows rows = TileRows::of(params.gemm, work);
    float(&acc)[PARTS][SUMS] = reinterpret_cast<float(&)[PARTS][SUMS]>(all);
#if QG_TAKES_SCALES
    // Valid tokens of the tile, for the rare `add_far_columns`.
    // The main loop has no register for them.
    warp_barrier();
    if (lane == 0) st_shared(&scratch.sums.value[0], (float)(rows.count < QG_TILE_M ? rows.count : QG_TILE_M));
    warp_barrier();
#endif
    all = {};
    Product product = {acc, rows.count, warp, lane, LaneColumns::of_lane(lane)};
    mbarrier_wait(&pipeline.full[at.stage], at.parity);
    Product::begin(product, pipeline, at);
#pragma unroll 1
    for (u32 count = work.end - work.begin; count > 0; count--)
        Product::multiply_stage(product, pipeline, scratch, at, count > 1);
    Position::next(at);
    TokenScales::apply(acc, params, rows, lane);
}
