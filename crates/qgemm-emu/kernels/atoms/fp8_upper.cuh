// FP8 conversion of the upper half of a word.
#pragma once
#include "atoms/fp8.cuh"

#if QG_VARIANT >= 89
QG_DEVICE u32 cvt_f16x2_e4m3x2_upper(u32 word) {
    return cvt_f16x2_e4m3x2(word >> 16);
}
#endif
