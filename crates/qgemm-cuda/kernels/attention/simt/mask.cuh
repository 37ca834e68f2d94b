// FMA attention: which keys of a group its rows attend to.
#pragma once
#include "attention/simt/rows.cuh"

#if QG_BITS
// Bit r * UNROLL + u: row r attends to key u of the group.
static_assert(QG_ROWS * UNROLL <= 32, "a word says which rows see which keys");
constexpr u32 ALL_KEYS = QG_ROWS * UNROLL == 32 ? ~0u : (1u << QG_ROWS * UNROLL % 32) - 1;

// Bits of key `u` for all rows.
QG_DEVICE constexpr u32 key_of_all(u32 u) {
    u32 bits = 0;
    for (u32 r = 0; r < QG_ROWS; r++) bits |= 1u << (r * UNROLL + u);
    return bits;
}

// Mask bits of the group's keys,
// within `keys`, for all rows.
QG_DEVICE u32 keys_of_group(const KernelParams& p, const RowState (&rows)[QG_ROWS], const KeyRange& keys, u32 first_key) {
    u32 visible = 0;
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
        const u32 key = first_key + u * GROUPS;
        if (key < keys.first || key >= keys.end) continue;
#pragma unroll
        for (u32 r = 0; r < QG_ROWS; r++) {
            const u32 bits = mask_bits(p, rows[r].mask, rows[r].visible, key / WORD_KEYS * WORD_KEYS);
            visible |= (bits >> key % WORD_KEYS & 1u) << (r * UNROLL + u);
        }
    }
    return visible;
}
#endif
