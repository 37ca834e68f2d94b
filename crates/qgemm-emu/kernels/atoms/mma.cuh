// mma.sync with f16, bf16 or tf32 operands, f32 accumulators.
// Lane layouts: src/model.
#pragma once
#include "atoms/types.cuh"

// mma as a collective, for floats or integers.
// Input words: a, b, d, then scales.
template <class T, u32 A, u32 B, u32 D>
QG_DEVICE void emu_mma(u32 op, T (&d)[D], const u32 (&a)[A], const u32 (&b)[B], const char* file, u32 line,
                       const u32* scales = nullptr, u32 scale_words = 0) {
    u32 in[A + B + D + 2], out[D];
    for (u32 i = 0; i < A; i++) in[i] = a[i];
    for (u32 i = 0; i < B; i++) in[A + i] = b[i];
    __builtin_memcpy(in + A + B, d, sizeof d);
    for (u32 i = 0; i < scale_words; i++) in[A + B + D + i] = scales[i];
    emu->collective(op, in, A + B + D + scale_words, out, D, file, line);
    __builtin_memcpy(d, out, sizeof d);
}

QG_DEVICE void mma_m8n8k4_f16(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m8n8k4_f16, d, a, b, file, line);
}

#if QG_VARIANT >= 75
QG_DEVICE void mma_m16n8k8_f16(float (&d)[4], const u32 (&a)[2], u32 b, QG_AT) {
    const u32 words[1] = {b};
    emu_mma(EMU_mma_m16n8k8_f16, d, a, words, file, line);
}
#endif

#if QG_VARIANT >= 80
QG_DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m16n8k16_f16, d, a, b, file, line);
}
QG_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m16n8k16_bf16, d, a, b, file, line);
}
QG_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m16n8k8_tf32, d, a, b, file, line);
}
#endif
