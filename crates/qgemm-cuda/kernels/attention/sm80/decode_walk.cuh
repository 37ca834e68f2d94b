// Decode attention: K and V tiles of a warp in turn, through
// the slots of its ring. A slot is refilled when all
// lanes have read it.
#pragma once
#include "attention/sm80/decode_work.cuh"

// End of the keys of a warp's `count` tiles from `first_tile` on.
QG_DEVICE u32 end_of_tiles(const KeyRange& keys, u32 first_tile, u32 count) {
    u32 last = first_tile;
#pragma unroll 1
    for (u32 i = 1; i < count && last + KEY_GROUPS * TILE < keys.end; i++) last += KEY_GROUPS * TILE;
    return least(last + TILE, keys.end);
}

#if QG_PAIRS

// Two warps share a ring, which TMA fills.
struct TileWalk {
    TileRing& ring;
    u32 first_tile;

    QG_DEVICE TileWalk of(TileRing& ring, const KeyRange& keys, u8*) {
        return {ring, keys.first / TILE * TILE + own_group() * TILE};
    }
    // End of the keys that `fill` copies.
    __device__ __forceinline__ u32 filled_end(const KeyRange& keys) const { return end_of_tiles(keys, first_tile, SLOTS / 2); }
    __device__ __forceinline__ void fill() { ring.fill(first_tile); }
    __device__ __forceinline__ void fill_rest() {}
    __device__ __forceinline__ const u8* wait() { return ring.wait(); }
    __device__ __forceinline__ u32 present() const { return ring.present(); }
    __device__ __forceinline__ void free_keys(u32) { ring.pass(); }
    __device__ __forceinline__ const u8* wait_for_values(u32 tile) {
        ring.template refill<true>(tile);
        return ring.wait();
    }
    __device__ __forceinline__ void free_values(u32 tile) {
        ring.pass();
        ring.template refill<false>(tile);
    }
    // Results overwrite the codes of other warps.
    __device__ __forceinline__ void end() { cta_barrier(); }
};

#else

// With few tiles, further copies start after the first K
// tile has arrived. K comes sooner, and QKᵀ overlaps with
// the copy of V.
constexpr u32 FEW_TILES = IS_CODES ? 1 : IS_TRANSPOSED ? 2 : 0;

// Each warp has a ring, which cp.async fills.
struct TileWalk {
    TileRing& ring;
    u8* slots;
    u32 first_tile, end_key;
    bool has_few_tiles;
    u32 slot;

    QG_DEVICE TileWalk of(TileRing& ring, const KeyRange& keys, u8* slots) {
        const u32 first_tile = keys.first / TILE * TILE + thread_index() / 32 * TILE;
        const bool has_few_tiles = FEW_TILES != 0 && first_tile + FEW_TILES * WARPS * TILE >= keys.end;
        return {ring, slots, first_tile, keys.end, has_few_tiles, 0};
    }
    // End of the keys that `fill` copies.
    __device__ __forceinline__ u32 filled_end(const KeyRange& keys) const {
        return end_of_tiles(keys, first_tile, has_few_tiles ? 1 : (SLOTS + 1) / 2);
    }
    __device__ __forceinline__ void fill() {
        if (ring.has_pages) ring.ask_pages(first_tile);
#pragma unroll 1
        for (u32 i = 0; i < SLOTS; i += 2) {
            ring.copy_keys(first_tile + i / 2 * WARPS * TILE, i);
            if (has_few_tiles) break;
            if (i + 1 < SLOTS) ring.copy_values(i + 1);
        }
    }
    __device__ __forceinline__ void fill_rest() {
        if (!has_few_tiles) return;
        cp_async_wait_group<0>();
        ring.copy_values(1);
#pragma unroll
        for (u32 i = 2; i < SLOTS; i++) {
            const u32 next = first_tile + i / 2 * WARPS * TILE;
            if (i / 2 >= FEW_TILES || next >= end_key)
                ring.copy_nothing(i % 2 == 0);
            else if (i % 2 == 0)
                ring.copy_keys(next, i);
            else
                ring.copy_values(i);
        }
    }
    // Waits until the copies of all lanes to a slot are complete.
    __device__ __forceinline__ const u8* wait() {
        cp_async_wait_group<SLOTS - 1>();
        warp_barrier();
        return slots + slot * SLOT_BYTES;
    }
    __device__ __forceinline__ u32 present() const { return ring.present[0]; }
    // Refills the free slot with the next K or V tile in turn.
    template <bool OF_KEYS>
    __device__ __forceinline__ void refill(u32 tile) {
        // All lanes have read the slot.
        warp_barrier();
        const u32 next = tile + (SLOTS + 1) / 2 * WARPS * TILE;
        if (OF_KEYS ? next >= end_key : ring.tile >= end_key)
            ring.copy_nothing(OF_KEYS);
        else if (OF_KEYS)
            ring.copy_keys(next, slot);
        else
            ring.copy_values(slot);
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }
    __device__ __forceinline__ void free_keys(u32 tile) { refill<SLOTS % 2 == 0>(tile); }
    __device__ __forceinline__ const u8* wait_for_values(u32) { return wait(); }
    __device__ __forceinline__ void free_values(u32 tile) { refill<SLOTS % 2 != 0>(tile); }
    // Only empty groups are in flight;
    // after this the ring is free.
    __device__ __forceinline__ void end() {
        cp_async_wait_group<0>();
        warp_barrier();
    }
};

#endif
