// Thread and CTA indices, and dynamic shared memory.
#pragma once
#include "atoms/types.cuh"

struct u32x3 {
    u32 x, y, z;
};

QG_DEVICE u32 thread_index() {
    return threadIdx.x;
}
// Threads per CTA.
QG_DEVICE u32 cta_threads() {
    return blockDim.x;
}
QG_DEVICE u32x3 cta_index() {
    return {blockIdx.x, blockIdx.y, blockIdx.z};
}
// CTAs per grid dimension.
QG_DEVICE u32x3 grid_ctas() {
    return {gridDim.x, gridDim.y, gridDim.z};
}

// Dynamic shared memory of the CTA, sized by the launch.
// Aligned to 1024 bytes, the period of TMA's 128-byte swizzle.
QG_DEVICE u8* dynamic_shared() {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    return shared_bytes;
}
