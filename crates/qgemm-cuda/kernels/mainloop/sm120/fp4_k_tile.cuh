// A k-tile of 64 columns, both operands in FP4 with a scale a block: acc[16 rows, 8 tokens] += W · X.
//
// A dot product does not depend on the order of its columns, if both operands have the same order and every column
// meets its own scale. So the columns of W stay in the order of the packed layout, and X is brought into that order
// while it is written to shared memory. Of each 32 columns, lane t of a group of four has a word with nibble 2j + o for
// column 16 o + c(t)[j], where c(t) = {2t, 2t+8, 2t+1, 2t+9} (qgemm-formats/src/prepack.rs). The instruction takes
// nibble i for column 8t + i of 32. With a scale per 32 columns that does not matter. With a scale per 16, the lanes t
// = 0, 1 must have the first 16 columns and t = 2, 3 the others: lanes t and t ^ 2 exchange half of their nibbles, and
// nibble 2j + o becomes column 16 (t / 2) + 4 o + c(t % 2)[j].
#pragma once
#include "atoms/mma_block_scaled.cuh"
#include "atoms/numeric.cuh"
#include "atoms/warp.cuh"
#include "dequant/k_tile.cuh"
#include "mainloop/sm120/block_scaled_params.cuh"

static_assert(QG_K_TILE == 64 && QG_TILE_ROWS == 16, "a k-tile is one instruction");
static_assert(QG_SUB_BLOCK == 32 || QG_SUB_BLOCK == 16, "a scale for 32 columns (UE8M0) or 16 (UE4M3)");
constexpr bool SCALE_PER_16 = QG_SUB_BLOCK == 16;
// Scales of a row in a k-tile: bytes of a word.
constexpr u32 SCALES = 64 / QG_SUB_BLOCK;

// The A operand of one row tile.
struct WOperand {
    u32 code[4];
    u32 scale;
};

// This lane's word of columns in the order above, from its word in the packed layout.
QG_DEVICE u32 exchange_halves(u32 word, u32 lane) {
    const bool upper = lane & 2;
    const u32 received = shfl_xor_u32((upper ? word : word >> 4) & 0x0f0f0f0fu, 2);
    return upper ? (word & 0xf0f0f0f0u) | received : (word & 0x0f0f0f0fu) | received << 4;
}

QG_DEVICE WOperand w_operand(const KTile& k_tile, u32 lane) {
    const u32(&word)[4] = k_tile.codes0.word;
    // The packed layout has row g, then row g + 8. The instruction takes them side by side.
    WOperand w = {{word[0], word[2], word[1], word[3]}, 0};
    if constexpr (SCALE_PER_16) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) w.code[i] = exchange_halves(w.code[i], lane);
        // Lane t = 0 holds the scales of row g, lane t = 1 those of row g + 8.
        w.scale = lane % 2 == 0 ? k_tile.scales0.word[0] : k_tile.scales0.word[1];
    } else {
        w.scale = k_tile.scales0.word[0] >> (16 * (lane % 2));
    }
    return w;
}

// 64 columns of one token: codes in the order of columns, then scales.
struct XKTile {
    u32 code[8];
    u32 scale;
};

// Codes and scales outside X are zero.
QG_DEVICE XKTile load_x_k_tile(const BlockScaledParams& p, u32 token, u32 k_tile) {
    XKTile x = {};
    const CudaGemmShape& shape = p.gemm.shape;
    if (token >= shape.m) return x;
    const u8* row = reinterpret_cast<const u8*>(p.gemm.at.x) + token * p.gemm.at.x_row;
    const u8* scales = reinterpret_cast<const u8*>(p.x_scales) + token * p.x_scale_row;
#pragma unroll
    for (u32 i = 0; i < SCALES; i++) {
        const u32 block = k_tile * SCALES + i;
        if (block * QG_SUB_BLOCK < shape.k) x.scale |= ld_global_cached_u8(scales + block) << (8 * i);
    }
    if ((shape.flags & QG_FLAG_X_ALIGNED16) && k_tile * 64 + 64 <= shape.k) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32x4 v = ld_global_v4(row + k_tile * 32 + i * 16);
            x.code[i * 4] = v.x, x.code[i * 4 + 1] = v.y, x.code[i * 4 + 2] = v.z, x.code[i * 4 + 3] = v.w;
        }
        return x;
    }
    // Bytes are shifted in from the end, one at a time, so that the loop need not be unrolled to keep codes in
    // registers.
#pragma unroll 1
    for (u32 i = 0; i < 32; i++) {
        const u32 column = k_tile * 64 + i * 2;
        u32 pair = column < shape.k ? ld_global_cached_u8(row + column / 2) : 0;
        if (column + 1 == shape.k) pair &= 0x0fu;
#pragma unroll
        for (u32 w = 0; w < 8; w++) x.code[w] = (x.code[w] >> 8) | (w + 1 < 8 ? x.code[w + 1] : pair) << 24;
    }
    return x;
}

// The word of lane t, from 32 columns in natural order.
QG_DEVICE u32 x_word(const u32* natural, u32 t) {
    // `even`: the bytes whose low nibbles become nibbles 0 and 2, and whose high nibbles become 4 and 6. `odd`: the
    // same for nibbles 1, 3, 5, 7.
    u32 even, odd;
    if constexpr (SCALE_PER_16) {
        const u32* words = natural + t / 2 * 2;
        even = prmt(words[0], words[1], t % 2 * 0x1111u + 0x4040u);
        odd = prmt(words[0], words[1], (t % 2 + 2) * 0x1111u + 0x4040u);
    } else {
        even = prmt(natural[0], natural[1], t * 0x1111u + 0x4040u);
        odd = prmt(natural[2], natural[3], t * 0x1111u + 0x4040u);
    }
    return (even & 0x0f0fu) | (odd & 0x0f0fu) << 4 | (even & 0xf0f00000u) >> 4 | (odd & 0xf0f00000u);
}

// X of some tokens and k-tiles in shared memory: for each token and k-tile, the two words of lane t = 0, of t = 1, …
// Odd tokens have the words of t = 2, 3 first, so that a warp that stores 16 bytes of two tokens reaches all banks.
template <u32 TOKENS, u32 K_TILES>
struct XTile {
    // Eight words of padding put the four tokens that half a warp reads into different banks.
    static constexpr u32 PITCH = K_TILES * 8 + 8;
    alignas(16) u32 code[TOKENS * PITCH];
    u32 scale[TOKENS * K_TILES];

    QG_DEVICE void store(XTile& tile, u32 token, u32 k_tile, const XKTile& x) {
        u32x4* words = reinterpret_cast<u32x4*>(tile.code + token * PITCH + k_tile * 8);
#pragma unroll
        for (u32 t = 0; t < 4; t += 2)
            st_shared(words + (t / 2 ^ token % 2), u32x4{x_word(x.code, t), x_word(x.code + 4, t),
                                                         x_word(x.code, t + 1), x_word(x.code + 4, t + 1)});
        st_shared(&tile.scale[token * K_TILES + k_tile], x.scale);
    }

    // acc += W · X for the eight tokens from `first_token`.
    QG_DEVICE void accumulate(float (&acc)[4], const WOperand& w, const XTile& tile, u32 first_token, u32 k_tile,
                              u32 lane) {
        const u32 token = first_token + lane / 4;
        const u32 place = (lane / 2 ^ lane / 4) % 2 * 4 + lane % 2 * 2;
        const u32x2 x = ld_shared(reinterpret_cast<const u32x2*>(tile.code + token * PITCH + k_tile * 8 + place));
        const u32 scale = ld_shared(&tile.scale[token * K_TILES + k_tile]);
        if constexpr (SCALE_PER_16)
            mma_m16n8k64_nvf4(acc, w.code, {x.x, x.y}, w.scale, scale);
        else
            mma_m16n8k64_mxf4(acc, w.code, {x.x, x.y}, w.scale, scale);
    }
};
