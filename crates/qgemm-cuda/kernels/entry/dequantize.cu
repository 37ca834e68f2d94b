// Dequantization of quantized X to f32.
// Several CTAs share a row.
// A thread converts TURNS groups of four adjacent columns.
// All its loads are in flight at once.
// Constants select the format, as in mainloop/quantize.cuh.
#include "atoms/e4m3.cuh"
#include "atoms/e8m0.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "generated/abi.cuh"

struct DequantizeParams {
    DequantizeShape shape;
    DequantizePointers at;
};

constexpr u32 CODE_INT8 = 0, CODE_E4M3 = 1;
constexpr u32 SCALE_NONE = 0, SCALE_F32 = 1, SCALE_E8M0 = 2;
constexpr u32 FACTOR_NONE = 0, FACTOR_GIVEN = 1;
constexpr u32 GROUP = 4, TURNS = 4;

// Four adjacent codes, in the low bits of a word.
QG_DEVICE u32 codes_at(const u8* row, u32 column) {
    if constexpr (QG_CODE == CODE_INT8 || QG_CODE == CODE_E4M3) return ld_global_u32(row + column);
    return ld_global_cached_u16(row + column / 2);
}

QG_DEVICE float scale_at(const u8* row, u32 column) {
    const u32 block = QG_BLOCK == 0 ? 0 : column / (QG_BLOCK == 0 ? 1 : QG_BLOCK);
    if constexpr (QG_SCALE == SCALE_NONE) return 1.0f;
    if constexpr (QG_SCALE == SCALE_F32) return bits_to_f32(ld_global_u32(row + (u64)block * 4));
    const u32 code = ld_global_cached_u8(row + block);
    if constexpr (QG_SCALE == SCALE_E8M0) return e8m0_to_f32(code);
    return e4m3_to_f32_or_nan(code);
}

QG_DEVICE float number(u32 codes, u32 i) {
    if constexpr (QG_CODE == CODE_INT8) return (float)((i32)(codes << (24 - 8 * i)) >> 24);
    if constexpr (QG_CODE == CODE_E4M3) return e4m3_to_f32_or_nan(codes >> (8 * i) & 0xffu);
    // E2M1 as the upper bits of an f16.
    // Its exponent bias is 14 less, hence the factor 2^14.
    const u32 code = codes >> (4 * i) & 15u;
    return f16_to_f32((code & 8u) << 12 | (code & 7u) << 9) * 16384.0f;
}

QG_DEVICE float factor_of(const DequantizeParams& p, u32 row) {
    if constexpr (QG_FACTOR == FACTOR_NONE) return 1.0f;
    const u32 index = QG_FACTOR == FACTOR_GIVEN ? 0 : row;
    return bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(p.at.factors) + (u64)index * 4));
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_dequantize(const __grid_constant__ DequantizeParams p) {
    const u32 row = cta_index().x / p.shape.chunks, chunk = cta_index().x % p.shape.chunks;
    // The grid may cover more rows than the problem has.
    if (row >= p.shape.rows) return;
    const u32 step = cta_threads() * GROUP;
    const u32 first = chunk * TURNS * step + thread_index() * GROUP;
    const u8* codes_row = reinterpret_cast<const u8*>(p.at.codes) + row * p.at.codes_row;
    const u8* scales_row = reinterpret_cast<const u8*>(p.at.scales) + row * p.at.scales_row;
    u8* d_row = reinterpret_cast<u8*>(p.at.d) + (u64)row * p.shape.columns * 4;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32 codes[TURNS];
    float scales[TURNS];
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        const u32 column = first + turn * step;
        const bool is_there = column < p.shape.columns;
        codes[turn] = is_there ? codes_at(codes_row, column) : 0;
        scales[turn] = is_there ? scale_at(scales_row, column) : 0.0f;
    }
    const float factor = factor_of(p, row);
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        const u32 column = first + turn * step;
        if (column >= p.shape.columns) continue;
        u32 word[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) word[i] = f32_to_bits(factor * (scales[turn] * number(codes[turn], i)));
        st_global_v4(d_row + (u64)column * 4, u32x4{word[0], word[1], word[2], word[3]});
    }
}
