// Accumulators of `matmul` on `mma.sync`.
// A warp has WARP_M × WARP_N of the tile, in 16×8 MMA
// tiles (16×16 on Volta). A lane holds pairs of
// neighbouring columns.
#pragma once
#include "atoms/types.cuh"

constexpr u32 WARPS = QG_WARPS_M * QG_WARPS_N;
static_assert(WARPS * 32 == QG_THREADS, "every warp has a part of the tile");
constexpr u32 WARP_M = QG_TILE_M / QG_WARPS_M, WARP_N = QG_TILE_N / QG_WARPS_N;
constexpr u32 TILE_COLUMNS = QG_VARIANT >= 75 ? 8 : 16, TILE_SUMS = TILE_COLUMNS / 2;
constexpr u32 M_TILES = WARP_M / 16, N_TILES = WARP_N / TILE_COLUMNS;
constexpr u32 ACCUMULATORS = M_TILES * N_TILES * TILE_SUMS;

struct Accumulators {
    float value[M_TILES][N_TILES][TILE_SUMS];  // [row tile][column tile][register]
};

// Rows and columns of a lane's accumulator pairs.
struct LaneCoordinates {
#if QG_VARIANT >= 75
    // Position = lane offset + tile offset:
    // first_row + rows_below(row tile i, pair), first_column +
    // columns_after(column tile j).
    QG_DEVICE u32 first_row(u32 lane) {
        return lane / 4;
    }
    QG_DEVICE u32 rows_below(u32 i, u32 pair) {
        return i * 16 + pair * 8;
    }
    QG_DEVICE u32 first_column(u32 lane) {
        return lane % 4 * 2;
    }
    QG_DEVICE u32 columns_after(u32 j, u32) {
        return j * 8;
    }
    // The pair's row in its 16-row tile, and the D row of such a
    // row, from `first` on.
    QG_DEVICE u32 tile_row(u32 pair, u32 lane) {
        return lane / 4 + pair * 8;
    }
    QG_DEVICE u32 row_from(u32 first, u32 i, u32 row) {
        return first + i * 16 + row;
    }
#else
    // m8n8k4: lane l belongs to product l % 16 / 4.
    // Bit 0 of the product selects eight rows, bit 1 eight columns.
    // If an operand is not contiguous along K, 16 bytes of it
    // cover two tiles, in alternating groups of four.
    QG_DEVICE u32 first_row(u32 lane) {
        return (lane / 16 * 2 + lane / 4 % 2) * (QG_A_ALONG_K ? 4 : 8) + lane % 2;
    }
    QG_DEVICE u32 rows_below(u32 i, u32 pair) {
        return (QG_A_ALONG_K ? i * 16 : i / 2 * 32 + i % 2 * 4) + pair % 2 * 2;
    }
    QG_DEVICE u32 first_column(u32 lane) {
        return lane / 8 % 2 * 8 + (lane & 2u);
    }
    QG_DEVICE u32 columns_after(u32 j, u32 pair) {
        return QG_B_ALONG_K ? j * 16 + pair / 2 * 4 : j / 2 * 32 + j % 2 * 4 + pair / 2 * 16;
    }
    QG_DEVICE u32 tile_row(u32 pair, u32 lane) {
        return lane / 16 * 8 + lane / 4 % 2 * 4 + lane % 2 + pair % 2 * 2;
    }
    QG_DEVICE u32 row_from(u32 first, u32 i, u32 row) {
        return first + (QG_A_ALONG_K ? i * 16 + row : i / 2 * 32 + i % 2 * 4 + row / 4 * 8 + row % 4);
    }
#endif
};
