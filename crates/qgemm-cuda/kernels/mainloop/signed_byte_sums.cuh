// s8 GEMM: shared parameters, byte order of X, and the
// span of an s32 sum.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "dequant/signed_bytes.cuh"
#include "sched/experts.cuh"

// Parameters of s8 GEMM.
struct SignedByteParams {
    GemmParams gemm;
    XPlanePointers x;

#if QG_EXPERTS
    // Parameters for an expert's rows.
    // The rows are contiguous in the planes of X from `first` on.
    // `own` is the problem of these rows.
    QG_DEVICE SignedByteParams of_rows(const SignedByteParams& all, const GemmParams& own, u32 first) {
        SignedByteParams rows = {own, all.x};
        rows.gemm.at.x = all.gemm.at.x + (u64)first * all.gemm.at.x_row;
        rows.x.scales += (u64)first * all.x.scales_row;
        return rows;
    }
#endif
};
#if QG_EXPERTS
#define QG_TAKE_BYTES(given, launched)                    \
    QG_TAKE_ROWS(own_rows, own_problem, launched.gemm)    \
    const SignedByteParams given = SignedByteParams::of_rows(launched, own_problem, own_rows.first)
#else
#define QG_TAKE_BYTES(given, launched) const SignedByteParams& given = launched
#endif

// Per-row scale of an expert's row.
// Without experts the epilogue applies this scale.
QG_DEVICE float scale_of_row(const SignedByteParams& given, u32 row) {
    if (!QG_EXPERTS || QG_X_BLOCK_SCALES || row >= given.gemm.shape.m) return 1.0f;
    return bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(given.x.scales) + row * given.x.scales_row));
}

// Bytes of X that a thread moves at once: columns of a k-step.
constexpr u32 X_CHUNK = 16;
// Columns of X per block scale.
constexpr u32 X_SCALE_COLUMNS = 32;

// Columns per s32 sum, and sums per k-block.
// A sum is scaled after SUM_K columns.
constexpr u32 SUM_K = QG_X_BLOCK_SCALES && PARTIAL_K > X_SCALE_COLUMNS ? X_SCALE_COLUMNS : PARTIAL_K;
constexpr u32 SUMS = K_BLOCK / SUM_K, SUM_K_STEPS = SUM_K / K_STEP;
static_assert(SUM_K << 14 <= 1u << 22, "sums of bytes lie within the mantissa of f32");
static_assert(SUM_K % X_CHUNK == 0, "sums are of whole chunks");

// Sum of a chunk's codes.
QG_DEVICE i32 sum_of_codes(const u32x4& v) {
    const i32 half = dp4a((i32)v.x, (i32)EACH_BYTE, dp4a((i32)v.y, (i32)EACH_BYTE, 0));
    return dp4a((i32)v.z, (i32)EACH_BYTE, dp4a((i32)v.w, (i32)EACH_BYTE, half));
}

// Permutes a chunk to W's byte order:
// 0, 2, 1, 3 in every quad of four neighbours, or 0,
// 8, 1, 9, 2, 10, ….
QG_DEVICE u32x4 in_order_of_w(const u32x4& v) {
#if QG_MMA_M8N8K4
    return {prmt(v.x, 0, 0x3120), prmt(v.y, 0, 0x3120), prmt(v.z, 0, 0x3120), prmt(v.w, 0, 0x3120)};
#else
    return {prmt(v.x, v.z, 0x5140), prmt(v.x, v.z, 0x7362), prmt(v.y, v.w, 0x5140), prmt(v.y, v.w, 0x7362)};
#endif
}
