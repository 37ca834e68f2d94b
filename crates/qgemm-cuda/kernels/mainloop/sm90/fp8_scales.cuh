// FP8 GEMM: scale copies of the producer warps.
// Instruction-bound tiles: scales pass through the registers
// of two warps, which store 32 tokens at once.
// `cp.async` would write shared memory four bytes at a time
// and delay the wgmma reads of W.
// Memory-bound tiles: `cp.async` of one warp keeps the scales
// of all free stages in flight.
// Register loads, each waited for, are slower there.
#pragma once
#include "mainloop/sm90/fp8_pipeline.cuh"

// Source of a lane's scales.
// Rows of a part share scales, or alternate between two in a
// gated pair. Then only a part's first two records are read.
struct ScaleSource {
    static constexpr u32 TOKENS = QG_TILE_M / (32 * SCALE_WARPS), PART_RUNS = QG_PART_N / SCALE_ROWS;
    static_assert(QG_TILE_M % (32 * SCALE_WARPS) == 0, "warps share the tokens");
    // The lane's first token, the number of tokens, and whether
    // the lane copies a scale record of W.
    u32 token, tokens;
    bool copies_w;
    const u8 *x, *w;

    QG_DEVICE ScaleSource of(const Fp8GemmParams& params, u32 first_token, u32 first_row, u32 k, u32 warp, u32 lane) {
        const GemmParams& p = params.gemm;
        ScaleSource s;
        s.token = warp * (32 * TOKENS) + lane;
        s.tokens = first_token < p.shape.m ? p.shape.m - first_token : 0;
        s.copies_w = QG_W_BLOCK_SCALES && !QG_W_LINES && warp == 0 && lane < CTA_SCALES && (QG_W_SCALE_ROWS < QG_PART_N || lane % PART_RUNS < 2);
        s.x = reinterpret_cast<const u8*>(params.x_scales) + (u64)(first_token + s.token) * params.x_scale_row + (u64)k * 4;
        s.w = s.copies_w ? StageScales::w_record(p, first_row + lane * SCALE_ROWS, k) : nullptr;
        return s;
    }
};

// Stores a stage's scales, loaded before the stage is free.
QG_DEVICE void store_scales(Pipeline& pipeline, const Position& at, const Fp8GemmParams& params, const ScaleSource& s, u32 lane) {
    u32 x[ScaleSource::TOKENS] = {}, w = 0;
    if constexpr (QG_X_BLOCK_SCALES)
#pragma unroll
        for (u32 i = 0; i < ScaleSource::TOKENS; i++)
            if (s.token + i * 32 < s.tokens) x[i] = ld_global_u32(s.x + i * 32 * params.x_scale_row);
    if (s.copies_w) w = ld_global_u32(s.w);
    Position::wait_empty(at, pipeline);
    StageScales& scales = pipeline.scales[Position::stage(at)];
    if constexpr (QG_X_BLOCK_SCALES)
#pragma unroll
        for (u32 i = 0; i < ScaleSource::TOKENS; i++) st_shared(&scales.x[s.token + i * 32], bits_to_f32(x[i]));
    if (s.copies_w) st_shared(&scales.w[lane], bits_to_f32(w));
    warp_barrier();
    if (lane == 0) mbarrier_arrive(&pipeline.full[Position::stage(at)]);
}

// Starts the copies of a stage's scales.
QG_DEVICE void start_scales(Pipeline& pipeline, const Position& at, const Fp8GemmParams& params, const ScaleSource& s, u32 lane) {
    Position::wait_empty(at, pipeline);
    StageScales& scales = pipeline.scales[Position::stage(at)];
    if constexpr (QG_X_BLOCK_SCALES)
#pragma unroll
        for (u32 i = 0; i < ScaleSource::TOKENS; i++) {
            const bool is_there = s.token + i * 32 < s.tokens;
            const u8* x = is_there ? s.x + i * 32 * params.x_scale_row : reinterpret_cast<const u8*>(params.x_scales);
            cp_async_4(reinterpret_cast<u8*>(&scales.x[s.token + i * 32]), x, is_there ? 4 : 0);
        }
    if (s.copies_w) cp_async_4(reinterpret_cast<u8*>(&scales.w[lane]), s.w, 4);
    cp_async_mbarrier_arrive(&pipeline.full[Position::stage(at)]);
}

// Arrives on the stage after the last tile.
QG_DEVICE void end_scales(Pipeline& pipeline, const Position& at, u32 lane) {
    Position::wait_empty(at, pipeline);
    if (!SCALES_IN_REGISTERS || lane == 0) mbarrier_arrive(&pipeline.full[Position::stage(at)]);
}

// Copies the scales of a tile's stages [begin, end).
// Tokens past the last get zeros.
QG_DEVICE void copy_scales(Pipeline& pipeline, Position& at, const Fp8GemmParams& params, u32 first_token, u32 first_row, u32 begin, u32 end,
                           u32 warp, u32 lane) {
    ScaleSource s = ScaleSource::of(params, first_token, first_row, begin, warp, lane);
#pragma unroll 1
    for (u32 k = begin; k < end; k++) {
        if constexpr (SCALES_IN_REGISTERS)
            store_scales(pipeline, at, params, s, lane);
        else
            start_scales(pipeline, at, params, s, lane);
        s.x += 4, s.w += QG_K_TILE_BYTES;
        Position::next(at);
    }
}

// Scale warp `warp`.
QG_DEVICE void produce_scales(Pipeline& pipeline, const Fp8GemmParams& params, u32 warp, u32 lane) {
    WorkList list = WorkList::of_cta(params.gemm);
    WorkTile work;
    Position at = {};
    griddepcontrol_wait();
    while (WorkList::next(list, params.gemm, work))
        copy_scales(pipeline, at, params, first_token_of(work), work.n_tile * QG_TILE_N, work.begin, work.end, warp, lane);
    end_scales(pipeline, at, lane);
}
