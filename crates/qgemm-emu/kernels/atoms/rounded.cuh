// f32 operations, each rounded once.
// `volatile` prevents contraction.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float mul_rn_f32(float a, float b) {
    const volatile float d = a * b;
    return d;
}
QG_DEVICE float div_rn_f32(float a, float b) {
    const volatile float d = a / b;
    return d;
}
QG_DEVICE float rcp_rn_f32(float a) {
    const volatile float d = 1.0f / a;
    return d;
}
