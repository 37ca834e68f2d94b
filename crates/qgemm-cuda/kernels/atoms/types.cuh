// Element and vector types. Kernels include no CUDA header and no host header, so NVRTC needs nothing but itself.
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

// Element types as numbered by qgemm-hal's abi.rs.
constexpr u32 DTYPE_F32 = 0, DTYPE_F16 = 1, DTYPE_BF16 = 2;

#define QG_DEVICE static __device__ __forceinline__
// A call, so that the function's registers are not live in its caller.
#define QG_DEVICE_CALL static __device__ __noinline__

// Byte offset of a field. NVRTC has no offsetof; the compiler front end that it is built on spells it __INTADDR__.
#ifdef __CUDACC_RTC__
#define QG_OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define QG_OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif
