// sm90_gemm_w4a8_wgmma_ws.cu for s8 X and grouped integers.
// W is decoded to s8. Integer sums are exact and are added in
// f32 at the end of each group.
#include "mainloop/sm90/s8_weights.cuh"
#include "entry/sm90_gemm_w4a8_consume.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_gemm_s8_groups_wgmma_ws(const __grid_constant__ W4A8Params params) {
    multiply(params);
}
