// Super-block minimums of K-quants: integers times a row unit.
// Their contribution to a k-tile is an MMA of these integers
// and the X block sums.
// A common code offset is handled alike, with the scales.
// The integers are exact in bf16.
// An f32 sum is split into three bf16 numbers.
#pragma once
#include "dequant/byte_scale.cuh"
#include "mainloop/row_tiles.cuh"
#include "mainloop/sub_block_accumulators.cuh"

// Tiles of eight sub-blocks.
constexpr u32 SUB_TILES = SUPER_BLOCK_MINIMUMS ? QG_K_TILE / QG_SUB_BLOCK / 8 : 1;

// X block sums of a k-tile: D registers of an MMA whose A
// operand is X, two k-steps of eight tokens.
// Upper and lower rows are the two halves of the columns.
// Column s is sub-block s.
struct XBlockSums {
    float value[SUB_TILES][4];

    // `first` and `second`: B operands of k-steps `k_step` and
    // `k_step` + 1 of the k-tile.
    QG_DEVICE void add(XBlockSums& sums, u32 k_step, const u32 (&first)[2], const u32 (&second)[2], u32 lane) {
        const u32 a[4] = {first[0], first[1], second[0], second[1]};
        const u32 sub = k_step * K_STEP / QG_SUB_BLOCK, next_sub = (k_step + 1) * K_STEP / QG_SUB_BLOCK;
        const u32 b[2] = {lane / 4 == sub % 8 ? ONE_PAIR : 0, lane / 4 == next_sub % 8 ? ONE_PAIR : 0};
        mma_k_step(sums.value[sub / 8], a, b);
    }

    // B operands: a lane has sub-blocks 2t, 2t + 1 of token g.
    // Part 0 is the sum in bf16, part 1 the remainder, part 2 the
    // remainder of that.
    QG_DEVICE void split(const XBlockSums& sums, u32 (&part)[3][SUB_TILES]) {
#pragma unroll
        for (u32 tile = 0; tile < SUB_TILES; tile++) {
            float low = sums.value[tile][0] + sums.value[tile][2], high = sums.value[tile][1] + sums.value[tile][3];
#pragma unroll
            for (u32 i = 0; i < 3; i++) {
                part[i][tile] = f32_to_bf16x2(low, high);
                low -= bits_to_f32(part[i][tile] << 16), high -= bits_to_f32(part[i][tile] & 0xffff0000u);
            }
        }
    }
};

// The integers of a lane's rows as A operands.
template <class Format>
struct SuperBlockIntegers {
    u32 a[SUB_TILES][2];

    QG_DEVICE SuperBlockIntegers of(const KTile& k_tile, SuperBlockPart kind, u32 lane) {
        SuperBlockIntegers integers;
#pragma unroll
        for (u32 tile = 0; tile < SUB_TILES; tile++)
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                const u32 bytes = Format::integers(k_tile, row, tile, lane % 4, kind);
                integers.a[tile][row] =
                    f32_to_bf16x2(biased_byte(bytes, 0) - BIASED_BYTE, biased_byte(bytes, 1) - BIASED_BYTE);
            }
        return integers;
    }

    // d += integers · X block sums.
    QG_DEVICE void multiply(float (&d)[4], const SuperBlockIntegers& integers, const u32 (&part)[3][SUB_TILES]) {
        const u32 a[4] =
            {integers.a[0][0], integers.a[0][1], integers.a[SUB_TILES - 1][0], integers.a[SUB_TILES - 1][1]};
        if constexpr (SUB_TILES == 2) {
#pragma unroll
            for (u32 i = 0; i < 3; i++) mma_m16n8k16_bf16(d, a, {part[i][0], part[i][1]});
        } else {
            mma_m16n8k16_bf16(d, a, {part[0][0], part[1][0]});
            mma_m16n8k16_bf16(d, a, {part[2][0], 0});
        }
    }
};

// Adds the minimums, and the common offset times the scales,
// each times the X block sums.
template <class Format, u32 TOKEN_TILES>
QG_DEVICE void add_super_block_minimums(float (&acc)[ROW_TILES][TOKEN_TILES][4], const KTile (&k_tiles)[ROW_TILES],
                                        const XBlockSums (&x_sums)[TOKEN_TILES], u32 lane) {
    u32 parts[TOKEN_TILES][3][SUB_TILES];
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++) XBlockSums::split(x_sums[tt], parts[tt]);
    const auto add = [&](SuperBlockPart kind, float times) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const auto integers = SuperBlockIntegers<Format>::of(k_tiles[rt], kind, lane);
            const float unit[2] =
                {times * Format::unit(k_tiles[rt], 0, kind), times * Format::unit(k_tiles[rt], 1, kind)};
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
                float d[4] = {};
                SuperBlockIntegers<Format>::multiply(d, integers, parts[tt]);
#pragma unroll
                for (u32 i = 0; i < 4; i++) acc[rt][tt][i] += unit[i / 2] * d[i];
            }
        }
    };
    // Accumulators are in operand units, X block sums are not.
    add(SuperBlockPart::MINS, 1.0f / FROM_UNITS);
    if (CODE_BIAS != 0) add(SuperBlockPart::SCALES, -CODE_BIAS / FROM_UNITS);
}
