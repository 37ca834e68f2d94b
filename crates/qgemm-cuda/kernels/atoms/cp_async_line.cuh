// cp.async with a 128-byte L2 prefetch (atoms/cp_async.cuh).
// For reads shorter than a line, if other CTAs read the rest
// at about the same time.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 80
QG_DEVICE void cp_async_4_line(u8* shared, const u8* global, u32 source_bytes) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(source_bytes)
                 : "memory");
}
QG_DEVICE void cp_async_8_line(u8* shared, const u8* global, u32 source_bytes) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(source_bytes)
                 : "memory");
}
// Copies 16 bytes if `wanted`, else writes zeros without a read.
QG_DEVICE void cp_async_16_or_zeros_line(bool wanted, u32 shared, const u8* global) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %2, 0; cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p; }" ::"r"(shared),
                 "l"(global), "r"((u32)wanted)
                 : "memory");
}
#endif
