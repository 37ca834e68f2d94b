// A warp stores four matrices, transposed or not,
// and loads them. Outputs are its registers and the
// rows in shared memory.
#include "atoms/launch.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "atoms/stmatrix.cuh"
#include "atoms/stmatrix_rows.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"

struct Params {
    u8* d;
    u64 transposed;
};

constexpr u32 MATRICES = 4, LANES = 32;

extern "C" __global__ void stored_rows(const __grid_constant__ Params p) {
    u8* rows = reinterpret_cast<u8*>(dynamic_shared());
    const u32 lane = thread_index();
    u32 words[MATRICES];
    for (u32 m = 0; m < MATRICES; m++) words[m] = (64 * lane + 8 * m) | (64 * lane + 8 * m + 1) << 16;
    if (p.transposed)
        stmatrix_x4_trans(words, rows + lane * 16);
    else
        stmatrix_x4(words, rows + lane * 16);
    warp_barrier();
    u32 back[MATRICES];
    if (p.transposed)
        ldmatrix_x4_trans(back, static_cast<const u8*>(rows + lane * 16));
    else
        ldmatrix_x4(back, static_cast<const u8*>(rows + lane * 16));
    for (u32 m = 0; m < MATRICES; m++) st_global_u32(p.d + (m * LANES + lane) * 4, back[m]);
    for (u32 i = 0; i < 4; i++)
        st_global_u32(p.d + (MATRICES * LANES + lane * 4 + i) * 4, ld_shared(reinterpret_cast<const u32*>(rows + lane * 16 + i * 4)));
}
