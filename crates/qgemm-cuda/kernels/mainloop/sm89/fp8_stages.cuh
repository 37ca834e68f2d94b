// Stages of 128 columns of 8-bit codes, of all tokens and features of a CTA, that all its threads copy with `cp.async`, and
// the product of a warp: `mma.sync` starts from zero every stage, and its sums are added in f32, times both scales.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma_fp8.cuh"
#include "mainloop/fp8_codes.cuh"
#include "sched/tile.cuh"

// Tokens and features of a warp, and of an instruction.
constexpr u32 WARP_M = QG_TILE_M / QG_WARPS_M, WARP_N = QG_TILE_N / QG_WARPS_N;
constexpr u32 MMA_M = 16, MMA_N = 8, M_TILES = WARP_M / MMA_M, N_TILES = WARP_N / MMA_N;
static_assert(QG_WARPS_M * QG_WARPS_N * 32 == QG_THREADS, "warps share the tile");

// The D registers of the instructions.
struct Accumulators {
    float value[M_TILES][N_TILES][4];
};

// 16-byte chunk c of token r of X stands at c ^ (r % 8), of row r of W at c ^ (r / 2 % 4): the eight rows that `ldmatrix`
// reads, or the lanes that load 16 bytes at once, then lie in different banks.
struct Stage {
    alignas(128) u8 x[QG_TILE_M * STAGE_K];
    u8 w[STAGE_K_BLOCKS][QG_TILE_N * PACKED_K_BLOCK];
    StageScales scales;

    // Starts copying stage `k` of the tile. Bytes outside X, and k-blocks outside W, become zeros.
    QG_DEVICE void copy(Stage& s, const Fp8GemmParams& params, u32 first_token, u32 first_row, u32 k, u32 thread) {
        copy_x(s, params.gemm, first_token, k, thread);
        copy_w(s, params.gemm, first_row / 16, k, thread);
        StageScales::copy<QG_THREADS>(s.scales, params, first_token, first_row, k, thread);
    }
    QG_DEVICE void copy_x(Stage& s, const GemmParams& p, u32 first_token, u32 k, u32 thread) {
        const u8* x = reinterpret_cast<const u8*>(p.at.x);
        // Loops that are not unrolled: addresses of all copies together take the registers of accumulators (sm_120).
#pragma unroll 1
        for (u32 i = thread; i < QG_TILE_M * (STAGE_K / 16); i += QG_THREADS) {
            const u32 row = i / (STAGE_K / 16), chunk = i % (STAGE_K / 16);
            const u32 token = first_token + row, column = k * STAGE_K + chunk * 16;
            const u32 left = token < p.shape.m && column < p.shape.k ? p.shape.k - column : 0;
            cp_async_16(s.x + row * STAGE_K + (chunk ^ row % 8) * 16,
                        left > 0 ? x + token * p.at.x_row + column : x, left < 16 ? left : 16);
        }
    }
    // Row tiles beyond the last are copies of it.
    QG_DEVICE void copy_w(Stage& s, const GemmParams& p, u32 first_tile, u32 k, u32 thread) {
        const u32 k_tiles = (p.shape.stored_k + QG_K_TILE - 1) / QG_K_TILE;
        const u32 last = (p.shape.stored_rows + 15) / 16 - 1;
        const u8* w = reinterpret_cast<const u8*>(p.at.w);
#pragma unroll
        for (u32 block = 0; block < STAGE_K_BLOCKS; block++) {
            const u32 k_tile = k * (STAGE_K_BLOCKS / K_TILE_K_BLOCKS) + block / K_TILE_K_BLOCKS;
            const bool is_there = k_tile < k_tiles;
            const u64 offset = block % K_TILE_K_BLOCKS * (16 * PACKED_K_BLOCK);
#pragma unroll 1
            for (u32 i = thread; i < QG_TILE_N * (PACKED_K_BLOCK / 16); i += QG_THREADS) {
                const u32 row = i / 4, chunk = i % 4, own = first_tile + row / 16, tile = own < last ? own : last;
                const u8* from = w + ((u64)tile * k_tiles + (is_there ? k_tile : 0)) * QG_K_TILE_BYTES + offset +
                                 row % 16 * PACKED_K_BLOCK + chunk * 16;
                cp_async_16(s.w[block] + row * PACKED_K_BLOCK + (chunk ^ row / 2 % 4) * 16, from, is_there ? 16 : 0);
            }
        }
    }
};

// The B operands of a packed k-block for the eight features from `row` on: those of its two instructions.
QG_DEVICE void load_w(u32 (&words)[4], const u8* k_block, u32 row, u32 lane) {
    const u32 own = lane % 8;
    ldmatrix_x4(words, shared_address(k_block) + (row + own) * PACKED_K_BLOCK + (lane / 8 ^ own / 2) * 16);
}

// acc += X · Wᵀ over a stage. `token` is the lane's first of the warp's first 16, `row` the warp's first feature.
QG_DEVICE void multiply_stage(Accumulators& acc, const Stage& s, u32 token, u32 tokens, u32 row, u32 lane) {
    Accumulators sums = {};
    XFragments x[M_TILES];
#pragma unroll
    for (u32 mt = 0; mt < M_TILES; mt++) XFragments::load(x[mt], s.x, token + mt * MMA_M, tokens, lane);
#pragma unroll
    for (u32 block = 0; block < STAGE_K_BLOCKS; block++)
#pragma unroll
        for (u32 nt = 0; nt < N_TILES; nt++) {
            u32 w[4];
            load_w(w, s.w[block], row + nt * MMA_N, lane);
#pragma unroll
            for (u32 mt = 0; mt < M_TILES; mt++) {
                mma_m16n8k32_e4m3(sums.value[mt][nt], x[mt].a[block * 2], {w[0], w[1]});
                mma_m16n8k32_e4m3(sums.value[mt][nt], x[mt].a[block * 2 + 1], {w[2], w[3]});
            }
        }
    float factor[M_TILES][2];
#pragma unroll
    for (u32 mt = 0; mt < M_TILES; mt++) StageScales::load_x(s.scales, token + mt * MMA_M, factor[mt]);
#pragma unroll
    for (u32 nt = 0; nt < N_TILES; nt++) {
        const float of_w = QG_W_BLOCK_SCALES ? ld_shared(&s.scales.w[row / SCALE_ROWS + nt]) : 1.0f;
#pragma unroll
        for (u32 mt = 0; mt < M_TILES; mt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float& d = acc.value[mt][nt][i];
                d = HAS_BLOCK_SCALES ? fma_f32(factor[mt][i / 2] * of_w, sums.value[mt][nt][i], d)
                                     : d + sums.value[mt][nt][i];
            }
    }
}
static_assert(MMA_N == SCALE_ROWS, "an instruction's features share a record");
