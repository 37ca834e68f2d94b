// Warp-specialized W4A8 GEMM on Hopper: 4-bit W, E4M3 X.
// Consumer warpgroups decode W to E4M3 in registers.
// Byte `wgmma` multiplies it by X in shared memory.
// A producer warpgroup copies W and X.
#include "mainloop/sm90/e4m3_weights.cuh"
#include "entry/sm90_gemm_w4a8_consume.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_gemm_w4a8_wgmma_ws(const __grid_constant__ W4A8Params params) {
    multiply(params);
}
