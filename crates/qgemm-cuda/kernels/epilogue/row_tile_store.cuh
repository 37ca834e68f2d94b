// Epilogue of a row tile in a warp's registers.
// A lane has two rows, eight apart, of two
// tokens per token tile.
// In a gated pair these rows are a feature's gate and up.
#pragma once
#include "dequant/operand.cuh"
#include "epilogue/store.cuh"
#include "mainloop/k_tile_product.cuh"
#include "mainloop/x_tile_copies.cuh"
#include "sched/experts.cuh"

// Rows of D of a lane's tokens.
struct LaneTokens {
    u32 row[TOKEN_TILES][2];

    QG_DEVICE LaneTokens of(const TileTokens& tile, u32 lane) {
        LaneTokens tokens;
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) tokens.row[tt][i] = ld_shared(&tile.row[tt * MMA_TOKENS + lane % 4 * 2 + i]);
        return tokens;
    }
};

// Whether outputs are only scaled by alpha.
QG_DEVICE bool are_products(const GemmParams& p) {
    return has_only<0>(p) && p.shape.activation == QG_ACTIVATION_IDENTITY;
}

// Problem of the rows `own`.
QG_DEVICE GemmParams problem_of(const GemmParams& given, const OwnRows& own) {
    GemmParams p = given;
    OwnRows::narrow(own, p);
    return p;
}

// Stores rows `row` and `row` + 8 of one token,
// with all options.
// The problem is narrowed here: passing a narrowed copy to a
// call goes through local memory for every row tile.
QG_DEVICE void store_two_rows(const GemmParams& given, const OwnRows& own, u32 token, u32 row, float low, float high) {
    const GemmParams p = problem_of(given, own);
    const u32 features = p.shape.out_features;
    if (p.shape.flags & QG_FLAG_GATED) {
        const u32 feature = feature_of_gate(row);
        if (feature >= features) return;
        const float gate = linear_output(p, token, row, feature, low), up = linear_output(p, token, row + 8, features + feature, high);
        store_feature(p, token, feature, of_gate(p, gate) * of_up(p, up));
        return;
    }
    const float acc[2] = {low, high};
#pragma unroll 1
    for (u32 i = 0; i < 2; i++, row += 8)
        if (row < features)
            store_feature(p, token, row, activate(p.shape.activation, linear_output(p, token, row, row, acc[i])));
}

// All lanes of a warp call it; `products` is `are_products`.
QG_DEVICE void store_row_tile(const GemmParams& given, const OwnRows& own, bool products, const LaneTokens& tokens, const Accumulators& acc,
                              u32 row_tile, u32 lane) {
    const u32 row = row_tile * QG_TILE_ROWS + lane / 4;
    const bool direct = products && (row_tile + 1) * QG_TILE_ROWS <= given.shape.out_features;
    const u32 dtype = given.shape.d_dtype;
    const u64 d = given.at.d + (given.groups.list != 0 ? 0 : own.first * given.at.d_row * OwnRows::bytes_of(dtype));
    if (direct) {
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                if (tokens.row[tt][i] == TileTokens::NONE) continue;
                const u64 at = tokens.row[tt][i] * given.at.d_row + row;
                store_dense(dtype, d, at, given.shape.alpha * (acc.value[0][tt][i] * FROM_UNITS));
                store_dense(dtype, d, at + 8, given.shape.alpha * (acc.value[0][tt][2 + i] * FROM_UNITS));
            }
        return;
    }
    // Not unrolled, to keep one copy of the code of all options.
#pragma unroll 1
    for (u32 i = 0; i < TOKEN_TILES * 2; i++) {
        u32 token = TileTokens::NONE;
        float low = 0, high = 0;
#pragma unroll
        for (u32 other = 0; other < TOKEN_TILES * 2; other++)
            if (other == i) {
                token = tokens.row[other / 2][other % 2];
                low = acc.value[0][other / 2][other % 2] * FROM_UNITS, high = acc.value[0][other / 2][2 + other % 2] * FROM_UNITS;
            }
        if (token != TileTokens::NONE) store_two_rows(given, own, token, row, low, high);
    }
}
