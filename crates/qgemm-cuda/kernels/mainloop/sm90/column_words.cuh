// Packed codes in shared memory, permuted for byte MMA.
//
// A lane's words hold columns 16s + {2t, 2t+1, 2t+8, 2t+9} of
// its two rows, the order of 16-bit MMA.
// Byte MMA needs columns 4t..4t+3 of each 16.
// X is in natural order, so a lane loads the words of the two
// lanes that have its columns.
// All bits of a byte belong to one column of each 16
// and move together.
#pragma once
#include "dequant/operand.cuh"

// Location of a lane's columns.
struct LaneColumns {
    // First of the two adjacent lanes that hold the columns, and
    // the byte selector for both.
    // The packed order is v0 v2 v1 v3.
    // The selector takes v0, v1 or v2, v3.
    u32 lane, bytes;

    QG_DEVICE LaneColumns of_lane(u32 lane) {
        const u32 t = lane % 4;
        return {lane - t + 2 * t % 4, t < 2 ? 0x6420u : 0x7531u};
    }
};

// Loads the lane's words of a k-block to the plane's start.
template <u32 P>
QG_DEVICE void load_columns(CodePlane<P>& plane, const u8* k_tile, u32 k_block, const LaneColumns& place) {
    // Contiguous bytes of a lane, and bytes of a k-block.
    constexpr u32 RECORD = QgCodePlane<P>::WORD_BYTES, ALL = CodePlane<P>::BITS * 4, PIECE = RECORD < ALL ? RECORD : ALL;
#pragma unroll
    for (u32 i = 0; i < ALL / PIECE; i++) {
        const u32 at = k_block * ALL + i * PIECE, offset = QgCodePlane<P>::OFFSET + at % RECORD;
        u32 first[PIECE / 4], second[PIECE / 4];
        load_record<PIECE, FromShared>(k_tile + offset + (at / RECORD * 32 + place.lane) * RECORD, first);
        load_record<PIECE, FromShared>(k_tile + offset + (at / RECORD * 32 + place.lane + 1) * RECORD, second);
#pragma unroll
        for (u32 word = 0; word < PIECE / 4; word++) plane.word[i * PIECE / 4 + word] = prmt(first[word], second[word], place.bytes);
    }
}
QG_DEVICE void load_columns(NoPlane&, const u8*, u32, const LaneColumns&) {}

// A lane's codes of a k-block of 64 columns, 4t..4t+3 of each
// 16, as the first k-block of a k-tile.
QG_DEVICE KTile columns_of(const u8* k_tile, u32 k_block, const LaneColumns& place) {
    KTile columns;
    load_columns(columns.codes0, k_tile, k_block, place);
    load_columns(columns.codes1, k_tile, k_block, place);
    return columns;
}
