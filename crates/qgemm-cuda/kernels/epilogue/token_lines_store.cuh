// Hopper epilogue of scaled-only 16-bit outputs, for MMA rows
// that are tokens.
// `stmatrix` moves LINES 128-byte lines of each row through
// shared memory at a time.
// With two lines a tile of 256 features has half
// as many exchanges.
#pragma once
#include "atoms/stmatrix_rows.cuh"
#include "epilogue/token_rows_store.cuh"

template <u32 LINES>
struct TokenLines {
    static constexpr u32 ROW_CHUNKS = LINE_BYTES / 16;
    alignas(16) u8 bytes[LINES][WARP_TOKENS][LINE_BYTES];  // [line][token][byte], swizzled

    // Swizzle: the chunks of eight rows use all banks.
    QG_DEVICE u8* chunk(TokenLines& lines, u32 line, u32 row, u32 index) { return &lines.bytes[line][row][(index ^ row % 8) * 16]; }
};

// Allowed operands.
// Block-scaled weights have no row scales.
constexpr u32 PRODUCT_OPERANDS = QG_W_BLOCK_SCALES ? 0 : QG_FLAG_ROW_SCALE;

// Whether outputs are only scaled, in 16 bits.
QG_DEVICE bool is_product(const GemmParams& p) {
    return p.shape.activation == QG_ACTIVATION_IDENTITY && are_halves_with<PRODUCT_OPERANDS>(p);
}

// Stores FEATURES features of `tokens` tokens; `d` is the first.
// Accumulator layout: epilogue/token_rows_store.cuh.
// If SCALED, `factor(column, of)` sets the factors of two
// neighbouring features; otherwise they are 1.
template <u32 FEATURES, bool EXCHANGED, bool F16, bool SCALED, u32 LINES, class Factor>
QG_DEVICE void store_lines(const float* acc, u8* d, u64 row_bytes, u32 tokens, TokenLines<LINES>& staging, u32 lane, const Factor& factor) {
    using Staging = TokenLines<LINES>;
    constexpr u32 OF_LINE = LINE_BYTES / 2;
    static_assert(FEATURES % (LINES * OF_LINE) == 0 || (LINES == 1 && FEATURES % 16 == 0), "lines are whole, or the last is one of them");
    constexpr u32 ROWS_AT_ONCE = 32 / Staging::ROW_CHUNKS, ROUNDS = WARP_TOKENS / ROWS_AT_ONCE;
    // Row and chunk whose address the lane gives to `stmatrix`,
    // and the row and chunk that it stores.
    const u32 row = token_of(lane % 8) + lane / 8 % 2 * 8, own = lane / Staging::ROW_CHUNKS, index = lane % Staging::ROW_CHUNKS;
    constexpr u32 HALF = F16 ? DTYPE_F16 : DTYPE_BF16;
    d += own * row_bytes + index * 16;
#pragma unroll
    for (u32 first = 0; first < FEATURES; first += LINES * OF_LINE) {
        const u32 here = FEATURES - first < LINES * OF_LINE ? FEATURES - first : LINES * OF_LINE;
        warp_barrier();
#pragma unroll
        for (u32 j = 0; j < here / 8; j += 2) {
            u32 pairs[4];
#pragma unroll
            for (u32 eight = 0; eight < 2; eight++) {
                const bool exchanged = EXCHANGED && eight == 1;
                float of[2] = {1.0f, 1.0f};
                if constexpr (SCALED) factor(first + (j + eight) * 8 + lane % 4 * 2, of);
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    const float* pair = &acc[first / 2 + (j + eight) * 4 + half * 2];
                    const float low = pair[exchanged], high = pair[!exchanged];
                    pairs[eight * 2 + half] = SCALED ? f32_to_halves<HALF>(of[0] * low, of[1] * high) : f32_to_halves<HALF>(low, high);
                }
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
                if (i * ROWS_AT_ONCE + own < tokens && (here == LINES * OF_LINE || index < here / 8))
                    st_global_v4(d + i * ROWS_AT_ONCE * row_bytes + first * 2 + line * LINE_BYTES, v[line][i]);
    }
}

template <u32 FEATURES, bool EXCHANGED, u32 LINES>
QG_DEVICE void store_token_lines(const float* acc, const GemmParams& p, u32 first_token, u32 first_row, TokenLines<LINES>& staging,
                                 u32 lane) {
    u8* d = reinterpret_cast<u8*>(p.at.d) + ((u64)first_token * p.at.d_row + first_row) * 2;
    const u64 row_bytes = p.at.d_row * 2;
    const u32 tokens = first_token < p.shape.m ? p.shape.m - first_token : 0;
    const bool scales = p.shape.flags & PRODUCT_OPERANDS;
    const auto factor = [&](u32 column, float (&of)[2]) {
        of[0] = of[1] = p.shape.alpha;
        if (!scales) return;
        of[0] *= load_dense(DTYPE_F32, p.at.row_scale, first_row + column);
        of[1] *= load_dense(DTYPE_F32, p.at.row_scale, first_row + column + 1);
    };
    if (p.shape.d_dtype == DTYPE_F16)
        store_lines<FEATURES, EXCHANGED, true, true>(acc, d, row_bytes, tokens, staging, lane, factor);
    else if (scales || p.shape.alpha != 1.0f)
        store_lines<FEATURES, EXCHANGED, false, true>(acc, d, row_bytes, tokens, staging, lane, factor);
    else
        store_lines<FEATURES, EXCHANGED, false, false>(acc, d, row_bytes, tokens, staging, lane, factor);
}
