// From a warp's accumulators to rows of D in 16 bits, on Hopper, where outputs are products alone and rows of the matrix instructions are
// tokens: a line or two of the cache of each row pass through shared memory at a time, by `stmatrix`. With two, a tile of 256 features waits
// for half as many exchanges.
#pragma once
#include "atoms/stmatrix_rows.cuh"
#include "epilogue/token_rows_store.cuh"

template <u32 LINES>
struct TokenLines {
    static constexpr u32 ROW_CHUNKS = LINE_BYTES / 16;
    alignas(16) u8 bytes[LINES][WARP_TOKENS][LINE_BYTES];

    // Chunks are exchanged so that those of eight rows lie in all banks.
    QG_DEVICE u8* chunk(TokenLines& lines, u32 line, u32 row, u32 index) { return &lines.bytes[line][row][(index ^ row % 8) * 16]; }
};

// Whether outputs are products alone, in 16 bits.
QG_DEVICE bool is_product(const GemmParams& p) {
    return p.shape.activation == QG_ACTIVATION_IDENTITY && has_only<0>(p);
}

template <bool F16, bool SCALED>
QG_DEVICE u32 pack_products(float alpha, float low, float high) {
    return SCALED ? pack_pair<F16>(alpha * low, alpha * high) : pack_pair<F16>(low, high);
}

// `d` is the place of the first of FEATURES features of the first of `tokens` tokens. Of accumulators, what epilogue/token_rows_store.cuh has.
template <u32 FEATURES, bool EXCHANGED, bool F16, bool SCALED, u32 LINES>
QG_DEVICE void store_lines(const float* acc, float alpha, u8* d, u64 row_bytes, u32 tokens, TokenLines<LINES>& staging, u32 lane) {
    using Staging = TokenLines<LINES>;
    constexpr u32 OF_LINE = LINE_BYTES / 2;
    static_assert(FEATURES % (LINES * OF_LINE) == 0, "lines are whole");
    constexpr u32 ROWS_AT_ONCE = 32 / Staging::ROW_CHUNKS, ROUNDS = WARP_TOKENS / ROWS_AT_ONCE;
    // The row and the chunk that a lane gives the address of, and those that it stores.
    const u32 row = token_of(lane % 8) + lane / 8 % 2 * 8, own = lane / Staging::ROW_CHUNKS, index = lane % Staging::ROW_CHUNKS;
    d += own * row_bytes + index * 16;
#pragma unroll
    for (u32 first = 0; first < FEATURES; first += LINES * OF_LINE) {
        warp_barrier();
#pragma unroll
        for (u32 j = 0; j < LINES * OF_LINE / 8; j += 2) {
            u32 pairs[4];
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                const bool exchanged = EXCHANGED && m / 2 == 1;
                const float* pair = &acc[first / 2 + (j + m / 2) * 4 + m % 2 * 2];
                pairs[m] = pack_products<F16, SCALED>(alpha, pair[exchanged], pair[!exchanged]);
            }
            stmatrix_x4(pairs, Staging::chunk(staging, j * 8 / OF_LINE, row, j % (OF_LINE / 8) + lane / 16));
        }
        warp_barrier();
        u32x4 v[LINES][ROUNDS];
#pragma unroll
        for (u32 line = 0; line < LINES; line++)
#pragma unroll
            for (u32 i = 0; i < ROUNDS; i++)
                v[line][i] = ld_shared(reinterpret_cast<const u32x4*>(Staging::chunk(staging, line, i * ROWS_AT_ONCE + own, index)));
#pragma unroll
        for (u32 i = 0; i < ROUNDS; i++)
#pragma unroll
            for (u32 line = 0; line < LINES; line++)
                if (i * ROWS_AT_ONCE + own < tokens)
                    st_global_v4(d + i * ROWS_AT_ONCE * row_bytes + first * 2 + line * LINE_BYTES, v[line][i]);
    }
}

template <u32 FEATURES, bool EXCHANGED, u32 LINES>
QG_DEVICE void store_token_lines(const float* acc, const GemmParams& p, u32 first_token, u32 first_row, TokenLines<LINES>& staging,
                                 u32 lane) {
    u8* d = reinterpret_cast<u8*>(p.at.d) + ((u64)first_token * p.at.d_row + first_row) * 2;
    const u64 row_bytes = p.at.d_row * 2;
    const u32 tokens = first_token < p.shape.m ? p.shape.m - first_token : 0;
    if (p.shape.d_dtype == DTYPE_F16)
        store_lines<FEATURES, EXCHANGED, true, true>(acc, p.shape.alpha, d, row_bytes, tokens, staging, lane);
    else if (p.shape.alpha == 1.0f)
        store_lines<FEATURES, EXCHANGED, false, false>(acc, 1.0f, d, row_bytes, tokens, staging, lane);
    else
        store_lines<FEATURES, EXCHANGED, false, true>(acc, p.shape.alpha, d, row_bytes, tokens, staging, lane);
}
