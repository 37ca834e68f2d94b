// Memory of other GPUs and the host. A launch runs alone:
// nothing changes meanwhile, and every look at the clock
// finds it a millisecond later.
#pragma once
#include "atoms/memory.cuh"

struct u32pairs {
    u32x2 low, high;
};

QG_DEVICE u32pairs ld_sys_pairs(u64 address, QG_AT) {
    const u32x4 v = emu_load_global<u32x4>(reinterpret_cast<const u8*>(address), 0, file, line);
    return {{v.x, v.y}, {v.z, v.w}};
}
QG_DEVICE void st_sys_pairs(u64 address, u32pairs v, QG_AT) {
    const u32x4 words = {v.low.x, v.low.y, v.high.x, v.high.y};
    emu->store_global(reinterpret_cast<u8*>(address), 16, &words, file, line);
}
QG_DEVICE u32 ld_sys_u32(u64 address, QG_AT) {
    return emu->atomic_add(reinterpret_cast<u32*>(address), 0, 1, file, line);
}
QG_DEVICE void st_sys_u32(u64 address, u32 value, QG_AT) {
    emu->store_relaxed(reinterpret_cast<u32*>(address), value, file, line);
}

QG_DEVICE u64 global_nanoseconds() {
    static u64 now = 0;
    return now += 1000000;
}
