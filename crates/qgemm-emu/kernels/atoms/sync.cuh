// Barriers, fences, atomics and dependent launch.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void cta_barrier(QG_AT) { emu->barrier(0, 0, 1, file, line); }
QG_DEVICE void barrier_sync(u32 id, u32 threads, QG_AT) { emu->barrier(id, threads, 1, file, line); }
QG_DEVICE void barrier_arrive(u32 id, u32 threads, QG_AT) { emu->barrier(id, threads, 0, file, line); }

QG_DEVICE u32 atomic_add_acq_rel(u32* address, u32 value, QG_AT) {
    return emu->atomic_add(address, value, 0, file, line);
}
QG_DEVICE u32 atomic_add_relaxed(u32* address, u32 value, QG_AT) {
    return emu->atomic_add(address, value, 1, file, line);
}
QG_DEVICE void st_global_relaxed_u32(u32* address, u32 value, QG_AT) {
    emu->store_relaxed(address, value, file, line);
}
QG_DEVICE void fence_gpu() { emu->fence(); }

// The emulated device decides whether a kernel starts early.
QG_DEVICE void griddepcontrol_launch_dependents() {}
QG_DEVICE void griddepcontrol_wait() { emu->grid_wait(); }
