// Consumer of a work tile for few tokens, on code sums.
// Each row of W has one scale per k-tile.
// Codes minus zero points are exact operands.
// The sums of a k-tile are added times the row scales:
// one instruction per accumulator and k-tile.
// Scaled weights (`mainloop/sm90/warpgroup_product.cuh`) cost
// one instruction per two weights.
// In bf16 they cost six, because they go through f32.
#pragma once
#include "atoms/wgmma_first.cuh"
#include "dequant/exact_codes.cuh"
#include "mainloop/tma_pipeline.cuh"
#include "mainloop/warp_tile.cuh"

static_assert(STAGE_K_BLOCKS == K_BLOCKS && QG_SUB_BLOCK >= QG_K_TILE && QG_K_GROUPS == 1, "a stage is a k-tile with one scale a row");
static_assert(K_BLOCKS == 2, "k-blocks alternate between two sets of operands");

// Operands of a row tile and k-block.
// wgmma owns these registers until it completes.
struct KBlockOperands {
    u32 a[K_STEPS][4];

    QG_DEVICE void decode(KBlockOperands& operands, const KTile& k_tile, u32 k_block) {
#pragma unroll
        for (u32 step = 0; step < K_STEPS; step++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) operands.a[step][i] = exact_pair(k_tile, quad_of(k_block, i % 2, step), i / 2);
        fence(operands);
    }
    QG_DEVICE void fence(KBlockOperands& operands) {
#pragma unroll
        for (u32 step = 0; step < K_STEPS; step++) wgmma_fence_operand(operands.a[step]);
    }
};

static_assert(!IN_LINES, "of experts");

// State of a work tile in a warp.
struct Product {
    Accumulators acc;
    // Sums of a row tile and k-tile, which wgmma writes, and the
    // scales of the lane's rows.
    float sums[TOKEN_TILES][4], scale[2];
    KBlockOperands operands[K_BLOCKS];
    // Stage to release once the sums in flight at the start of a
    // k-tile complete; QG_X_STAGES: none.
    u32 read;
    Position at;

    QG_DEVICE Product of_tile(const Position& at, const GemmParams&, const WorkTile&, u32) {
        Product product;
        product.acc = {};
        product.operands[0] = product.operands[1] = {};
        product.scale[0] = product.scale[1] = 0.0f;
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) product.sums[tt][i] = 0.0f;
        product.read = QG_X_STAGES;
        product.at = at;
        return product;
    }

    // Multiplies all k-tiles by the first TOKENS tokens.
    template <u32 GROUP, u32 TOKENS>
    QG_DEVICE void multiply(Product& product, Pipeline& pipeline, const WorkTile& work, u32 warp, u32 lane) {
#pragma unroll 1
        for (u32 k_tile = work.begin; k_tile < work.end; k_tile++) multiply_k_tile<TOKENS>(product, pipeline, warp, lane);
        add_up<TOKENS>(product, ROW_TILES - 1);
        release(product, pipeline, lane);
        product.read = QG_X_STAGES;
    }

    template <u32 TOKENS>
    QG_DEVICE void multiply_k_tile(Product& product, Pipeline& pipeline, u32 warp, u32 lane) {
        Position& at = product.at;
        mbarrier_wait(&pipeline.full[at.x], at.parity);
        // Gathered rows come through the generic proxy
        // (`mainloop/expert_producer.cuh`).
        if constexpr (QG_EXPERT_TILES) fence_proxy_async();
        KTile k_tile[ROW_TILES];
        // All shared loads of a stage come first, so the warp
        // waits for them once.
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const u8* bytes = pipeline.w[at.w].tile[warp * ROW_TILES + rt];
            KTile::load_scales<FromShared>(k_tile[rt], bytes, lane);
#pragma unroll
            for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) KTile::load_codes<FromShared>(k_tile[rt], bytes, k_block, lane);
        }
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            wgmma_wait_group<1>();
            KBlockOperands::fence(product.operands[0]);
            KBlockOperands::decode(product.operands[0], k_tile[rt], 0);
            // Sums of the previous row tile, or of the last row tile of
            // the previous k-tile.
            add_up<TOKENS>(product, rt == 0 ? ROW_TILES - 1 : rt - 1);
            start_k_block<TOKENS>(product, 0, pipeline.x[at.x][0]);
            if (rt == 0) release(product, pipeline, lane);
            KBlockOperands::decode(product.operands[1], k_tile[rt], 1);
            start_k_block<TOKENS>(product, 1, pipeline.x[at.x][1]);
#pragma unroll
            for (u32 i = 0; i < 2; i++) product.scale[i] = Operands::scale(k_tile[rt], i, 0);
        }
        product.read = at.x;
        Position::next_stage(at);
        Position::next_run(at);
    }

    // Starts the sums over k-block `k_block` of a k-tile.
    // Wait before the sums or the operands are touched again.
    template <u32 TOKENS>
    QG_DEVICE void start_k_block(Product& product, u32 k_block, const XStage& x) {
        const KBlockOperands& operands = product.operands[k_block];
        float(&d)[TOKENS / 2] = reinterpret_cast<float(&)[TOKENS / 2]>(product.sums);
        const u64 columns = wgmma_descriptor_128b(x.bytes);
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < K_STEPS; step++) {
            const u64 at = columns + (step * K_STEP * 2 >> 4);
            const bool is_first = k_block == 0 && step == 0;
#if QG_X_DTYPE == 1
            if (is_first)
                wgmma_first_k16_f16<TOKENS>(d, operands.a[step], at);
            else
                wgmma_k16_f16<TOKENS>(d, operands.a[step], at);
#else
            if (is_first)
                wgmma_first_k16_bf16<TOKENS>(d, operands.a[step], at);
            else
                wgmma_k16_bf16<TOKENS>(d, operands.a[step], at);
#endif
        }
        wgmma_commit_group();
    }

    // Waits for the sums of row tile `rt` and adds them.
    template <u32 TOKENS>
    QG_DEVICE void add_up(Product& product, u32 rt) {
        wgmma_wait_group<0>();
        KBlockOperands::fence(product.operands[1]);
        wgmma_fence_accumulators(reinterpret_cast<float(&)[TOKENS / 2]>(product.sums));
#pragma unroll
        for (u32 tt = 0; tt < TOKENS / MMA_TOKENS; tt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float& acc = product.acc.value[rt][tt][i];
                acc = fma_f32(product.sums[tt][i], product.scale[i / 2], acc);
            }
    }

    // QG_X_STAGES means no stage.
    QG_DEVICE void release(Product& product, Pipeline& pipeline, u32 lane) {
        if (product.read < QG_X_STAGES) Pipeline::release(pipeline, product.read, lane);
    }
};
