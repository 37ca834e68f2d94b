// cp.async. Bytes arrive only at a wait.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 80
QG_DEVICE void cp_async_4(u8* shared, const u8* global, u32 source_bytes, QG_AT) {
    emu->cp_async(shared, global, 4, source_bytes, file, line);
}
QG_DEVICE void cp_async_8(u8* shared, const u8* global, u32 source_bytes, QG_AT) {
    emu->cp_async(shared, global, 8, source_bytes, file, line);
}
QG_DEVICE void cp_async_16(u8* shared, const u8* global, u32 source_bytes, QG_AT) {
    emu->cp_async(shared, global, 16, source_bytes, file, line);
}
QG_DEVICE void cp_async_16(u32 shared, const u8* global, u32 source_bytes, QG_AT) {
    emu->cp_async(emu->place()->shared + shared, global, 16, source_bytes, file, line);
}
QG_DEVICE void cp_async_16(u32 shared, const u8* global, QG_AT) {
    emu->cp_async(emu->place()->shared + shared, global, 16, 16, file, line);
}
QG_DEVICE void cp_async_16_or_zeros(bool wanted, u32 shared, const u8* global, QG_AT) {
    emu->cp_async(emu->place()->shared + shared, global, 16, wanted ? 16 : 0, file, line);
}
QG_DEVICE void cp_async_16_or_zeros_l1(bool wanted, u32 shared, const u8* global, QG_AT) {
    emu->cp_async(emu->place()->shared + shared, global, 16, wanted ? 16 : 0, file, line);
}
QG_DEVICE void cp_async_16_stream(u32 shared, const u8* global, QG_AT) {
    emu->cp_async(emu->place()->shared + shared, global, 16, 16, file, line);
}
QG_DEVICE void cp_async_commit_group() { emu->cp_async_commit(); }
template <u32 N>
QG_DEVICE void cp_async_wait_group(QG_AT) {
    emu->cp_async_wait(N, file, line);
}
QG_DEVICE void cp_async_mbarrier_arrive(u64* barrier, QG_AT) { emu->cp_async_arrive(barrier, file, line); }
#endif
