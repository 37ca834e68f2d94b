// Warp shuffles, votes and reductions.
// All 32 lanes take part.
#pragma once
#include "atoms/numeric.cuh"

QG_DEVICE u32 shfl_xor_u32(u32 value, u32 lane_mask, QG_AT) {
    const u32 in[2] = {value, lane_mask};
    u32 out[1];
    emu_collective(EMU_shfl_xor, in, out, file, line);
    return out[0];
}
QG_DEVICE float shfl_xor(float value, u32 lane_mask, QG_AT) {
    return bits_to_f32(shfl_xor_u32(f32_to_bits(value), lane_mask, file, line));
}
QG_DEVICE u32 shfl_idx_u32(u32 value, u32 source_lane, QG_AT) {
    const u32 in[2] = {value, source_lane};
    u32 out[1];
    emu_collective(EMU_shfl_idx, in, out, file, line);
    return out[0];
}
QG_DEVICE u32 ballot(bool predicate, QG_AT) {
    const u32 in[1] = {predicate};
    u32 out[1];
    emu_collective(EMU_ballot, in, out, file, line);
    return out[0];
}
QG_DEVICE void warp_barrier(QG_AT) {
    emu->collective(EMU_warp_barrier, nullptr, 0, nullptr, 0, file, line);
}

#if QG_VARIANT >= 80
QG_DEVICE u32 redux_add(u32 value, QG_AT) {
    const u32 in[1] = {value};
    u32 out[1];
    emu_collective(EMU_redux_add, in, out, file, line);
    return out[0];
}
QG_DEVICE u32 redux_max_u32(u32 value, QG_AT) {
    const u32 in[1] = {value};
    u32 out[1];
    emu_collective(EMU_redux_max_u32, in, out, file, line);
    return out[0];
}
#endif
