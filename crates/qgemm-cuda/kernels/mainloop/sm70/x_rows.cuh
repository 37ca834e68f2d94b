// X rows of a CTA's tokens in shared memory, 64 columns a stage.
// Columns are in natural order:
// 128 bytes a token, eight columns per 16-byte chunk.
// The chunks of token t are permuted by t % 8.
// Eight lanes then reach all banks in both accesses:
// stores of one token, and loads of one chunk of eight tokens.
#pragma once
#include "atoms/warp.cuh"
#include "dequant/operand.cuh"
#include "mainloop/x_group.cuh"

static_assert(QG_USE_MMA, "rows of f16");

using XSource = GemmParams;
// Scale and minimum of a row in a sub-block.
using RowTerms = Operands;

// Columns between barriers of the main loop:
// a cache line of X per token, and whole k-blocks.
constexpr u32 STAGE_K = 64;
constexpr u32 STAGE_K_BLOCKS = STAGE_K / K_BLOCK;
constexpr u32 STAGE_GROUPS = STAGE_K / GROUP;

// Sub-blocks per stage; 1 for a longer sub-block.
constexpr u32 STAGE_SUBS = QG_SUB_BLOCK < STAGE_K ? STAGE_K / QG_SUB_BLOCK : 1;
static_assert(!Operands::HAS_MIN || QG_SUB_BLOCK <= STAGE_K, "X block sums of whole sub-blocks");

struct XRows {
    static constexpr u32 ROW_BYTES = STAGE_K * 2;
    // Four words of padding:
    // X block sums of neighbouring sub-blocks use different banks.
    static constexpr u32 SUM_PITCH = QG_TILE_M + 4;
    alignas(16) u8 byte[QG_TILE_M * ROW_BYTES];  // [token][column], swizzled
    // X block sum of each token and sub-block, for minimums.
    float sum[Operands::HAS_MIN ? STAGE_SUBS * SUM_PITCH : 2];  // [sub-block][token]

    // Offset of the first eight columns of `token`.
    // Columns 8 · g are at (offset ^ 16 · g).
    // A token eight further is eight rows further.
    QG_DEVICE u32 offset(u32 token) {
        return token * ROW_BYTES + token % STAGE_GROUPS * 16;
    }
    // Address of columns 8 · `group` for the token of `offset`, or
    // for the token 8 · `tt` further.
    QG_DEVICE const u8* address(const XRows& rows, u32 offset, u32 group, u32 tt) {
        return rows.byte + (offset ^ group * 16) + tt * 8 * ROW_BYTES;
    }

    // X block sums of `token`, which is even, and of the next token.
    QG_DEVICE f32x2 sums(const XRows& rows, u32 sub, u32 token) {
        return ld_shared(reinterpret_cast<const f32x2*>(rows.sum + sub * SUM_PITCH + token));
    }
};

// A thread's share of X: eight columns of some tokens.
struct XStream {
    // Tokens per pass of the CTA, and passes per stage.
    static constexpr u32 TOKENS = QG_THREADS / STAGE_GROUPS;
    static constexpr u32 TIMES = (QG_TILE_M + TOKENS - 1) / TOKENS;
    static_assert(TOKENS % 8 == 0 && QG_TILE_M % 4 == 0, "a thread's tokens lie alike, and a warp's are in or out");
    // Columns of tokens past the last stay zero.
    XGroup group[TIMES];
    // Address of the first token's next columns; for gathered MoE
    // rows, one address per token.
    const u8* next[QG_EXPERTS ? TIMES : 1];

    QG_DEVICE void begin(XStream& x, const GemmParams& p, u32 first_token, u32 stage, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < (QG_EXPERTS ? TIMES : 1); i++) {
            u32 token;
            find_x_row(p, first_token + thread / STAGE_GROUPS + i * TOKENS, token);
            const u64 element = token * p.at.x_row + stage * STAGE_K + thread % STAGE_GROUPS * GROUP;
            x.next[i] = reinterpret_cast<const u8*>(p.at.x) + element * X_BYTES;
        }
#pragma unroll
        for (u32 i = 0; i < TIMES; i++) x.group[i] = {};
    }

    // Loads the columns from 64 · `stage`.
    // Calls must be in stage order.
    QG_DEVICE void load(XStream& x, const GemmParams& p, u32 first_token, u32 stage, u32 thread) {
        const u32 column = stage * STAGE_K + thread % STAGE_GROUPS * GROUP;
        const bool whole =
            (p.shape.flags & QG_FLAG_X_ALIGNED16) && !(p.shape.flags & QG_FLAG_K_ORDER) && column + GROUP <= p.shape.k;
#pragma unroll
        for (u32 i = 0; i < TIMES; i++) {
            const u32 token = thread / STAGE_GROUPS + i * TOKENS;
            if ((QG_TILE_M % TOKENS != 0 && token >= QG_TILE_M) || first_token + token >= p.shape.m) continue;
            if (whole) {
                const u8* next = QG_EXPERTS ? x.next[QG_EXPERTS ? i : 0] : x.next[0] + i * TOKENS * X_BYTES * p.at.x_row;
                const u32x4 v = ld_global_v4(next);
                x.group[i] = {v.x, v.y, v.z, v.w};
            } else {
                x.group[i] = load_x_group(p, first_token + token, column);
            }
        }
#pragma unroll
        for (u32 i = 0; i < (QG_EXPERTS ? TIMES : 1); i++) x.next[i] += STAGE_K * X_BYTES;
    }

    QG_DEVICE void store(XRows& rows, const XStream& x, u32 thread) {
        const u32 token = thread / STAGE_GROUPS, group = thread % STAGE_GROUPS;
        u8* first = rows.byte + (XRows::offset(token) ^ group * 16);
#pragma unroll
        for (u32 i = 0; i < TIMES; i++) {
            if (QG_TILE_M % TOKENS != 0 && token + i * TOKENS >= QG_TILE_M) continue;
            const u32(&word)[4] = x.group[i].word;
            st_shared(reinterpret_cast<u32x4*>(first + i * TOKENS * XRows::ROW_BYTES),
                      u32x4{word[0], word[1], word[2], word[3]});
            if constexpr (Operands::HAS_MIN) store_sum(rows, word, token + i * TOKENS, group);
        }
    }

    // Lanes that share a sub-block of a token add their columns.
    QG_DEVICE void store_sum(XRows& rows, const u32 (&word)[4], u32 token, u32 group) {
        constexpr u32 SUB_GROUPS = STAGE_GROUPS / STAGE_SUBS;
        float sum = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) sum += f16_to_f32(word[i] & 0xffffu) + f16_to_f32(word[i] >> 16);
#pragma unroll
        for (u32 lanes = 1; lanes < SUB_GROUPS; lanes *= 2) sum += shfl_xor(sum, lanes);
        if (group % SUB_GROUPS == 0) st_shared(&rows.sum[group / SUB_GROUPS * XRows::SUM_PITCH + token], sum);
    }
};
