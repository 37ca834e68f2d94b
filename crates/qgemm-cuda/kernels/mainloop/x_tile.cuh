// X tile in shared memory, in the lanes' read order.
//
// MmaM16: of every 64 columns, lane t of four needs columns
//   16s + {2t, 2t+1, 2t+8, 2t+9}, s = 0..3.
// They are contiguous (index 16t + 4s + i) for 16-byte loads.
// MmaM8N8K4: natural order, because lanes need all columns.
#pragma once
#include "mainloop/x_group.cuh"

template <u32 TOKENS, u32 COLUMNS>
struct XTile {
    // Padding against bank conflicts.
    // A warp writes four k-blocks at once (MmaM16) and
    // reads two tokens.
    static constexpr u32 K_BLOCK_PITCH = K_BLOCK + (QG_MMA_M8N8K4 ? 0 : 16);
    static constexpr u32 PITCH = COLUMNS / K_BLOCK * K_BLOCK_PITCH + 16 / sizeof(XElement);
    static constexpr u32 ROW_GROUPS = COLUMNS / GROUP;
    alignas(16) XElement element[TOKENS * PITCH];  // [token][column]

    QG_DEVICE const XElement* k_block(const XTile& tile, u32 token, u32 index, u32 lane) {
        return tile.element + token * PITCH + index * K_BLOCK_PITCH + (QG_MMA_M8N8K4 ? 0 : lane % 4 * 16);
    }

    QG_DEVICE void store(XTile& tile, u32 token, u32 column, const XGroup& x) {
        XElement* k_block = tile.element + token * PITCH + column / K_BLOCK * K_BLOCK_PITCH;
        if constexpr (QG_MMA_M8N8K4) {
#pragma unroll
            for (u32 i = 0; i < GROUP_WORDS; i += 4)
                st_shared(reinterpret_cast<u32x4*>(k_block + column % K_BLOCK + i),
                          u32x4{x.word[i], x.word[i + 1], x.word[i + 2], x.word[i + 3]});
        } else {
            // Columns 2t and 2t + 1 go to lane t.
            struct alignas(2 * sizeof(XElement)) Pair {
                u32 word[GROUP_WORDS / 4];
            };
            XElement* base = k_block + column % 64 / 16 * 4 + column / 8 % 2 * 2;
#pragma unroll
            for (u32 t = 0; t < 4; t++) {
                Pair pair;
#pragma unroll
                for (u32 i = 0; i < GROUP_WORDS / 4; i++) pair.word[i] = x.word[t * (GROUP_WORDS / 4) + i];
                st_shared(reinterpret_cast<Pair*>(base + t * 16), pair);
            }
        }
    }
};
