// W stream of a warp.
// Codes are loaded directly into the registers of the lanes
// that use them as operands.
// Scales go through shared memory to the lanes that hold the
// accumulators of their rows.
// Both are loaded one stage (64 columns) ahead and consumed
// one k-block at a time.
#pragma once
#if QG_X_PLANES
#include "mainloop/sm70/x_bytes.cuh"
#else
#include "mainloop/sm70/x_rows.cuh"
#endif

constexpr u32 ROW_TILES = QG_ROW_TILES;
constexpr u32 WARP_ROWS = ROW_TILES * QG_TILE_ROWS;
constexpr u32 K_TILE_STAGES = QG_K_TILE / STAGE_K;
static_assert(WARP_ROWS % 32 == 0, "every lane decodes the scales of as many rows");

// Scales and minimums of a warp's rows in a stage's sub-blocks.
// The two rows of a lane's accumulators are adjacent:
// r and r + 2 with MmaM8N8K4, r and r + 8 with MmaM16.
struct WScales {
    alignas(8) float scale[RowTerms::HAS_SCALE ? STAGE_SUBS * WARP_ROWS : 2];  // [sub-block][row]
    alignas(8) float min[RowTerms::HAS_MIN ? STAGE_SUBS * WARP_ROWS : 2];  // [sub-block][row]

    // Position of row `row` of a tile.
    QG_DEVICE u32 place(u32 row) {
        return QG_MMA_M8N8K4 ? row - row % 4 + row % 2 * 2 + row % 4 / 2 : row - row % 16 + row % 8 * 2 + row % 16 / 8;
    }
    // Value of the row at `place` in tile `rt`.
    QG_DEVICE float one(const float* values, u32 sub, u32 rt, u32 place) {
        return ld_shared(values + place + sub * WARP_ROWS + rt * QG_TILE_ROWS);
    }
    // Values of the row at `place` in tile `rt` and of the next one.
    QG_DEVICE f32x2 pair(const float* values, u32 sub, u32 rt, u32 place) {
        return ld_shared(reinterpret_cast<const f32x2*>(values + place + sub * WARP_ROWS + rt * QG_TILE_ROWS));
    }
};

// In-flight codes of one plane, up to 16 bytes per load.
// They may span several stages.
template <u32 P>
struct PlaneInFlight {
    static constexpr u32 WORD_BYTES = QgCodePlane<P>::WORD_BYTES;
    // Words of a k-block's eight quads.
    static constexpr u32 K_BLOCK_WORDS = QgCodePlane<P>::BITS;
    static constexpr u32 STAGE_BYTES = STAGE_K_BLOCKS * K_BLOCK_WORDS * 4;
    static constexpr u32 BYTES = WORD_BYTES > STAGE_BYTES ? WORD_BYTES : STAGE_BYTES;
    static constexpr u32 HELD_STAGES = BYTES / STAGE_BYTES, HELD_K_BLOCKS = HELD_STAGES * STAGE_K_BLOCKS;
    u32 word[BYTES / 4];

    QG_DEVICE void load(PlaneInFlight& plane, const u8* k_tile, u32 stage, u32 lane) {
        if (stage % HELD_STAGES != 0) return;
        const u8* first = k_tile + QgCodePlane<P>::OFFSET + stage * STAGE_BYTES * 32 + lane * WORD_BYTES;
#pragma unroll
        for (u32 i = 0; i < BYTES / WORD_BYTES; i++)
            load_record<WORD_BYTES, FromGlobal>(first + i * 32 * WORD_BYTES, plane.word + i * (WORD_BYTES / 4));
    }

    // Copies the codes of `k_block` to the first words of `codes`.
    QG_DEVICE void take(CodePlane<P>& codes, const PlaneInFlight& plane, u32 k_block) {
#pragma unroll
        for (u32 i = 0; i < K_BLOCK_WORDS; i++) {
            u32 word = plane.word[i];
#pragma unroll
            for (u32 c = 1; c < HELD_K_BLOCKS; c++)
                if (k_block % HELD_K_BLOCKS == c) word = plane.word[c * K_BLOCK_WORDS + i];
            codes.word[i] = word;
        }
    }
};

struct NoPlaneInFlight {
    template <class... T>
    QG_DEVICE void load(T&&...) {}
    template <class... T>
    QG_DEVICE void take(T&&...) {}
};
template <bool PRESENT, u32 P>
struct PlaneInFlightOrNone {
    using type = NoPlaneInFlight;
};
template <u32 P>
struct PlaneInFlightOrNone<true, P> {
    using type = PlaneInFlight<P>;
};

struct WStream {
    using Plane1 = typename PlaneInFlightOrNone<(QG_CODE_PLANES > 1), 1>::type;
    // Rows whose scales a lane decodes.
    static constexpr u32 SCALE_ROWS = WARP_ROWS / 32;

    // Current k-tile of each row tile.
    const u8* k_tile[ROW_TILES];
    PlaneInFlight<0> codes0[ROW_TILES];
    Plane1 codes1[ROW_TILES];
    // Zero points of the rows whose codes the lane holds.
    KTile::Scales1 zeros[ROW_TILES];
    // Scale records that the lane decodes, as row 0 of a k-tile.
    KTile records[SCALE_ROWS];

    QG_DEVICE void begin(WStream& w, const GemmParams& p, u32 first_tile, u32 first_k_tile) {
        const u32 tiles = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            // Warps past the last row tile recompute it and store nothing.
            const u32 tile = first_tile + rt < tiles ? first_tile + rt : tiles - 1;
            w.k_tile[rt] =
                reinterpret_cast<const u8*>(p.at.w) + ((u64)tile * p.shape.k_tiles + first_k_tile) * QG_K_TILE_BYTES;
        }
    }
    QG_DEVICE void next_k_tile(WStream& w) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) w.k_tile[rt] += QG_K_TILE_BYTES;
    }

    // Loads a stage of the k-tile. The first stage also loads all
    // zero points and records of the k-tile.
    QG_DEVICE void load(WStream& w, u32 stage, u32 lane) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            PlaneInFlight<0>::load(w.codes0[rt], w.k_tile[rt], stage, lane);
            Plane1::load(w.codes1[rt], w.k_tile[rt], stage, lane);
        }
        if (stage != 0) return;
        if constexpr (QG_ZERO_POINTS) {
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++)
                KTile::Scales1::template load_scales<FromGlobal>(w.zeros[rt], w.k_tile[rt],
                                                                 QG_MMA_M8N8K4 ? lane : lane / 4);
        }
        if constexpr (Operands::HAS_SCALE) {
#pragma unroll
            for (u32 i = 0; i < SCALE_ROWS; i++) {
                const u32 row = i * 32 + lane, tile = row / QG_TILE_ROWS;
                const u8* k_tile = w.k_tile[0];
#pragma unroll
                for (u32 rt = 1; rt < ROW_TILES; rt++)
                    if (tile == rt) k_tile = w.k_tile[rt];
                KTile::Scales0::load_row(w.records[i].scales0, k_tile, row % QG_TILE_ROWS);
                if constexpr (QG_SCALE_PLANES > 1 && (!QG_ZERO_POINTS || RowTerms::HAS_MIN))
                    KTile::Scales1::load_row(w.records[i].scales1, k_tile, row % QG_TILE_ROWS);
            }
        }
    }

    // Copies the codes and zero points of `k_block` to the
    // start of `k_tiles`.
    QG_DEVICE void take(KTile (&k_tiles)[ROW_TILES], const WStream& w, u32 k_block) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            PlaneInFlight<0>::take(k_tiles[rt].codes0, w.codes0[rt], k_block);
            Plane1::take(k_tiles[rt].codes1, w.codes1[rt], k_block);
            if constexpr (QG_ZERO_POINTS) {
                k_tiles[rt].scales1 = w.zeros[rt];
                if constexpr (QG_SUB_BLOCK < QG_K_TILE)
                    KTile::Scales1::skip(k_tiles[rt].scales1, k_block * K_BLOCK / QG_SUB_BLOCK);
            }
        }
    }

    QG_DEVICE void store_scales(WScales& scales, const WStream& w, u32 stage, u32 lane) {
        // A branch per stage makes sub-block indices constant.
#pragma unroll
        for (u32 c = 0; c < K_TILE_STAGES; c++) {
            if (c != stage) continue;
#pragma unroll
            for (u32 i = 0; i < SCALE_ROWS; i++)
#pragma unroll
                for (u32 s = 0; s < STAGE_SUBS; s++) {
                    const u32 sub = c * STAGE_K / QG_SUB_BLOCK + s;
                    const u32 at = WScales::place(lane) + s * WARP_ROWS + i * 32;
                    if constexpr (RowTerms::HAS_SCALE)
                        st_shared(&scales.scale[at], RowTerms::scale(w.records[i], 0, sub));
                    if constexpr (RowTerms::HAS_MIN) st_shared(&scales.min[at], RowTerms::min(w.records[i], 0, sub));
                }
        }
    }
};
