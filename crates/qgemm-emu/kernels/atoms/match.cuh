// Lanes of a warp with equal values.
// All 32 lanes take part.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 match_any(u32 value, QG_AT) {
    const u32 in[1] = {value};
    u32 out[1];
    emu_collective(EMU_match_any, in, out, file, line);
    return out[0];
}
