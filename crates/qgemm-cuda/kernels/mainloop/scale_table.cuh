// f32 scales of a warp's rows, in shared memory, for formats
// with super-blocks.
// One lane decodes the scales of a row.
// Otherwise each of the four lanes that hold the row's codes
// would decode all of them.
#pragma once
#include "mainloop/row_tiles.cuh"
#include "mainloop/sub_block_accumulators.cuh"

// Formats with super-blocks have k-tiles of 256 columns.
// One scale for all of them needs no table.
constexpr bool HAS_SCALE_TABLE = QG_K_TILE > 128 && QG_SUB_BLOCK < QG_K_TILE;

// Scales of a row in units of four.
// UNITS is 0 without a table.
template <u32 UNITS>
struct ScaleTable {
    static_assert(UNITS == 2 || UNITS == 4, "scales of 16 or 32 columns in k-tiles of 256");
    // Rows are in the order of their records.
    // Units of neighbouring rows are swizzled: units that lanes
    // read or write together use different banks.
    f32x4 scale[ROW_TILES][QG_TILE_ROWS * UNITS];

    QG_DEVICE constexpr u32 place(u32 record, u32 unit) {
        return record * UNITS + (unit ^ record / (8 / UNITS) % UNITS);
    }

    // All lanes of a warp call it; a barrier must follow.
    QG_DEVICE void make(ScaleTable& table, const u8 (&w)[ROW_TILES][QG_K_TILE_BYTES], u32 lane) {
        constexpr u32 TILES_AT_ONCE = 32 / QG_TILE_ROWS;
        const u32 record = lane % QG_TILE_ROWS;
#pragma unroll
        for (u32 first = 0; first < ROW_TILES; first += TILES_AT_ONCE) {
            const u32 row_tile = first + lane / QG_TILE_ROWS;
            if (first + TILES_AT_ONCE > ROW_TILES && row_tile >= ROW_TILES) break;
            KTile k_tile;
            KTile::Scales0::load_one<FromShared>(k_tile.scales0, w[row_tile], record);
            KTile::Scales1::load_one<FromShared>(k_tile.scales1, w[row_tile], record);
#pragma unroll
            for (u32 unit = 0; unit < UNITS; unit++) {
                float v[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) v[i] = scale_of_partial(k_tile, unit * 4 + i);
                st_shared(&table.scale[row_tile][place(record, unit)], {v[0], v[1], v[2], v[3]});
            }
        }
    }

    // Scale of a sub-block for an integer-operand accumulator.
    // All operands of the sub-block have the same lift.
    QG_DEVICE float scale_of_partial(const KTile& k_tile, u32 sub) {
        return Operands::scale(k_tile, 0, sub) * level_factor(lift_level(sub * PARTIAL_K_STEPS));
    }
};

template <>
struct ScaleTable<0> {
    template <class... T>
    QG_DEVICE void make(T&&...) {}
};
using ScaleTableOfWarp = ScaleTable<HAS_SCALE_TABLE ? QG_K_TILE / QG_SUB_BLOCK / 4 : 0>;

// Scales of a lane's two rows per row tile, for four sub-blocks.
struct ScaleUnit {
    float value[ROW_TILES][2][4];

    template <u32 UNITS>
    QG_DEVICE void load(ScaleUnit& scales, const ScaleTable<UNITS>& table, u32 unit, u32 lane) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                const f32x4 v = ld_shared(&table.scale[rt][ScaleTable<UNITS>::place(lane / 4 * 2 + row, unit)]);
                const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (u32 i = 0; i < 4; i++) scales.value[rt][row][i] = four[i];
            }
    }
    QG_DEVICE void load(ScaleUnit&, const ScaleTable<0>&, u32, u32) {}
};
