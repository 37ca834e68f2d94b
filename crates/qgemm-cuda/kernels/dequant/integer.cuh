// Unsigned integer codes as exact f16 pairs.
// Codes lie in one or two bit planes.
#pragma once
#include "dequant/k_tile.cuh"

// f16x2 of 1024. Its ulp is 1, so OR with a code adds the code.
constexpr u32 F16X2_1024 = 0x64006400u;

// Offset of the codes of a row and sub-block, in the form of
// the two conversions below.
struct Offset {
    // f16x2 of 1024 + offset.
    u32 biased;
    // f16x2 of -(64 + offset).
    // Valid for offsets below 64, i.e. for 4-bit codes.
    u32 minus_64;
};

QG_DEVICE constexpr Offset offset_of(u32 offset) {
    // The ulp of 1024 is 1, the ulp of -64 is 1/16.
    return {(0x6400u + offset) * 0x00010001u, (0xd400u + offset * 16) * 0x00010001u};
}

template <class S>
QG_DEVICE constexpr u32 code_bits() {
    u32 bits = S::Codes0::BITS;
    if constexpr (QG_CODE_PLANES > 1) bits += S::Codes1::BITS;
    return bits;
}

// ORs the upper bits from the second plane into `codes`.
// The bits of the first plane start at bit `lift`.
template <class S>
QG_DEVICE u32 or_upper_bits(u32 codes, const S& kt, u32 quad, u32 pair, u32 lift) {
    using High = typename S::Codes1;
    const u32 word = High::word_of(kt.codes1, quad);
    const u32 from = High::shift(quad, pair), to = S::Codes0::BITS + lift;
    return and_or(from >= to ? word >> (from - to) : word << (to - from), High::MASK << to, codes);
}

// `code - offset` of a pair in f16.
// A template, so that the second plane may be absent.
template <class S>
QG_DEVICE u32 integer_pair_f16(const S& kt, u32 quad, u32 pair, Offset offset) {
    using Low = typename S::Codes0;
    const u32 word = Low::word_of(kt.codes0, quad);
    const u32 shift = Low::shift(quad, pair);
    if constexpr (QG_CODE_PLANES == 1 && Low::BITS == 4) {
        // The upper nibble of a byte stays in place, at 16
        // times its value.
        // This saves the shift. The FMA that scales by 1/16 (0x2c00)
        // also subtracts the offset.
        if (shift % 8 == 4)
            return fma_f16x2(and_or(word >> (shift - 4), Low::MASK << 4, F16X2_1024), 0x2c002c00u, offset.minus_64);
    }
    u32 biased = and_or(word >> shift, Low::MASK, F16X2_1024);
    if constexpr (QG_CODE_PLANES > 1) biased = or_upper_bits(biased, kt, quad, pair, 0);
    return sub_f16x2(biased, offset.biased);
}

// Half of the code range. Kernels that round weights center
// affine codes: they subtract it from the codes and add it,
// times the scale, to the minimum.
// The remaining minimum is small.
// So f16 weights from a rounded scale and minimum stay
// accurate even if X has a large mean.
// Kernels that round no weight use 0.
constexpr u32 MIDDLE_CODE = QG_ROUNDED ? 1u << (code_bits<KTile>() - 1) : 0;

// Minimum for codes minus `MIDDLE_CODE`.
QG_DEVICE float centered_min(float min, float scale) {
    if constexpr (MIDDLE_CODE == 0) return min;
    return MIDDLE_CODE * scale + min;
}
