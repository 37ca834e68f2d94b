// Turing accumulators of 16 rows and eight tokens.
// Lane l has rows l/4 and l/4 + 8, tokens 2(l%4) and +1.
#pragma once
#include "mainloop/sm70/w_stream.cuh"

static_assert(QG_TILE_M % 8 == 0, "tokens fill the instruction");
constexpr u32 TOKEN_TILES = QG_TILE_M / 8;

struct Accumulators {
    float value[ROW_TILES][TOKEN_TILES][4];  // [row tile][token tile][register]

    // Calls `visit(row, token, value)` for this lane's accumulators.
    // Rows count from the warp's first row.
    template <class Visit>
    QG_DEVICE void for_each(const Accumulators& acc, u32 lane, Visit visit) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    visit(rt * 16 + lane / 4 + i / 2 * 8, tt * 8 + lane % 4 * 2 + i % 2, acc.value[rt][tt][i]);
    }
};
