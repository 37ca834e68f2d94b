// The place of a thread in the launch, and the shared memory of its CTA.
#pragma once
#include "atoms/types.cuh"

struct u32x3 {
    u32 x, y, z;
};

QG_DEVICE u32 thread_index() {
    return threadIdx.x;
}
// Threads of a CTA.
QG_DEVICE u32 cta_threads() {
    return blockDim.x;
}
QG_DEVICE u32x3 cta_index() {
    return {blockIdx.x, blockIdx.y, blockIdx.z};
}
// CTAs of the grid.
QG_DEVICE u32x3 grid_ctas() {
    return {gridDim.x, gridDim.y, gridDim.z};
}

// The CTA's dynamic shared memory, as many bytes as the launch asked for. It begins at a multiple of 1024, the period
// of TMA's widest swizzle.
QG_DEVICE u8* dynamic_shared() {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    return shared_bytes;
}
