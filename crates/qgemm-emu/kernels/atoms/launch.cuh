// Thread and CTA indices, and dynamic shared memory.
#pragma once
#include "atoms/types.cuh"

struct u32x3 {
    u32 x, y, z;
};

QG_DEVICE u32 thread_index() { return emu->place()->thread; }
QG_DEVICE u32 cta_threads() { return emu->place()->threads; }
QG_DEVICE u32x3 cta_index() {
    const EmuThread* p = emu->place();
    return {p->cta[0], p->cta[1], p->cta[2]};
}
QG_DEVICE u32x3 grid_ctas() {
    const EmuThread* p = emu->place();
    return {p->grid[0], p->grid[1], p->grid[2]};
}
QG_DEVICE u8* dynamic_shared() { return emu->place()->shared; }
