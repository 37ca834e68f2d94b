// FP8 → f16x2 conversion of the upper half of a word (fp8.cuh).
// The instruction can read either half; a shift would hide
// this from the compiler.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 89
QG_DEVICE u32 cvt_f16x2_e4m3x2_upper(u32 word) {
    u32 d;
    asm("{\n.reg .b16 lower, upper;\nmov.b32 {lower, upper}, %1;\ncvt.rn.f16x2.e4m3x2 %0, upper;\n}" : "=r"(d) : "r"(word));
    return d;
}
#endif
