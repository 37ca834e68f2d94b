// Copies one-byte `matmul` operands for FP8 instructions, which
// read them along K.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "mainloop/copied_factors.cuh"

// Codes per thread and access. A thread has one access.
constexpr u32 CHUNK = 16, CHUNKS = TILE / CHUNK;
static_assert(QG_THREADS == TILE * CHUNKS, "a chunk a thread");
// The odd pitch in words avoids most bank conflicts.
constexpr u32 PITCH = TILE + 4;

struct SharedStorage {
    // [outer][k]
    alignas(4) u8 tile[TILE * PITCH];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Codes of a line from `first` on, zero past `length`.
QG_DEVICE void load_codes(u32 (&word)[4], const u8* line, u32 first, u32 length, bool aligned) {
    const u8* at = line + first;
    if (aligned && first + CHUNK <= length) {
        const u32x4 v = ld_global_v4(at);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) word[i] = 0;
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++)
        if (first + i < length) word[i / 4] |= ld_global_cached_u8(at + i) << (i % 4 * 8);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_matmul_copy_codes(const __grid_constant__ CopyParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    u32 index = cta_index().x;
    const bool is_b = index >= params.factor[0].tiles;
    if (is_b) index -= params.factor[0].tiles;
    const CopiedFactor& f = params.factor[is_b];
    const u32 matrix = index / f.matrix_tiles, place = index % f.matrix_tiles;
    const u32 first_outer = place / f.k_tiles * TILE, first_k = place % f.k_tiles * TILE;
    const u32 thread = thread_index(), line = thread / CHUNKS, column = thread % CHUNKS * CHUNK;
    const u32 first_line = f.along_k ? first_outer : first_k, first_column = f.along_k ? first_k : first_outer;
    const u32 lines = f.along_k ? f.outer : f.k, columns = f.along_k ? f.k : f.outer;
    const u8* from = reinterpret_cast<const u8*>(f.from) + matrix * f.from_matrix + first_line * f.from_line;
    u8* to = reinterpret_cast<u8*>(f.to) + matrix * f.to_matrix + first_outer * f.to_row + first_k;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32 word[4] = {};
    if (first_line + line < lines) load_codes(word, from + line * f.from_line, first_column + column, columns, f.aligned16);
    if (!f.along_k) {
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++)
            st_shared(&shared.tile[(column + i) * PITCH + line], (u8)(word[i / 4] >> (i % 4 * 8)));
        cta_barrier();
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            word[i] = ld_shared(reinterpret_cast<const u32*>(&shared.tile[line * PITCH + column + i * 4]));
    }
    // Writes up to the row's end: the padding between the values
    // and the next row must be initialized.
    if (first_outer + line < f.outer && first_k + column < f.to_row)
        st_global_v4(to + line * f.to_row + column, u32x4{word[0], word[1], word[2], word[3]});
}
