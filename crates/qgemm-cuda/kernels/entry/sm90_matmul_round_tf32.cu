// TF32 rounding pass of f32 `matmul` operands for Hopper.
// wgmma truncates, so values are rounded to nearest here.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "atoms/sync.cuh"
#include "mainloop/copied_factors.cuh"

// Values per thread and access, chunks per tile line, and
// lines per pass of the CTA.
constexpr u32 CHUNK = 4, CHUNKS = TILE / CHUNK;
constexpr u32 LINES = QG_THREADS / CHUNKS, PASSES = TILE / LINES;
// The odd pitch avoids bank conflicts of a warp's writes.
constexpr u32 PITCH = TILE + 1;

struct SharedStorage {
    // [outer][k]
    u32 tile[TILE * PITCH];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Four rounded values of a line from `first` on,
// zero past `length`.
QG_DEVICE u32x4 load_rounded(const u8* line, u32 first, u32 length, bool aligned) {
    u32x4 v = {0, 0, 0, 0};
    const u8* at = line + (u64)first * 4;
    if (aligned && first + CHUNK <= length) {
        v = ld_global_v4(at);
    } else {
        if (first < length) v.x = ld_global_u32(at);
        if (first + 1 < length) v.y = ld_global_u32(at + 4);
        if (first + 2 < length) v.z = ld_global_u32(at + 8);
        if (first + 3 < length) v.w = ld_global_u32(at + 12);
    }
    return {f32_to_tf32(bits_to_f32(v.x)), f32_to_tf32(bits_to_f32(v.y)), f32_to_tf32(bits_to_f32(v.z)),
            f32_to_tf32(bits_to_f32(v.w))};
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_sm90_matmul_round_tf32(const __grid_constant__ CopyParams params) {
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
    const u8* from = reinterpret_cast<const u8*>(f.from) + (matrix * f.from_matrix + first_line * f.from_line) * 4;
    u8* to = reinterpret_cast<u8*>(f.to) + (matrix * f.to_matrix + first_outer * f.to_row + first_k) * 4;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32x4 v[PASSES];
#pragma unroll
    for (u32 i = 0; i < PASSES; i++) {
        const u32 of_tile = i * LINES + line;
        v[i] = u32x4{0, 0, 0, 0};
        if (first_line + of_tile < lines)
            v[i] = load_rounded(from + of_tile * f.from_line * 4, first_column + column, columns, f.aligned16);
    }
    if (!f.along_k) {
#pragma unroll
        for (u32 i = 0; i < PASSES; i++) {
            u32* at = &shared.tile[column * PITCH + i * LINES + line];
            st_shared(at, v[i].x);
            st_shared(at + PITCH, v[i].y);
            st_shared(at + 2 * PITCH, v[i].z);
            st_shared(at + 3 * PITCH, v[i].w);
        }
        cta_barrier();
#pragma unroll
        for (u32 i = 0; i < PASSES; i++) {
            const u32* at = &shared.tile[(i * LINES + line) * PITCH + column];
            v[i] = u32x4{ld_shared(at), ld_shared(at + 1), ld_shared(at + 2), ld_shared(at + 3)};
        }
    }
    // Writes up to the row's end: the padding between the values
    // and the next row must be initialized.
#pragma unroll
    for (u32 i = 0; i < PASSES; i++) {
        const u32 of_tile = i * LINES + line;
        if (first_outer + of_tile < f.outer && first_k + column < f.to_row)
            st_global_v4(to + (of_tile * f.to_row + column) * 4, v[i]);
    }
}
