// cp.async: asynchronous copies from global to shared memory.
// The issuing thread sees the bytes after it waits for
// the copy's group.
// Other threads also need a barrier after this wait.
//
// Both addresses must be multiples of the copy size.
// A copy reads `source_bytes` bytes, at most its size.
// It fills the rest of the destination with zeros.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 80
// cp.async.ca: through L1.
QG_DEVICE void cp_async_4(u8* shared, const u8* global, u32 source_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(source_bytes)
                 : "memory");
}
QG_DEVICE void cp_async_8(u8* shared, const u8* global, u32 source_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(source_bytes)
                 : "memory");
}
// cp.async.cg: through L2 only, for data that
// one CTA reads once.
QG_DEVICE void cp_async_16(u8* shared, const u8* global, u32 source_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(source_bytes)
                 : "memory");
}
// `shared` is an address from `shared_address`.
QG_DEVICE void cp_async_16(u32 shared, const u8* global, u32 source_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
                 : "memory");
}
QG_DEVICE void cp_async_16(u32 shared, const u8* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// Copies 16 bytes if `wanted`, else writes zeros without a
// read (PTX ISA, "cp.async", ignore-src).
QG_DEVICE void cp_async_16_or_zeros(bool wanted, u32 shared, const u8* global) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p; }" ::"r"(shared),
                 "l"(global), "r"((u32)wanted)
                 : "memory");
}
// As above through L1, for bytes that another CTA of the SM
// reads at about the same time.
QG_DEVICE void cp_async_16_or_zeros_l1(bool wanted, u32 shared, const u8* global) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %2, 0; cp.async.ca.shared.global [%0], [%1], 16, p; }" ::"r"(shared),
                 "l"(global), "r"((u32)wanted)
                 : "memory");
}
// 16-byte copy with a 128-byte L2 prefetch, for streams.
QG_DEVICE void cp_async_16_stream(u32 shared, const u8* global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Closes the group of copies issued since the last commit.
QG_DEVICE void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most N groups are in flight.
template <u32 N>
QG_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// cp.async.mbarrier.arrive.noinc: this thread arrives on
// `barrier` once all copies that it has issued are complete.
QG_DEVICE void cp_async_mbarrier_arrive(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
#endif
