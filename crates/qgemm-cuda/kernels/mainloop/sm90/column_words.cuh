// Packed codes in shared memory, brought into the order of instructions on bytes.
//
// A lane's words hold columns 16s + {2t, 2t+1, 2t+8, 2t+9} of its two rows, which instructions on 16 bits want; those on bytes want columns
// 4t..4t+3 of each 16. X lies in natural order, so each lane loads the words of the two lanes that have its columns. Bits of a byte belong to
// the same column of each 16, and pass with it.
#pragma once
#include "dequant/operand.cuh"

// Where a lane's columns are.
struct ColumnPlace {
    // The first of the two lanes beside each other that have them, and the bytes of both that are the lane's: of the packed order v0 v2 v1 v3,
    // v0 and v1 or v2 and v3.
    u32 lane, bytes;

    QG_DEVICE ColumnPlace of_lane(u32 lane) {
        const u32 t = lane % 4;
        return {lane - t + 2 * t % 4, t < 2 ? 0x6420u : 0x7531u};
    }
};

// The lane's words of a k-block, of a plane, which begins with them then.
template <u32 P>
QG_DEVICE void load_columns(CodePlane<P>& plane, const u8* k_tile, u32 k_block, const ColumnPlace& place) {
    // Bytes of a lane that lie together, and those of a k-block.
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
QG_DEVICE void load_columns(NoPlane&, const u8*, u32, const ColumnPlace&) {}

// A lane's codes of a k-block of 64 columns, 4t..4t+3 of each 16, as those of a k-tile's first.
QG_DEVICE KTile columns_of(const u8* k_tile, u32 k_block, const ColumnPlace& place) {
    KTile columns;
    load_columns(columns.codes0, k_tile, k_block, place);
    load_columns(columns.codes1, k_tile, k_block, place);
    return columns;
}
