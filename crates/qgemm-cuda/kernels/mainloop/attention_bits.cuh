// Masks of bits: which of the keys that a query would see it may see. Kernels that take a mask are compiled with QG_BITS; others are given no
// more than before.
#pragma once
#include "mainloop/attention_keys.cuh"

#ifdef QG_BITS

// The parameter of kernels that take a mask.
struct KernelParams : AttentionParams {
    AttentionBits bits;
};

constexpr u32 WORD_KEYS = 32;

// The mask's row of a query of a head.
QG_DEVICE const u8* mask_row(const KernelParams& p, const Sequence& s, u32 head, u32 query) {
    const u64 row = p.bits.is_shared ? query : s.token + query;
    return reinterpret_cast<const u8*>(p.bits.address) + (head * p.bits.head_words + row * p.bits.row_words) * 4;
}

// Of the 32 keys from `first` on, a multiple of 32, those before `end`: a bit each.
QG_DEVICE u32 bits_before(u32 first, u32 end) {
    const u32 keys = beyond(end, first);
    return keys >= WORD_KEYS ? ~0u : (1u << keys) - 1;
}

// Of those keys, those that the query of a row sees, which without a mask sees `seen`.
QG_DEVICE u32 mask_bits(const KernelParams& p, const u8* row, const KeyRange& seen, u32 first) {
    const u32 bits = bits_before(first, seen.end) & ~bits_before(first, seen.first);
    // A key that is seen is none behind the bound for keys, which rows have bits for.
    return bits == 0 ? 0 : bits & ld_global_u32(row + (u64)(first / WORD_KEYS) * 4);
}

// What queries see of some keys: of any of these one of them, and all of all.
struct Sight {
    u32 any, all;

    QG_DEVICE Sight none() { return {0, ~0u}; }
    // Adds what the query of a row sees of WORDS times 32 keys.
    template <u32 WORDS>
    QG_DEVICE void add(Sight& sight, const KernelParams& p, const u8* row, const KeyRange& seen, u32 first) {
#pragma unroll
        for (u32 word = 0; word < WORDS; word++) {
            const u32 bits = mask_bits(p, row, seen, first + word * WORD_KEYS);
            sight.any |= bits, sight.all &= bits;
        }
    }
};

#else

using KernelParams = AttentionParams;

#endif
