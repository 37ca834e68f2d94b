// Epilogue of 16 rows of scaled-only outputs per warp.
// Outputs are converted in registers.
// They pass through shared memory one line per row, so that
// eight lanes store a line together.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "dequant/halves.cuh"

constexpr u32 LINE_ROWS = 16, LINE_BYTES = 128;

// A line or half a line of each row, in CHUNKS of 16 bytes.
// Swizzle: eight rows write to all banks.
struct LineStaging {
    alignas(16) u32 word[LINE_ROWS * LINE_BYTES / 4];  // [row][word], swizzled

    template <u32 CHUNKS>
    QG_DEVICE u32* chunk(LineStaging& staging, u32 row, u32 index) {
        static_assert(CHUNKS == 8 || CHUNKS == 4, "eight rows have four or eight exchanges");
        const u32 exchange = CHUNKS == 8 ? row % 8 : row / 2 % 4;
        return &staging.word[(row * CHUNKS + (index ^ exchange)) * 4];
    }
    // Stores the staged rows, at most `rows`.
    // `d` is the line's address in the first row.
    template <u32 CHUNKS>
    QG_DEVICE void store(LineStaging& staging, u8* d, u64 row_bytes, u32 rows, u32 lane) {
        constexpr u32 AT_ONCE = 32 / CHUNKS;
        u32x4 v[LINE_ROWS / AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < LINE_ROWS / AT_ONCE; i++)
            v[i] = ld_shared(reinterpret_cast<const u32x4*>(chunk<CHUNKS>(staging, i * AT_ONCE + lane / CHUNKS, lane % CHUNKS)));
#pragma unroll
        for (u32 i = 0; i < LINE_ROWS / AT_ONCE; i++) {
            const u32 row = i * AT_ONCE + lane / CHUNKS;
            if (row < rows) st_global_v4(d + row * row_bytes + lane % CHUNKS * 16, v[i]);
        }
    }
};

// Stores COLUMNS columns in 16 bits.
// Per eight columns a lane has two accumulators of row `row`
// and two of the row eight further.
// EXCHANGED: pairs are swapped in odd groups of eight columns.
// `factor(column, of)` sets the factors of two columns.
template <u32 COLUMNS, bool EXCHANGED, bool F16, class Factor>
QG_DEVICE void store_whole_rows_16(const float* acc, LineStaging& staging, u8* d, u64 row_bytes, u32 rows, u32 row, u32 lane,
                                   const Factor& factor) {
    constexpr u32 OF_LINE = COLUMNS < LINE_BYTES / 2 ? COLUMNS : LINE_BYTES / 2, CHUNKS = OF_LINE / 8;
    static_assert(COLUMNS % OF_LINE == 0, "lines are whole");
#pragma unroll
    for (u32 first = 0; first < COLUMNS; first += OF_LINE) {
        warp_barrier();
#pragma unroll
        for (u32 j = 0; j < OF_LINE / 8; j++) {
            float of[2];
            factor(first + j * 8 + lane % 4 * 2, of);
            const bool exchanged = EXCHANGED && j % 2 == 1;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const float* pair = &acc[first / 2 + j * 4 + half * 2];
                st_shared(LineStaging::chunk<CHUNKS>(staging, row + half * 8, j) + lane % 4,
                          f32_to_halves<F16 ? DTYPE_F16 : DTYPE_BF16>(of[0] * pair[exchanged], of[1] * pair[!exchanged]));
            }
        }
        warp_barrier();
        LineStaging::store<CHUNKS>(staging, d + first * 2, row_bytes, rows, lane);
    }
}

// `store_whole_rows_16` for f32 columns.
template <u32 COLUMNS, class Factor>
QG_DEVICE void store_whole_rows_f32(const float* acc, LineStaging& staging, u8* d, u64 row_bytes, u32 rows, u32 row, u32 lane,
                                    const Factor& factor) {
    constexpr u32 OF_LINE = LINE_BYTES / 4, CHUNKS = OF_LINE / 4;
    static_assert(COLUMNS % OF_LINE == 0, "lines are whole");
#pragma unroll
    for (u32 first = 0; first < COLUMNS; first += OF_LINE) {
        warp_barrier();
#pragma unroll
        for (u32 j = 0; j < OF_LINE / 8; j++) {
            float of[2];
            factor(first + j * 8 + lane % 4 * 2, of);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const float* pair = &acc[first / 2 + j * 4 + half * 2];
                u32* at = LineStaging::chunk<CHUNKS>(staging, row + half * 8, j * 2 + lane % 4 / 2) + lane % 2 * 2;
                st_shared(reinterpret_cast<f32x2*>(at), f32x2{of[0] * pair[0], of[1] * pair[1]});
            }
        }
        warp_barrier();
        LineStaging::store<CHUNKS>(staging, d + first * 4, row_bytes, rows, lane);
    }
}
