// Activations of a block's tokens in shared memory, in the order in which lanes read them.
//
// Class T: for every 64 columns, lane t of a group of four needs columns 16 s + {2t, 2t+1, 2t+8, 2t+9} for s = 0..3.
// They are stored one after another (index 16 t + 4 s + i), so that a lane reads them with 16-byte accesses.
// Class V: every lane needs every column; the order is natural.
#pragma once
#include "dequant/slab.cuh"
#include "generated/abi.cuh"

struct GemmParams {
    GemmShape shape;
    GemmPointers at;
};

#if QG_USE_MMA
using XElement = u16;
#else
using XElement = float;
#endif

// Elements that one staging step moves, and their words in registers.
constexpr u32 GROUP = 8;
struct XGroup {
    XElement value[GROUP];
};

template <u32 TOKENS, u32 COLUMNS>
struct XTile {
    // 16 bytes of padding put the rows of neighbouring tokens into different banks.
    static constexpr u32 PITCH = COLUMNS + 16 / sizeof(XElement);
    static constexpr u32 GROUPS = TOKENS * COLUMNS / GROUP;
    alignas(16) XElement element[TOKENS * PITCH];

    QG_DEVICE const XElement* chunk(const XTile& tile, u32 token, u32 chunk_index, u32 lane) {
        return tile.element + token * PITCH + chunk_index * CHUNK_K + (QG_CLASS_V ? 0 : lane % 4 * 16);
    }

    QG_DEVICE void store(XTile& tile, u32 group, const XGroup& x) {
        const u32 column = group % (COLUMNS / GROUP) * GROUP;
        XElement* row = tile.element + group / (COLUMNS / GROUP) * PITCH;
        if constexpr (QG_CLASS_V) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) st_shared(row + column + i, x.value[i]);
        } else {
            struct alignas(2 * sizeof(XElement)) Pair {
                XElement first, second;
            };
            const u32 step = column % 64 / 16;
            const u32 half = column / 8 % 2;
#pragma unroll
            for (u32 t = 0; t < 4; t++) {
                const Pair pair = {x.value[2 * t], x.value[2 * t + 1]};
                st_shared(reinterpret_cast<Pair*>(row + column / 64 * 64 + t * 16 + step * 4 + half * 2), pair);
            }
        }
    }
};

#if QG_X_DTYPE == 0
constexpr u32 X_BYTES = 4;
QG_DEVICE float x_element(const u8* address) { return bits_to_f32(ld_global_u32(address)); }
#else
constexpr u32 X_BYTES = 2;
QG_DEVICE float x_float(u32 bits) { return QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits); }
#if QG_USE_MMA
QG_DEVICE u16 x_element(const u8* address) { return (u16)ld_global_cached_u16(address); }
#else
QG_DEVICE float x_element(const u8* address) { return x_float(ld_global_cached_u16(address)); }
#endif
#endif

// Eight columns from `column` (a multiple of 8, in stored order) of one token; what lies outside X is zero.
QG_DEVICE XGroup load_x_group(const GemmParams& p, u32 token, u32 column) {
    XGroup x = {};
    if (token >= p.shape.m) return x;
    const u8* row = reinterpret_cast<const u8*>(p.at.x) + token * p.at.x_row * X_BYTES;
    if ((p.shape.flags & QG_FLAG_X_ALIGNED16) && !(p.shape.flags & QG_FLAG_K_ORDER) && column + GROUP <= p.shape.k) {
        const u8* address = row + (u64)column * X_BYTES;
#pragma unroll
        for (u32 i = 0; i < GROUP * X_BYTES / 16; i++) {
            const u32x4 v = ld_global_v4(address + i * 16);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
#if QG_X_DTYPE == 0
                x.value[i * 4 + j] = bits_to_f32(words[j]);
#elif QG_USE_MMA
                x.value[j * 2] = (u16)words[j];
                x.value[j * 2 + 1] = (u16)(words[j] >> 16);
#else
                x.value[j * 2] = x_float(words[j] & 0xffffu);
                x.value[j * 2 + 1] = x_float(words[j] >> 16);
#endif
            }
        }
        return x;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        u32 source = column + i;
        if (p.shape.flags & QG_FLAG_K_ORDER) {
            // The table is as long as stored_k; positions that no input feature feeds hold 0xffffffff.
            source = source < p.shape.stored_k
                         ? ld_global_u32(reinterpret_cast<const u8*>(p.at.k_order) + (u64)source * 4)
                         : 0xffffffffu;
        }
        if (source < p.shape.k) x.value[i] = x_element(row + (u64)source * p.at.x_col * X_BYTES);
    }
    return x;
}
