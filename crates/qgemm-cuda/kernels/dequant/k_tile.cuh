// One packed k-tile of W in a lane's registers:
// code words and the scale records of its rows.
// qgemm-formats/src/prepack.rs defines the layout.
// The prelude has its constants (QgCodePlane, QgScalePlane).
#pragma once
#include "atoms/float.cuh"
#include "atoms/memory.cuh"

// Tile rows per lane: g and g + 8 (MmaM16), or one (MmaM8N8K4).
constexpr u32 LANE_ROWS = QG_MMA_M8N8K4 ? 1 : 2;
// Quads per lane.
// A quad is four codes of a row.
constexpr u32 QUADS = QG_TILE_ROWS * QG_K_TILE / 128;
// A k-block is eight quads of a lane.
// An MMA k-step is the columns of one quad:
// 16 of a k16 fragment (MmaM16), or the quad's four (MmaM8N8K4).
constexpr u32 K_BLOCK = QG_MMA_M8N8K4 ? 32 : 64;
constexpr u32 K_BLOCKS = QG_K_TILE / K_BLOCK;
constexpr u32 K_STEPS = 8 / LANE_ROWS;
constexpr u32 K_STEP = K_BLOCK / K_STEPS;

// Quad of the lane's row `row` in k-step `k_step` of `k_block`.
QG_DEVICE constexpr u32 quad_of(u32 k_block, u32 row, u32 k_step) {
    return k_block * 8 + row * K_STEPS + k_step;
}

// Inverse of `quad_of`: the quad's row in the lane, and the
// first column of its k-step in the k-tile.
QG_DEVICE constexpr u32 row_of(u32 quad) {
    return quad % 8 / K_STEPS;
}
QG_DEVICE constexpr u32 column_of(u32 quad) {
    return quad / 8 * K_BLOCK + quad % K_STEPS * K_STEP;
}

// Source of a k-tile: streamed global memory, or shared memory.
struct FromGlobal {
    QG_DEVICE u32x4 v4(const u8* address) { return ld_global_stream_v4(address); }
    QG_DEVICE u32x2 v2(const u8* address) { return ld_global_stream_v2(address); }
    QG_DEVICE u32 word(const u8* address) { return ld_global_stream_u32(address); }
    QG_DEVICE u32 half(const u8* address) { return ld_global_u16(address); }
    QG_DEVICE u32 byte(const u8* address) { return ld_global_u8(address); }
};
struct FromShared {
    QG_DEVICE u32x4 v4(const u8* address) { return ld_shared(reinterpret_cast<const u32x4*>(address)); }
    QG_DEVICE u32x2 v2(const u8* address) { return ld_shared(reinterpret_cast<const u32x2*>(address)); }
    QG_DEVICE u32 word(const u8* address) { return ld_shared(reinterpret_cast<const u32*>(address)); }
    QG_DEVICE u32 half(const u8* address) { return ld_shared(reinterpret_cast<const u16*>(address)); }
    QG_DEVICE u32 byte(const u8* address) { return ld_shared(address); }
};

template <u32 BYTES, class From>
QG_DEVICE void load_record(const u8* address, u32* out) {
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (u32 i = 0; i < BYTES / 16; i++) {
            const u32x4 v = From::v4(address + i * 16);
            out[i * 4] = v.x, out[i * 4 + 1] = v.y, out[i * 4 + 2] = v.z, out[i * 4 + 3] = v.w;
        }
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
        for (u32 i = 0; i < BYTES / 8; i++) {
            const u32x2 v = From::v2(address + i * 8);
            out[i * 2] = v.x, out[i * 2 + 1] = v.y;
        }
    } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
        for (u32 i = 0; i < BYTES / 4; i++) out[i] = From::word(address + i * 4);
    } else if constexpr (BYTES == 2) {
        out[0] = From::half(address);
    } else {
        static_assert(BYTES == 1, "records are 1, 2 or a multiple of 4 bytes");
        out[0] = From::byte(address);
    }
}

template <u32 P>
struct CodePlane {
    static constexpr u32 BITS = QgCodePlane<P>::BITS;
    static constexpr u32 WORDS = QUADS * BITS / 8;
    // Quads per word, and the mask of a pair's codes
    // (integer planes).
    static constexpr u32 PER_WORD = BITS > 8 ? 1 : 8 / BITS;
    static constexpr u32 MASK = BITS > 8 ? 0 : ((1u << BITS % 16) - 1u) * 0x00010001u;
    u32 word[WORDS];

    QG_DEVICE void load(CodePlane& plane, const u8* k_tile, u32 lane) {
        constexpr u32 bytes = QgCodePlane<P>::WORD_BYTES;
#pragma unroll
        for (u32 i = 0; i < WORDS * 4 / bytes; i++)
            load_record<bytes, FromGlobal>(k_tile + QgCodePlane<P>::OFFSET + (i * 32 + lane) * bytes,
                                           plane.word + i * (bytes / 4));
    }
    // Loads the words that `k_block` is the first to need.
    template <class From>
    QG_DEVICE void load_k_block(CodePlane& plane, const u8* k_tile, u32 k_block, u32 lane) {
        constexpr u32 bytes = QgCodePlane<P>::WORD_BYTES;
#pragma unroll
        for (u32 i = 0; i < WORDS * 4 / bytes; i++)
            if (i * (bytes / 4) / BITS == k_block)
                load_record<bytes, From>(k_tile + QgCodePlane<P>::OFFSET + (i * 32 + lane) * bytes,
                                         plane.word + i * (bytes / 4));
    }

    // Bit of the quad's word where the pair's first code starts.
    // The second code is 16 bits higher.
    QG_DEVICE constexpr u32 shift(u32 quad, u32 pair_index) {
        return BITS * (quad % PER_WORD) + 8 * pair_index;
    }
    QG_DEVICE u32 word_of(const CodePlane& plane, u32 quad) {
        return plane.word[quad / PER_WORD];
    }
};

template <u32 P>
struct ScalePlane {
    static constexpr u32 ROW_BYTES = QgScalePlane<P>::ROW_BYTES;
    // With MmaM16 all lanes share a record of eight rows.
    // Each lane takes the records of its two rows, as if unshared.
    static constexpr bool SHARED = QgScalePlane<P>::SHARED_BY > 1;
    static constexpr u32 BYTES = LANE_ROWS * ROW_BYTES;
    u32 word[(BYTES + 3) / 4];

    // `row_group` is g with MmaM16 and the lane with MmaM8N8K4.
    // MmaM16 stores records in the order 0, 8, 1, 9, ….
    template <class From>
    QG_DEVICE void load_scales(ScalePlane& plane, const u8* k_tile, u32 row_group) {
        const u32 record = !SHARED ? row_group : QG_MMA_M8N8K4 ? row_group / QgScalePlane<P>::SHARED_BY : 0;
        load_record<BYTES, From>(k_tile + QgScalePlane<P>::OFFSET + record * BYTES, plane.word);
    }

    // Loads the record of tile row `row` as the lane's first row,
    // whichever lane holds the row's codes.
    QG_DEVICE void load_row(ScalePlane& plane, const u8* k_tile, u32 row) {
        const u32 record = SHARED ? row / QgScalePlane<P>::SHARED_BY : QG_MMA_M8N8K4 ? row : row % 8 * 2 + row / 8;
        load_one<FromGlobal>(plane, k_tile, record);
    }
    // Loads record `record`, counted in storage order.
    template <class From>
    QG_DEVICE void load_one(ScalePlane& plane, const u8* k_tile, u32 record) {
        load_record<ROW_BYTES, From>(k_tile + QgScalePlane<P>::OFFSET + record * ROW_BYTES, plane.word);
    }

    // Drops the first `bytes` of a record of at most four bytes.
    QG_DEVICE void skip(ScalePlane& plane, u32 bytes) {
        plane.word[0] >>= 8 * bytes;
    }

    QG_DEVICE u32 byte(const ScalePlane& plane, u32 row, u32 index) {
        const u32 at = row * ROW_BYTES + index;
        return (plane.word[at / 4] >> (8 * (at % 4))) & 0xffu;
    }
    // Byte offsets of 16-bit fields must be even.
    QG_DEVICE u32 half(const ScalePlane& plane, u32 row, u32 byte_index) {
        const u32 at = row * ROW_BYTES + byte_index;
        return (plane.word[at / 4] >> (8 * (at % 4))) & 0xffffu;
    }
    // A 16-bit field in both halves of a word.
    QG_DEVICE u32 half_twice(const ScalePlane& plane, u32 row, u32 byte_index) {
        const u32 at = row * ROW_BYTES + byte_index;
        return prmt(plane.word[at / 4], 0, at % 4 == 0 ? 0x1010u : 0x3232u);
    }
    // Byte offsets of 32-bit fields must be multiples of 4.
    QG_DEVICE u32 full(const ScalePlane& plane, u32 row, u32 byte_index) {
        return plane.word[(row * ROW_BYTES + byte_index) / 4];
    }
};

struct NoPlane {
    template <class... T>
    QG_DEVICE void load(T&&...) {}
    template <class... T>
    QG_DEVICE void load_row(T&&...) {}
    template <class... T>
    QG_DEVICE void skip(T&&...) {}
    template <class From, class... T>
    QG_DEVICE void load_one(T&&...) {}
    template <class From, class... T>
    QG_DEVICE void load_scales(T&&...) {}
    template <class From, class... T>
    QG_DEVICE void load_k_block(T&&...) {}
};

template <bool PRESENT, template <u32> class Plane, u32 P>
struct PlaneOrNone {
    using type = NoPlane;
};
template <template <u32> class Plane, u32 P>
struct PlaneOrNone<true, Plane, P> {
    using type = Plane<P>;
};

struct KTile {
    using Codes0 = CodePlane<0>;
    using Codes1 = typename PlaneOrNone<(QG_CODE_PLANES > 1), CodePlane, 1>::type;
    using Scales0 = typename PlaneOrNone<(QG_SCALE_PLANES > 0), ScalePlane, 0>::type;
    using Scales1 = typename PlaneOrNone<(QG_SCALE_PLANES > 1), ScalePlane, 1>::type;

    Codes0 codes0;
    Codes1 codes1;
    Scales0 scales0;
    Scales1 scales1;

    QG_DEVICE void load(KTile& kt, const u8* k_tile, u32 lane) {
        Codes0::load(kt.codes0, k_tile, lane);
        Codes1::load(kt.codes1, k_tile, lane);
        load_scales<FromGlobal>(kt, k_tile, lane);
    }

    // Loads the codes of k-block `k_block` that earlier k-blocks
    // have not loaded.
    template <class From>
    QG_DEVICE void load_codes(KTile& kt, const u8* k_tile, u32 k_block, u32 lane) {
        Codes0::template load_k_block<From>(kt.codes0, k_tile, k_block, lane);
        Codes1::template load_k_block<From>(kt.codes1, k_tile, k_block, lane);
    }

    template <class From>
    QG_DEVICE void load_scales(KTile& kt, const u8* k_tile, u32 lane) {
        const u32 row_group = QG_MMA_M8N8K4 ? lane : lane / 4;
        Scales0::template load_scales<From>(kt.scales0, k_tile, row_group);
        Scales1::template load_scales<From>(kt.scales1, k_tile, row_group);
    }
};
