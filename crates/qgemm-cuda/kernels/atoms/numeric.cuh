// Bit permutation, byte dot products, f16x2 and conversions.
#pragma once
#include "atoms/types.cuh"

// prmt.b32: byte i of the result is byte `selector
// nibble i` of {a, b}.
QG_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// lop3.b32 as (a & mask) | bits.
// The compiler emits two instructions for two immediates.
QG_DEVICE u32 and_or(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// fma.rn.f32: a * b + c, rounded once.
QG_DEVICE float fma_f32(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// sqrt.rn.f32: rounded to nearest, with subnormals.
QG_DEVICE float sqrt_f32(float a) {
    float d;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}

// dp4a: c + the dot product of four signed byte pairs, mod 2^32.
QG_DEVICE i32 dp4a(i32 a, i32 b, i32 c) {
    i32 d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

QG_DEVICE u32 sub_f16x2(u32 a, u32 b) {
    u32 d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
QG_DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

QG_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

QG_DEVICE float f16_to_f32(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}
QG_DEVICE u32 f32_to_f16(float f) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}
QG_DEVICE float bits_to_f32(u32 bits) {
    return __uint_as_float(bits);
}
QG_DEVICE u32 f32_to_bits(float f) {
    return __float_as_uint(f);
}

#if QG_VARIANT >= 80
// cvt.rn.f16x2.f32: `low` goes to the lower half.
QG_DEVICE u32 f32_to_f16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// cvt.rn.bf16x2.f32: `low` goes to the lower half.
QG_DEVICE u32 f32_to_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// cvt.rna.tf32.f32: to nearest, ties away from zero.
QG_DEVICE u32 f32_to_tf32(float f) {
    u32 d;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(d) : "f"(f));
    return d;
}
#endif
