// A k-tile of 64 columns of X in E4M3 and of W in E4M3 or E2M1, both with a power of two for 32 columns: acc[16 rows, 8 tokens] += W · X.
//
// The columns of W stay in the order of the packed layout: of each 16, lane t of a group of four has 2t, 2t+8, 2t+1, 2t+9
// (qgemm-formats/src/prepack.rs). X is brought into that order while it is written to shared memory. Instructions take E2M1 in the
// middle of a byte.
#pragma once
#include "atoms/mma_block_scaled.cuh"
#include "atoms/numeric.cuh"
#include "dequant/k_tile.cuh"
#include "mainloop/sm120/block_scaled_params.cuh"

static_assert(QG_K_TILE == 64 && QG_TILE_ROWS == 16 && QG_SUB_BLOCK == 32, "a k-tile is two instructions, with a scale each");
constexpr bool W_E2M1 = KTile::Codes0::BITS == 4;

// The A operands of one row tile, one a step of 32 columns, and the scales of both steps.
struct WOperand {
    u32 code[2][4];
    u32 scale;
};

QG_DEVICE WOperand w_operand(const KTile& k_tile, u32 lane) {
    WOperand w;
#pragma unroll
    for (u32 step = 0; step < 2; step++)
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            if constexpr (W_E2M1) {
                const u32 word = k_tile.codes0.word[row * 2 + step];
                w.code[step][row] = (word & 0x0f0f0f0fu) << 2;
                w.code[step][row + 2] = word >> 2 & 0x3c3c3c3cu;
            } else {
                w.code[step][row] = k_tile.codes0.word[row * 4 + step * 2];
                w.code[step][row + 2] = k_tile.codes0.word[row * 4 + step * 2 + 1];
            }
        }
    // Lane t = 0 gives the scales of row g, lane t = 1 those of row g + 8.
    w.scale = k_tile.scales0.word[0] >> (16 * (lane % 2));
    return w;
}

// 64 columns of one token: codes in the order of columns, then scales.
struct XKTile {
    u32x4 code[4];
    u32 scale;
};

// Codes and scales outside X are zero; rows of codes are stored in whole 16 bytes, zeros behind the last column.
QG_DEVICE XKTile load_x_k_tile(const BlockScaledParams& p, u32 token, u32 k_tile) {
    XKTile x = {};
    const CudaGemmShape& shape = p.gemm.shape;
    if (token >= shape.m) return x;
    const u8* row = reinterpret_cast<const u8*>(p.gemm.at.x) + token * p.gemm.at.x_row;
    const u8* scales = reinterpret_cast<const u8*>(p.x_scales) + token * p.x_scale_row;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (k_tile * 64 + i * 16 < shape.k) x.code[i] = ld_global_v4(row + (u64)k_tile * 64 + i * 16);
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (k_tile * 64 + i * 32 < shape.k) x.scale |= ld_global_cached_u8(scales + k_tile * 2 + i) << (8 * i);
    return x;
}

// X of some tokens and k-tiles in shared memory: for each token and k-tile, the four words of lane t = 0, of t = 1, …
template <u32 TOKENS, u32 K_TILES>
struct XTile {
    // Sixteen words of padding put the two tokens that a quarter of a warp reads into different banks.
    static constexpr u32 PITCH = K_TILES * 16 + 16;
    alignas(16) u32 code[TOKENS * PITCH];
    u32 scale[TOKENS * K_TILES];

    // Threads of a warp that store at once, of two tokens and four k-tiles, begin with other lanes' words, so that they reach all banks.
    QG_DEVICE void store(XTile& tile, u32 token, u32 k_tile, const XKTile& x) {
        u32x4* words = reinterpret_cast<u32x4*>(tile.code + token * PITCH + k_tile * 16);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 t = (i + k_tile / 2 + token % 2 * 2) % 4;
            st_shared(words + t, u32x4{x_word(x.code[0], t), x_word(x.code[1], t), x_word(x.code[2], t), x_word(x.code[3], t)});
        }
        st_shared(&tile.scale[token * K_TILES + k_tile], x.scale);
    }
    // The word of lane t, from 16 columns in natural order.
    QG_DEVICE u32 x_word(const u32x4& natural, u32 t) {
        const u32 low = t < 2 ? natural.x : natural.y, high = t < 2 ? natural.z : natural.w;
        return prmt(low, high, t % 2 == 0 ? 0x5140 : 0x7362);
    }

    // acc += W · X for the eight tokens from `first_token`.
    QG_DEVICE void accumulate(float (&acc)[4], const WOperand& w, const XTile& tile, u32 first_token, u32 k_tile, u32 lane) {
        const u32 token = first_token + lane / 4;
        const u32x4 x = ld_shared(
            reinterpret_cast<const u32x4*>(tile.code + token * PITCH + k_tile * 16 + lane % 4 * 4));
        const u32 scale = ld_shared(&tile.scale[token * K_TILES + k_tile]);
        mma_m16n8k32_mxf8<W_E2M1, 0>(acc, w.code[0], {x.x, x.y}, w.scale, scale);
        mma_m16n8k32_mxf8<W_E2M1, 1>(acc, w.code[1], {x.z, x.w}, w.scale, scale);
    }
};
