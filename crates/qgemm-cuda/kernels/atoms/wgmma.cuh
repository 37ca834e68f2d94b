// Matrix instructions of four warps that run by themselves: D += A · B, 64 rows, A in registers, B in shared memory.
// They exist on sm_90a only: kernels that use them are compiled for the chip itself.
//
// Warp w of the four has rows 16w..16w+15. With g = lane / 4 and t = lane % 4 (PTX ISA, "Register Fragments and Shared
// Memory Matrix Layouts" of wgmma), in these rows:
//   A: as in mma.m16n8k16: a0 = (row g, k 2t..2t+1), a1 = (row g+8, k 2t..), a2 = (row g, k 2t+8..), a3 = row g+8's
//   D: for each 8 columns, d[4j] and d[4j+1] = (row g, columns 8j+2t and the next), d[4j+2], d[4j+3] = row g+8's
//   B: stored with k contiguous, one column after another (K-major), in the swizzle that the descriptor names
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT == 90
// Before the first instruction, and before one whose A or D registers other instructions have written.
QG_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends the group of the instructions issued since the last one ended.
QG_DEVICE void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the last N groups are running. Registers of the others may then be used.
template <u32 N>
QG_DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Descriptor of a matrix in shared memory (PTX ISA, "Matrix Descriptor Format"): columns of 128 bytes along k (64
// values of 16 bits), 1024 bytes from one group of eight columns to the next, in the 128-byte swizzle that TMA writes:
// the 16-byte unit u of column c stands at u ^ (c % 8). The matrix starts at a multiple of 1024 bytes; steps along k
// within its 128 bytes move the address on by as many bytes.
QG_DEVICE u64 wgmma_descriptor_128b(const u8* shared) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1;  // Not used with swizzles.
    const u64 stride = 1024 >> 4;
    const u64 swizzle_128 = 1;
    return start | leading << 16 | stride << 32 | swizzle_128 << 62;
}

QG_DEVICE void wgmma_m64n32k16_f16(float (&d)[16], const u32 (&a)[4], u64 b_descriptor) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
                   "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor));
}
QG_DEVICE void wgmma_m64n32k16_bf16(float (&d)[16], const u32 (&a)[4], u64 b_descriptor) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
                   "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor));
}
#endif
