// Consumer of a work tile: a warp of a consumer warpgroup.
// It dequantizes one k-block while wgmma multiplies another,
// run by run through the ring.
#pragma once
#include "mainloop/sm90/wgmma_k_block.cuh"
#include "mainloop/tma_pipeline.cuh"

// wgmma groups in flight: k-blocks of row tiles,
// or parts of them.
// While one runs, the next weights are dequantized, in
// separate registers.
constexpr u32 IN_FLIGHT = 2;
// Runs per loop iteration, so that k-blocks alternate between
// the register sets. No branch may stand between them:
// otherwise NVRTC 12.9 reuses registers of in-flight operands.
// `build-kernels` checks the machine code for it.
constexpr u32 LOOP_RUNS = RUN_K_TILES * K_BLOCKS * ROW_TILES * PARTS % IN_FLIGHT == 0 ? 1 : IN_FLIGHT;
// K-tiles from a group's run to its next, and k-tiles spanned
// by a loop iteration.
constexpr u32 GROUP_STRIDE = QG_K_GROUPS * RUN_K_TILES;
constexpr u32 LOOP_K_TILES = (LOOP_RUNS - 1) * GROUP_STRIDE + RUN_K_TILES;
static_assert(RUN_K_TILES <= 2, "the loop leaves no more than one k-tile");

// Plain weights are loaded directly to the operand registers,
// so only after the wgmmas that read these have completed.
constexpr bool CODES_ARE_OPERANDS = QG_PLAIN_DTYPE == QG_X_DTYPE;
static_assert(!CODES_ARE_OPERANDS || PARTS == 1, "a k-block is loaded once");

// State of a work tile in a warp.
struct Product {
    Accumulators acc;
    KBlockOperands operands[IN_FLIGHT];
    // Stages to release once these operands' wgmmas complete.
    u32 read[IN_FLIGHT];
    Position at;
    // Low address bits of the warp's row tiles in memory.
    u32 from[ROW_TILES];

    QG_DEVICE Product of_tile(const Position& at, const GemmParams& p, const WorkTile& work, u32 warp) {
        Product product;
        product.acc = {};
#pragma unroll
        for (u32 turn = 0; turn < IN_FLIGHT; turn++) product.read[turn] = QG_X_STAGES;
        product.at = at;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const u32 tile = work.n_tile * CTA_ROW_TILES + warp * ROW_TILES + rt;
            product.from[rt] = IN_LINES ? (u32)reinterpret_cast<u64>(row_tile(p, tile, 0)) % LINE_BYTES : 0;
        }
        return product;
    }

    // Multiplies all runs of group GROUP by the first TOKENS tokens.
    template <u32 GROUP, u32 TOKENS>
    QG_DEVICE void multiply(Product& product, Pipeline& pipeline, const WorkTile& work, u32 warp, u32 lane) {
        u32 k_tile = work.begin + GROUP * RUN_K_TILES;
#pragma unroll 1
        for (; k_tile + LOOP_K_TILES <= work.end; k_tile += LOOP_RUNS * GROUP_STRIDE) {
            multiply_run<RUN_K_TILES, 0, TOKENS>(product, pipeline, k_tile, warp, lane);
            if constexpr (LOOP_RUNS > 1) multiply_run<RUN_K_TILES, 1, TOKENS>(product, pipeline, k_tile + GROUP_STRIDE, warp, lane);
        }
        wait(product, pipeline, lane);
        if (LOOP_K_TILES > 1 && k_tile < work.end) {
            multiply_run<1, 0, TOKENS>(product, pipeline, k_tile, warp, lane);
            wait(product, pipeline, lane);
        }
    }

    // Multiplies K_TILES k-tiles from `first` on, a whole
    // run or its rest.
    // The first k-block uses the registers of turn TURN.
    template <u32 K_TILES, u32 TURN, u32 TOKENS>
    QG_DEVICE void multiply_run(Product& product, Pipeline& pipeline, u32 first, u32 warp, u32 lane) {
        Position& at = product.at;
        KTile k_tile[ROW_TILES];
#pragma unroll
        for (u32 i = 0; i < K_TILES * K_BLOCKS; i++) {
            const u32 k_block = i % K_BLOCKS, of_stage = i % STAGE_K_BLOCKS;
            if (of_stage == 0) {
                mbarrier_wait(&pipeline.full[at.x], at.parity);
                // Gathered rows come through the generic proxy
                // (`mainloop/expert_producer.cuh`).
                if constexpr (QG_EXPERT_TILES) fence_proxy_async();
            }
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
                const u32 from = product.from[rt] + first * QG_K_TILE_BYTES;
                const u8* bytes = WRuns::run(pipeline.w[at.w], warp * ROW_TILES + rt, from) + i / K_BLOCKS * QG_K_TILE_BYTES;
                if (k_block == 0) KTile::load_scales<FromShared>(k_tile[rt], bytes, lane);
                if constexpr (!CODES_ARE_OPERANDS) KTile::load_codes<FromShared>(k_tile[rt], bytes, k_block, lane);
#pragma unroll
                for (u32 part = 0; part < PARTS; part++) {
                    const u32 turn = (TURN + (i * ROW_TILES + rt) * PARTS + part) % IN_FLIGHT;
                    wgmma_wait_group<IN_FLIGHT - 1>();
                    release(product, pipeline, turn, lane);
                    if constexpr (CODES_ARE_OPERANDS) KTile::load_codes<FromShared>(k_tile[rt], bytes, k_block, lane);
                    start_k_block<TOKENS>(product.acc.value[rt], product.operands[turn], k_tile[rt], k_block, part,
                                          pipeline.x[at.x][of_stage]);
                    const bool ends_k_block = rt == ROW_TILES - 1 && part == PARTS - 1;
                    const bool ends_stage = ends_k_block && (of_stage == STAGE_K_BLOCKS - 1 || i == K_TILES * K_BLOCKS - 1);
                    product.read[turn] = ends_stage ? at.x : QG_X_STAGES;
                    if (ends_stage) Position::next_stage(at);
                }
            }
        }
        Position::next_run(at);
        Position::skip<QG_K_GROUPS - 1>(at);
    }

    // Waits until no wgmma is in flight.
    QG_DEVICE void wait(Product& product, Pipeline& pipeline, u32 lane) {
        wgmma_wait_group<0>();
#pragma unroll
        for (u32 turn = 0; turn < IN_FLIGHT; turn++) {
            release(product, pipeline, turn, lane);
            product.read[turn] = QG_X_STAGES;
        }
    }

    // Call it when the wgmmas of `turn` are complete.
    // QG_X_STAGES means no stage to release.
    QG_DEVICE void release(Product& product, Pipeline& pipeline, u32 turn, u32 lane) {
        if (product.read[turn] < QG_X_STAGES) Pipeline::release(pipeline, product.read[turn], lane);
    }
};
