// Element and vector types as in the GPU atoms.
// CUDA keywords are empty for the host compiler.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(8) u32x2 {
    u32 x, y;
};
struct alignas(8) f32x2 {
    float x, y;
};
struct alignas(16) f32x4 {
    float x, y, z, w;
};

// Element type numbers of qgemm-hal's abi.rs.
constexpr u32 DTYPE_F32 = 0, DTYPE_F16 = 1, DTYPE_BF16 = 2;

#define __device__
#define __forceinline__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define QG_DEVICE static inline
#define QG_DEVICE_CALL static

#define QG_OFFSET_OF(type, field) __builtin_offsetof(type, field)

#include "emu.cuh"
