// From a warpgroup's accumulators of `matmul` to rows of D: 16 rows by 32 columns at a time pass through shared memory of
// each warp, so that neighbouring lanes store neighbouring runs.
#pragma once
#include "atoms/warp.cuh"
#include "epilogue/matmul_store.cuh"

struct WarpgroupStaging {
    static constexpr u32 COLUMNS = 32, PITCH = COLUMNS + 8;
    alignas(16) float acc[16 * PITCH];

    // Pairs of four columns change places in odd rows, so that lanes that read together two rows read from all banks.
    QG_DEVICE float* at(WarpgroupStaging& staging, u32 row, u32 column) {
        return &staging.acc[row * PITCH + (column ^ row % 2 * 4)];
    }
};

// Puts the accumulators of part `part` into shared memory.
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

// The 16 rows from `row` on of a warp, COUNT / 2 columns from `column` on.
template <u32 COUNT>
QG_DEVICE void store_matmul_rows(const float (&acc)[COUNT], const MatmulParams& p, u32 product, u32 row, u32 column,
                                 WarpgroupStaging& staging, u32 lane) {
    constexpr u32 COLUMNS = WarpgroupStaging::COLUMNS, RUNS = COLUMNS / RUN;
    constexpr u32 PARTS = COUNT * 2 / COLUMNS;
    // Not unrolled, so that what finishes outputs stands in the program once. Accumulators have no addresses: each part's
    // own code puts them in place.
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
