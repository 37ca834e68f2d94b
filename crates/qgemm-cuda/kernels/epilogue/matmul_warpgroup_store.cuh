// Matmul epilogue of a warpgroup, through shared memory.
// Tiles of 16 rows by 32 columns pass per warp, so that
// neighbouring lanes store neighbouring runs.
// Outputs that are only scaled have a faster path.
#pragma once
#include "atoms/warp.cuh"
#include "epilogue/matmul_store.cuh"
#include "epilogue/whole_rows.cuh"

struct WarpgroupStaging {
    static constexpr u32 COLUMNS = 32, PITCH = COLUMNS + 8;
    alignas(16) float acc[16 * PITCH];  // [row][column], swizzled

    // Swizzle: groups of four columns swap in odd rows, so that
    // lanes reading two rows use all banks.
    QG_DEVICE float* at(WarpgroupStaging& staging, u32 row, u32 column) {
        return &staging.acc[row * PITCH + (column ^ row % 2 * 4)];
    }
};

// Writes part `part` of the accumulators to shared memory.
template <u32 COUNT>
QG_DEVICE void put_part(const float (&acc)[COUNT], u32 part, WarpgroupStaging& staging, u32 lane) {
    constexpr u32 COLUMNS = WarpgroupStaging::COLUMNS;
#pragma unroll
    for (u32 j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float* pair = &acc[part * (COLUMNS / 2) + j * 4 + half * 2];
            st_shared(
                reinterpret_cast<f32x2*>(WarpgroupStaging::at(staging, lane / 4 + half * 8, j * 8 + lane % 4 * 2)),
                f32x2{pair[0], pair[1]});
        }
}

// Fast path: outputs are the accumulator times one factor, and
// rows of D are aligned.
// A whitelist: unknown flags take the general path.
QG_DEVICE bool is_plain(const MatmulParams& p) {
    constexpr u32 ALLOWED =
        QG_FLAG_D_ALIGNED16 | QG_FLAG_C_ALIGNED16 | QG_FLAG_K_GROUPED | QG_FLAG_A_SCALE | QG_FLAG_B_SCALE;
    return !(p.shape.flags & ~ALLOWED) && (p.shape.flags & QG_FLAG_D_ALIGNED16) && p.types.activation == QG_ACTIVATION_IDENTITY;
}

// Stores 16 rows from `row` on, 2 · COUNT columns
// from `column` on.
template <u32 COUNT>
QG_DEVICE void store_matmul_rows(const float (&acc)[COUNT], const MatmulParams& p, u32 product, u32 row, u32 column,
                                 WarpgroupStaging& staging, u32 lane) {
    constexpr u32 COLUMNS = WarpgroupStaging::COLUMNS, RUNS = COLUMNS / RUN;
    constexpr u32 PARTS = COUNT * 2 / COLUMNS;
    if (is_plain(p) && column + COUNT * 2 <= p.shape.n) {
        static_assert(sizeof(LineStaging) <= sizeof(WarpgroupStaging), "lines pass through the same memory");
        LineStaging& lines = reinterpret_cast<LineStaging&>(staging);
        const u64 bytes = p.types.d_dtype == DTYPE_F32 ? 4 : 2, row_bytes = p.at.d_row * bytes;
        u8* d = reinterpret_cast<u8*>(p.at.d) + (product * p.at.d_batch + row * p.at.d_row + column) * bytes;
        const u32 rows = row < p.shape.m ? p.shape.m - row : 0, own = lane / 4;
        const float alpha = matmul_alpha(p);
        const auto factor = [&](u32, float (&of)[2]) { of[0] = of[1] = alpha; };
        if (p.types.d_dtype == DTYPE_F32)
            store_whole_rows_f32<COUNT * 2>(acc, lines, d, row_bytes, rows, own, lane, factor);
        else if (p.types.d_dtype == DTYPE_F16)
            store_whole_rows_16<COUNT * 2, false, true>(acc, lines, d, row_bytes, rows, own, lane, factor);
        else
            store_whole_rows_16<COUNT * 2, false, false>(acc, lines, d, row_bytes, rows, own, lane, factor);
        return;
    }
    // Not unrolled, to keep one copy of the epilogue code.
    // Registers cannot be indexed: the inner loop unrolls the
    // write of each part.
#pragma unroll 1
    for (u32 part = 0; part < PARTS; part++) {
        warp_barrier();
#pragma unroll
        for (u32 own = 0; own < PARTS; own++)
            if (own == part) put_part<COUNT>(acc, own, staging, lane);
        warp_barrier();
#pragma unroll 1
        for (u32 r = lane; r < 16 * RUNS; r += 32) {
            const u32 of_tile = r / RUNS, first = r % RUNS * RUN;
            float v[RUN];
#pragma unroll
            for (u32 e = 0; e < RUN; e += 4) {
                const f32x4 four =
                    ld_shared(reinterpret_cast<const f32x4*>(WarpgroupStaging::at(staging, of_tile, first + e)));
                v[e] = four.x, v[e + 1] = four.y, v[e + 2] = four.z, v[e + 3] = four.w;
            }
            store_matmul_run(p, product, row + of_tile, column + part * COLUMNS + first, v);
        }
    }
}
