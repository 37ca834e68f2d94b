// Warp-specialized matmul on Hopper.
// 16-bit operands, row- or column-major, readable by TMA.
// Persistent CTAs take work items in turn.
// While consumers store a tile, the producer fills the ring
// for the next one.
#include "mainloop/sm90/matmul_wgmma.cuh"
#include "entry/sm90_matmul_consume.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm90_matmul_wgmma_ws(const __grid_constant__ TmaMatmulParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) MatmulRing::init(shared.ring);
    cta_barrier();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    // The shuffle makes the role uniform for the compiler.
    if (shfl_idx_u32(thread / CONSUMERS, 0) == 0) {
        if constexpr (PASS_REGISTERS) setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(shared, params, thread);
    } else {
        if constexpr (PASS_REGISTERS) setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (thread == CONSUMERS) produce(shared.ring, params);
    }
}
