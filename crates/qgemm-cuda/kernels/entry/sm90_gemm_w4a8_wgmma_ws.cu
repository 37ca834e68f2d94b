// D[m, n] from weights of four bits and X in E4M3 codes on Hopper, warp-specialized. Consumer warpgroups decode W to E4M3 in
// registers and multiply it with X in shared memory, with `wgmma` on bytes. A producer warpgroup copies both.
#include "mainloop/sm90/e4m3_weights.cuh"
#include "entry/sm90_gemm_w4a8_consume.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_gemm_w4a8_wgmma_ws(const __grid_constant__ W4A8Params params) {
    multiply(params);
}
