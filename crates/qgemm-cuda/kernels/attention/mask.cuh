// Attention mask: one bit for each pair of a query and a
// key. A key is visible if the causal range, the window
// and the mask all allow it. Kernels with a mask are
// compiled with QG_BITS; others have no mask parameter.
#pragma once
#include "attention/problem.cuh"

#if QG_BITS

// Kernel parameter of masked attention.
struct KernelParams : AttentionParams {
    AttentionBits bits;
};

constexpr u32 WORD_KEYS = 32;

// Mask row of a query of a head.
QG_DEVICE const u8* mask_row(const KernelParams& p, const Sequence& s, u32 head, u32 query) {
    const u64 row = p.bits.is_shared ? query : s.token + query;
    return reinterpret_cast<const u8*>(p.bits.address) + (head * p.bits.head_words + row * p.bits.row_words) * 4;
}

// Bit mask of the keys `first .. first + 32`
// before `end`. `first` is a multiple of 32.
QG_DEVICE u32 bits_before(u32 first, u32 end) {
    const u32 keys = beyond(end, first);
    return keys >= WORD_KEYS ? ~0u : (1u << keys) - 1;
}

// Visibility of 32 keys for one query: its
// mask row within `visible`, the range
// that causality and the window leave.
QG_DEVICE u32 mask_bits(const KernelParams& p, const u8* row, const KeyRange& visible, u32 first) {
    const u32 bits = bits_before(first, visible.end) & ~bits_before(first, visible.first);
    // Keys beyond the row's words are never in
    // `visible`, so the load stays in bounds.
    return bits == 0 ? 0 : bits & ld_global_u32(row + (u64)(first / WORD_KEYS) * 4);
}

// Visibility of a tile of keys: `any` has
// the keys that some query attends to, `all`
// the keys that every query attends to.
struct TileVisibility {
    u32 any, all;

    QG_DEVICE TileVisibility none() { return {0, ~0u}; }
    // Adds the mask of one query for WORDS × 32 keys.
    template <u32 WORDS>
    QG_DEVICE void add(TileVisibility& visibility, const KernelParams& p, const u8* row, const KeyRange& visible, u32 first) {
#pragma unroll
        for (u32 word = 0; word < WORDS; word++) {
            const u32 bits = mask_bits(p, row, visible, first + word * WORD_KEYS);
            visibility.any |= bits, visibility.all &= bits;
        }
    }
};

#else

using KernelParams = AttentionParams;

#endif
