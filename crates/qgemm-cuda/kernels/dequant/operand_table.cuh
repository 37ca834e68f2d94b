// Operand pairs of all pairs of codes, in shared memory.
// A lookup takes fewer instructions than the
// conversion of codes that index a codebook.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/shared_address.cuh"
#include "dequant/integer.cuh"
#include "dequant/operand.cuh"

struct OperandTable {
    static constexpr u32 CODES = 1u << code_bits<KTile>();
    static constexpr u32 ROW_BYTES = 32 * 4;
    static_assert(CODES <= 16, "the factors of `offset` are bytes");
    // dp4a is signed: codes from 8 on, times 16,
    // and a factor of 128 are negative.
    // Least offset, in rows.
    static constexpr u32 FIRST_ROW = CODES == 16 ? 8 + 7 * CODES : 0;
    // Each lane has a copy, which lies in a bank of its own.
    u32 value[CODES * CODES][32];

    // All threads of a CTA call it; a barrier must follow.
    QG_DEVICE void make(OperandTable& table, u32 thread) {
#pragma unroll 2
        for (u32 at = thread; at < CODES * CODES * 8; at += QG_THREADS) {
            const u32 first = at / 8 % CODES, second = at / 8 / CODES;
            const u32 v = convert(first, second), row = offset(first << 4 | second << 20, 0, FIRST_ROW * ROW_BYTES) / ROW_BYTES;
            st_shared(reinterpret_cast<u32x4*>(&table.value[row][at % 8 * 4]), u32x4{v, v, v, v});
        }
    }

    // Pair `pair` of quad `quad`, from the table
    // at the start of shared memory.
    QG_DEVICE u32 pair(const KTile& kt, u32 quad, u32 pair) {
        return ld_shared(shared_pointer<const u32>(offset(lifted_codes(kt, quad), pair, lane_copy())));
    }

    // `base` plus the offset of a pair's row.
    // Bytes `pair` and `pair` + 2 have its codes, times 16.
    QG_DEVICE u32 offset(u32 codes, u32 pair, u32 base) {
        const u32 factors = 8u << 8 * pair | 8u * CODES << 8 * (pair + 2);
        return (u32)dp4a((i32)codes, (i32)factors, (i32)base);
    }

    // Shared address of the lane's copy in the row of offset 0.
    QG_DEVICE u32 lane_copy() {
        return opaque_value(shared_address(dynamic_shared()) + FIRST_ROW * ROW_BYTES + thread_index() % 32 * 4);
    }

    // The codes of a quad, times 16, as bytes.
    QG_DEVICE u32 lifted_codes(const KTile& kt, u32 quad) {
        using Low = KTile::Codes0;
        u32 codes = bits_at<Low>(Low::word_of(kt.codes0, quad), quad, 4);
        if constexpr (QG_CODE_PLANES > 1) codes |= upper_bits(kt, quad);
        return codes;
    }
    // A template, so that the second plane may be absent.
    template <class S>
    QG_DEVICE u32 upper_bits(const S& kt, u32 quad) {
        using High = typename S::Codes1;
        return bits_at<High>(High::word_of(kt.codes1, quad), quad, 4 + S::Codes0::BITS);
    }
    // The bits of a plane for the codes of `quad`,
    // moved to bit `to` of each byte.
    template <class Plane>
    QG_DEVICE u32 bits_at(u32 word, u32 quad, u32 to) {
        constexpr u32 MASK = ((1u << Plane::BITS) - 1) * 0x01010101u;
        const u32 from = Plane::shift(quad, 0);
        return (from >= to ? word >> (from - to) : word << (to - from)) & MASK << to;
    }

    QG_DEVICE u32 convert(u32 first, u32 second) {
        KTile kt;
        constexpr u32 BITS = KTile::Codes0::BITS, MASK = (1u << BITS) - 1;
        kt.codes0.word[0] = (first & MASK) | (second & MASK) << 16;
        if constexpr (QG_CODE_PLANES > 1) set_upper_bits(kt, first >> BITS | second >> BITS << 16);
        return QG_X_DTYPE == DTYPE_F16 ? Operands::pair_f16(kt, 0, 0) : Operands::pair_bf16(kt, 0, 0);
    }
    template <class S>
    QG_DEVICE void set_upper_bits(S& kt, u32 bits) {
        kt.codes1.word[0] = bits;
    }
};
