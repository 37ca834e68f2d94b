// Ones times X of eight tokens, of which WRITTEN
// are written. D[token] is the sum of the
// token's 16 columns.
#include "atoms/launch.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "atoms/mma.cuh"
#include "atoms/sync.cuh"

struct Params {
    float* d;
};

constexpr u32 ROW_BYTES = 32;

extern "C" __global__ void unwritten_rows(const __grid_constant__ Params p) {
    u8* x = reinterpret_cast<u8*>(dynamic_shared());
    const u32 lane = thread_index();
    const u32 one_pair = 0x3c003c00u;
    if (lane / 4 < WRITTEN)
        for (u32 i = 0; i < 2; i++)
            st_shared(reinterpret_cast<u32*>(x + lane / 4 * ROW_BYTES + (lane % 4 * 2 + i) * 4), one_pair);
    cta_barrier();
    u32 b[2];
    ldmatrix_x2(b, x + lane % 8 * ROW_BYTES + lane / 8 % 2 * 16);
    const u32 a[4] = {one_pair, one_pair, one_pair, one_pair};
    float d[4] = {};
    mma_m16n8k16_f16(d, a, b);
    if (lane < 4)
        for (u32 i = 0; i < 2; i++) st_global_f32(p.d + lane * 2 + i, d[i]);
}
