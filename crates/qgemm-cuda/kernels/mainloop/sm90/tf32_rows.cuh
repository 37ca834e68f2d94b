// f32 k-tile of 64 rows in a warpgroup's registers, as TF32.
// TMA wrote it with the 128-byte swizzle.
// Values are rounded to nearest; the MMA would truncate them.
// So a K-major operand needs no conversion pass.
#pragma once
#include "atoms/numeric.cuh"
#include "atoms/shared_address.cuh"
#include "atoms/wgmma_tf32.cuh"

struct Tf32Rows {
    static constexpr u32 K_STEPS = 4;
    // A operand per k-step.
    u32 step[K_STEPS][4];

    // Loads this warp's rows from the box at `rows`.
    // Eight rows of a word use different chunks: no bank conflicts.
    QG_DEVICE void load(Tf32Rows& a, const u8* rows, u32 warp, u32 lane) {
        const u32 g = lane / 4, t = lane % 4;
        const u8* const row = rows + (warp % 4 * 16 + g) * 128 + t * 4;
#pragma unroll
        for (u32 i = 0; i < K_STEPS; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 chunk = 2 * i + j / 2;
                const u32* at = reinterpret_cast<const u32*>(row + j % 2 * 1024 + (chunk ^ g) * 16);
                a.step[i][j] = f32_to_tf32(bits_to_f32(ld_shared(at)));
            }
        }
    }
};
