// Element and vector types.
// Kernels include no CUDA or host header: NVRTC needs
// no include path.
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

#define QG_DEVICE static __device__ __forceinline__
// A real call, so the function's registers are not
// live in its caller.
#define QG_DEVICE_CALL static __device__ __noinline__

// offsetof. NVRTC lacks it, but its front end has __INTADDR__.
#ifdef __CUDACC_RTC__
#define QG_OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define QG_OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif
