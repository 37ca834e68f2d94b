// FP8 stages of 128 columns, and the product of a warp.
// All threads copy a stage with `cp.async`.
// `mma.sync` starts from zero every stage. Its partial sums
// times both scales are added in f32.
// QG_W_POWERS: rows of W have power-of-two scales per 32
// columns, the K of an instruction.
#pragma once
#include "atoms/e8m0.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/mma_fp8.cuh"
#include "mainloop/fp8_codes.cuh"
#include "sched/tile.cuh"

// Tokens and features per warp and per instruction.
constexpr u32 WARP_M = QG_TILE_M / QG_WARPS_M, WARP_N = QG_TILE_N / QG_WARPS_N;
constexpr u32 MMA_M = 16, MMA_N = 8, M_TILES = WARP_M / MMA_M, N_TILES = WARP_N / MMA_N;
static_assert(QG_WARPS_M * QG_WARPS_N * 32 == QG_THREADS, "warps share the tile");

#if QG_W_POWERS
// Power-of-two scales of a row tile for a packed k-block.
// Rows are in the order 0, 8, 1, 9, …
// A row has two bytes: columns 0..31 and 32..63.
constexpr u32 POWERS_BYTES = 32;
static_assert(K_TILE_K_BLOCKS == 1, "a k-block's powers stand behind it");
#endif

// D registers of the MMA instructions.
struct Accumulators {
    float value[M_TILES][N_TILES][4];
};

// Swizzle of 16-byte chunk c in row r:
// X: c ^ (r % 8); W: c ^ (r / 2 % 4).
// The eight rows of `ldmatrix`, and lanes that load 16 bytes,
// then use different banks.
struct Stage {
    alignas(128) u8 x[QG_TILE_M * STAGE_K];
    u8 w[STAGE_K_BLOCKS][QG_TILE_N * PACKED_K_BLOCK];
    StageScales scales;
#if QG_W_POWERS
    alignas(16) u8 powers[STAGE_K_BLOCKS][QG_TILE_N / 16 * POWERS_BYTES];
#endif

    // Starts copying stage `k` of the tile.
    // Bytes outside X and k-blocks outside W become zeros.
    QG_DEVICE void copy(Stage& s, const Fp8GemmParams& params, u32 first_token, u32 first_row, u32 k, u32 thread) {
        copy_x(s, params.gemm, first_token, k, thread);
        copy_w(s, params.gemm, first_row / 16, k, thread);
        StageScales::copy<QG_THREADS>(s.scales, params, first_token, first_row, k, thread);
    }
    QG_DEVICE void copy_x(Stage& s, const GemmParams& p, u32 first_token, u32 k, u32 thread) {
        const u8* x = reinterpret_cast<const u8*>(p.at.x);
        // Not unrolled: the addresses of all copies would
        // occupy accumulator registers (sm_120).
#pragma unroll 1
        for (u32 i = thread; i < QG_TILE_M * (STAGE_K / 16); i += QG_THREADS) {
            const u32 row = i / (STAGE_K / 16), chunk = i % (STAGE_K / 16);
            const u32 token = first_token + row, column = k * STAGE_K + chunk * 16;
            const u32 left = token < p.shape.m && column < p.shape.k ? p.shape.k - column : 0;
            cp_async_16(s.x + row * STAGE_K + (chunk ^ row % 8) * 16,
                        left > 0 ? x + token * p.at.x_row + column : x, left < 16 ? left : 16);
        }
    }
    // Row tiles past the last repeat it.
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
#if QG_W_POWERS
            if (thread < QG_TILE_N / 16 * (POWERS_BYTES / 16)) {
                const u32 own = first_tile + thread / 2, tile = own < last ? own : last;
                const u8* from = w + ((u64)tile * k_tiles + (is_there ? k_tile : 0)) * QG_K_TILE_BYTES +
                                 QG_SCALE_OFFSET + thread % 2 * 16;
                cp_async_16(s.powers[block] + thread * 16, from, is_there ? 16 : 0);
            }
#endif
        }
    }
};

// B operands of a packed k-block (two instructions) for eight
// features from `row`.
QG_DEVICE void load_w(u32 (&words)[4], const u8* k_block, u32 row, u32 lane) {
    const u32 own = lane % 8;
    ldmatrix_x4(words, shared_address(k_block) + (row + own) * PACKED_K_BLOCK + (lane / 8 ^ own / 2) * 16);
}

// D += A · B of FP8 operands.
QG_DEVICE void mma_codes(float (&d)[4], const u32 (&x)[4], const u32 (&w)[2]) {
#if QG_W_E5M2
    mma_m16n8k32_e4m3_e5m2(d, x, w);
#else
    mma_m16n8k32_e4m3(d, x, w);
#endif
}

#if QG_W_POWERS
// B operands as in `load_w`, with columns in natural order.
// A word has columns 4t..4t+3 of 16, for lane t.
// They are bytes of two chunks.
QG_DEVICE void load_ordered_w(u32 (&words)[4], const u8* k_block, u32 row, u32 lane) {
    const u32 own = lane / 4, t = lane % 4, chunk = t % 2 * 2, swizzle = own / 2;
    const u8* of_row = k_block + (row + own) * PACKED_K_BLOCK;
    const u32x4 even = ld_shared(reinterpret_cast<const u32x4*>(of_row + (chunk ^ swizzle) * 16));
    const u32x4 odd = ld_shared(reinterpret_cast<const u32x4*>(of_row + (chunk + 1 ^ swizzle) * 16));
    const u32 bytes = t < 2 ? 0x6420 : 0x7531;
    words[0] = prmt(even.x, odd.x, bytes);
    words[1] = prmt(even.y, odd.y, bytes);
    words[2] = prmt(even.z, odd.z, bytes);
    words[3] = prmt(even.w, odd.w, bytes);
}

// acc += X · Wᵀ over a stage; partial sums of 32 columns are
// scaled and added in f32.
// `token`: the lane's first token of the warp's first 16.
// `row`: the warp's first feature.
QG_DEVICE void multiply_stage(Accumulators& acc, const Stage& s, u32 token, u32, u32 row, u32 lane) {
    const u32 first_token = token - token_of(lane / 4);
    float factor[M_TILES][2];
#pragma unroll
    for (u32 mt = 0; mt < M_TILES; mt++) StageScales::load_x(s.scales, token + mt * MMA_M, factor[mt]);
#pragma unroll
    for (u32 block = 0; block < STAGE_K_BLOCKS; block++) {
        // Columns in natural order, 32 a step. Tokens past
        // the last are zeros.
        u32 x[M_TILES][2][4];
#pragma unroll
        for (u32 mt = 0; mt < M_TILES; mt++)
#pragma unroll
            for (u32 step = 0; step < 2; step++) {
                const u32 own = first_token + mt * MMA_M + lane / 8 % 2 * 8 + token_of(lane % 8);
                const u32 chunk = block * 4 + step * 2 + lane / 16;
                ldmatrix_x4(x[mt][step], shared_address(s.x) + own * STAGE_K + (chunk ^ own % 8) * 16);
            }
#pragma unroll
        for (u32 nt = 0; nt < N_TILES; nt++) {
            u32 w[4];
            load_ordered_w(w, s.w[block], row + nt * MMA_N, lane);
            // Scales of the lane's two features; the low byte is
            // that of the first 32 columns.
            const u32 tile = row / 16 + nt / 2, upper = nt % 2 * 16;
            const u8* of_lane = s.powers[block] + tile * POWERS_BYTES + lane % 4 * 8;
            const u32 even = ld_shared(reinterpret_cast<const u32*>(of_lane)) >> upper;
            const u32 odd = ld_shared(reinterpret_cast<const u32*>(of_lane + 4)) >> upper;
#pragma unroll
            for (u32 step = 0; step < 2; step++) {
                const float of_w[2] = {e8m0_to_f32(even >> step * 8 & 0xff), e8m0_to_f32(odd >> step * 8 & 0xff)};
#pragma unroll
                for (u32 mt = 0; mt < M_TILES; mt++) {
                    float sums[4] = {};
                    mma_codes(sums, x[mt][step], {w[step * 2], w[step * 2 + 1]});
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        float& d = acc.value[mt][nt][i];
                        d = fma_f32(factor[mt][i / 2] * of_w[i % 2], sums[i], d);
                    }
                }
            }
        }
    }
}
static_assert(WARP_N % 16 == 0, "a warp begins with a row tile");
#else
// acc += X · Wᵀ over a stage.
// `token`: the lane's first token of the warp's first 16.
// `row`: the warp's first feature.
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
                mma_codes(sums.value[mt][nt], x[mt].a[block * 2], {w[0], w[1]});
                mma_codes(sums.value[mt][nt], x[mt].a[block * 2 + 1], {w[2], w[3]});
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
#endif
