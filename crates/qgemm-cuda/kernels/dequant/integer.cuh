// Codes that are unsigned integers in one or two bit planes, made into f16 pairs exactly.
#pragma once
#include "dequant/slab.cuh"

// The whole code: the second plane holds the bits above the first. A template, so that the second plane may be absent.
template <class S>
QG_DEVICE u32 code_pair(const S& s, u32 quad, u32 pair) {
    u32 codes = S::Codes0::pair(s.codes0, quad, pair);
    if constexpr (QG_CODE_PLANES > 1) codes |= S::Codes1::pair(s.codes1, quad, pair) << S::Codes0::BITS;
    return codes;
}

// `code - offset` in f16: 0x6400 is 1024, whose last mantissa bit is worth 1, so 1024 + code is code or'ed in
// and the subtraction is exact.
template <u32 OFFSET>
QG_DEVICE u32 integer_pair_f16(u32 codes) {
    return sub_f16x2(codes | 0x64006400u, (0x6400u + OFFSET) * 0x00010001u);
}
