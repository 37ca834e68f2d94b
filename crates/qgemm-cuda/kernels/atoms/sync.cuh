// Barriers, GPU-scope atomics and fences, dependent launch.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void cta_barrier() {
    asm volatile("barrier.sync 0;" ::: "memory");
}

// Named barrier `id`, 0 to 15: completes after
// `threads` threads have arrived, in whole warps.
// `barrier_arrive` does not wait.
// `cta_barrier` uses barrier 0.
QG_DEVICE void barrier_sync(u32 id, u32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QG_DEVICE void barrier_arrive(u32 id, u32 threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// atom.add.acq_rel.gpu: releases this CTA's partial sums and
// acquires the partial sums of earlier CTAs.
QG_DEVICE u32 atomic_add_acq_rel(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
// atom.add.relaxed.gpu: no ordering.
// A fence before it releases, a fence after it acquires.
QG_DEVICE u32 atomic_add_relaxed(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
QG_DEVICE void st_global_relaxed_u32(u32* address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// fence.acq_rel.gpu: later reads see the writes
// of other launches.
QG_DEVICE void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Programmatic dependent launch (PTX ISA, "griddepcontrol").
// `launch_dependents` lets the next kernel's CTAs start once
// all CTAs of this kernel have called it or ended.
// `wait` blocks until the previous kernel is complete and its
// writes are visible.
// Older chips run kernels one after another; both
// do nothing there.
#if QG_VARIANT >= 90
QG_DEVICE void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
QG_DEVICE void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else
QG_DEVICE void griddepcontrol_launch_dependents() {}
QG_DEVICE void griddepcontrol_wait() {}
#endif
