// Integer codes or table entries as s8 operands of integer MMA.
// A word has the four codes of a quad in plane order:
// columns 2t, 2t + 8, 2t + 1, 2t + 9 (QUAD_BYTE in prepack.rs).
// One shift and one mask extract them.
// X has this order in shared memory
// (`mainloop/signed_byte_ring.cuh`).
#pragma once
#include "dequant/codebook.cuh"
#include "dequant/integer.cuh"
#include "dequant/operand.cuh"

constexpr u32 EACH_BYTE = 0x01010101u;
constexpr u32 BYTE_SIGNS = 0x80808080u;
constexpr u32 CODE_BITS = code_bits<KTile>();
// 8-bit codes are stored as code - 128.
// With zero points or minimums the remaining offset acts on the sums.
constexpr bool HAS_WIDE_CODES = CODE_BITS == 8;

// The stored codes of a quad.
// A template, so that planes may be absent.
template <class S>
QG_DEVICE u32 unsigned_bytes(const S& kt, u32 quad) {
    using Low = typename S::Codes0;
    u32 bytes = Low::word_of(kt.codes0, quad);
    if constexpr (Low::BITS < 8) bytes = bytes >> Low::shift(quad, 0) & ((1u << Low::BITS) - 1) * EACH_BYTE;
    if constexpr (QG_CODE_PLANES > 1) {
        using High = typename S::Codes1;
        constexpr u32 HIGH = (((1u << High::BITS) - 1) << Low::BITS) * EACH_BYTE;
        const u32 high = High::word_of(kt.codes1, quad), from = High::shift(quad, 0), to = Low::BITS;
        bytes = and_or(from >= to ? high >> (from - to) : high << (to - from), HIGH, bytes);
    }
    return bytes;
}

// 4-bit codes of a quad in the upper halves of bytes.
// A template, for the plane types.
template <class S>
QG_DEVICE u32 upper_nibbles(const S& kt, u32 quad) {
    using Low = typename S::Codes0;
    const u32 word = Low::word_of(kt.codes0, quad), from = Low::shift(quad, 0);
    return (from >= 4 ? word >> (from - 4) : word << (4 - from)) & 0xf0 * EACH_BYTE;
}

// Bytewise `bytes` - `offsets`; bytes < 128, offsets ≤ 128.
QG_DEVICE u32 less_bytes(u32 bytes, u32 offsets) {
    return ((bytes | BYTE_SIGNS) - offsets) ^ BYTE_SIGNS;
}

// Whether a format's codes index a table.
template <class D>
QG_DEVICE constexpr auto has_table(int) -> decltype(D::table(), true) {
    return true;
}
template <class D>
QG_DEVICE constexpr bool has_table(long) {
    return false;
}

// Whether 4-bit codes minus 8 become bytes of 16
// times their value.
// The nibble stays in the upper half of its byte; one LOP3
// extracts it and subtracts the offset.
// Scales are divided by 16.
template <class D>
QG_DEVICE constexpr bool has_upper_nibbles() {
    if constexpr (has_table<D>(0) || CODE_BITS != 4 || QG_CODE_PLANES > 1 || QG_ZERO_POINTS || D::HAS_MIN || !D::HAS_SCALE)
        return false;
    else
        return D::OFFSET == 8;
}

// Whether scales span all powers of two of f32.
template <class D>
QG_DEVICE constexpr auto has_wide_scales(int) -> decltype(D::HAS_WIDE_SCALES) {
    return D::HAS_WIDE_SCALES;
}
template <class D>
QG_DEVICE constexpr bool has_wide_scales(long) {
    return false;
}

template <class D>
struct SignedBytesOf {
    static constexpr bool HAS_SCALE = D::HAS_SCALE;
    static constexpr bool HAS_WIDE_SCALES = has_wide_scales<D>(0);
    static constexpr bool UPPER_NIBBLES = has_upper_nibbles<D>();
    // Whether sums get a term proportional to Σx of the sub-block.
    static constexpr bool HAS_MIN = D::HAS_MIN || (QG_ZERO_POINTS && HAS_WIDE_CODES);

    // Codes of `quad` in lane row `row` and sub-block `sub`.
    // They are minus their offset as far as s8 holds it,
    // or table entries.
    // `none` is 0, but opaque to the compiler:
    // a LOP3 has room for one constant only.
    QG_DEVICE u32 of_quad(const KTile& kt, u32 quad, u32 row, u32 sub, u32 none = 0) {
        const u32 bytes = unsigned_bytes(kt, quad);
        if constexpr (has_table<D>(0))
            return codebook_signed_bytes(D::table(), kt, quad);
        else if constexpr (UPPER_NIBBLES)
            return upper_nibbles(kt, quad) ^ (BYTE_SIGNS | none);
        else if constexpr (HAS_WIDE_CODES)
            return bytes ^ BYTE_SIGNS;
        else if constexpr (QG_ZERO_POINTS)
            return less_bytes(bytes, D::zero_point(kt, row, sub) * EACH_BYTE);
        else if constexpr (!D::HAS_MIN)
            return less_bytes(bytes, D::OFFSET * EACH_BYTE);
        else
            return bytes;
    }

    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        const float scale = OperandsOf<D>::scale(kt, row, sub);
        if constexpr (UPPER_NIBBLES) return scale * (1.0f / 16);
        return scale;
    }

    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        if constexpr (QG_ZERO_POINTS && HAS_WIDE_CODES)
            return (128.0f - (float)D::zero_point(kt, row, sub)) * D::scale(kt, row, sub);
        else if constexpr (D::HAS_MIN && HAS_WIDE_CODES)
            return 128.0f * D::scale(kt, row, sub) + OperandsOf<D>::min(kt, row, sub);
        else
            return OperandsOf<D>::min(kt, row, sub);
    }
};
using SignedBytes = SignedBytesOf<Dequant>;
