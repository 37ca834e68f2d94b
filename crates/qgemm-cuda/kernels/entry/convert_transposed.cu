// Converts transposed X, whose tokens are neighbours in memory, for matrix instructions. A CTA has eight tokens, so
// that one CTA reads a sector of 32 bytes (two CTAs where elements have 2 bytes). With scaling, the CTA reads its
// tokens twice, the first time for their largest magnitudes. A tile in shared memory turns columns into rows.
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/convert.cuh"

constexpr u32 TOKENS = 8;
constexpr u32 WARPS = QG_THREADS / 32;
// Columns that the CTA reads at once, and columns of the tile.
constexpr u32 READ_COLUMNS = QG_THREADS / TOKENS;
constexpr u32 TILE_COLUMNS = QG_THREADS / TOKENS * GROUP;
// 16 bytes of padding put the tokens that a warp stores at once into different banks.
constexpr u32 PITCH = TILE_COLUMNS + 8;

struct SharedStorage {
    alignas(16) u16 tile[TOKENS * PITCH];
    u32 largest[WARPS * TOKENS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Column `source` of a token. Tokens and columns outside X are zero.
QG_DEVICE float load_value(const StageX& p, u32 token, u32 source) {
    if (token >= p.m || source >= p.k) return 0;
    const u64 index = token * p.x_row + source * p.x_col;
    return source_value(load_source(reinterpret_cast<const u8*>(p.x) + index * SOURCE_BYTES));
}

// The largest magnitude of the thread's token.
QG_DEVICE u32 largest_of_token(const StageX& p, u32 token, SharedStorage& shared) {
    const u32 thread = thread_index(), lane = thread % 32;
    u32 largest = 0;
#pragma unroll 8
    for (u32 column = thread / TOKENS; column < p.k; column += READ_COLUMNS)
        largest = larger_magnitude(largest, load_value(p, token, column));
#pragma unroll
    for (u32 mask = TOKENS; mask < 32; mask *= 2) {
        const u32 other = shfl_xor_u32(largest, mask);
        largest = other > largest ? other : largest;
    }
    if (lane < TOKENS) st_shared(&shared.largest[thread / 32 * TOKENS + lane], largest);
    cta_barrier();
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
        const u32 other = ld_shared(&shared.largest[warp * TOKENS + thread % TOKENS]);
        largest = other > largest ? other : largest;
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_convert_transposed(const __grid_constant__ StageX p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), first_token = cta_index().x * TOKENS;
    // Neighbouring threads read neighbouring tokens and write neighbouring groups of columns.
    const u32 token = first_token + thread % TOKENS;
    const u32 written_token = thread / READ_COLUMNS, written_column = thread % READ_COLUMNS * GROUP;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    float factor = 1;
    if constexpr (SCALED) {
        const TokenScale scale = TokenScale::of(largest_of_token(p, token, shared));
        if (thread < TOKENS && token < p.m) store_factor(p, token, scale);
        factor = scale.factor;
    }
    for (u32 first = 0; first < p.columns; first += TILE_COLUMNS) {
        float values[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const u32 column = first + i * READ_COLUMNS + thread / TOKENS;
            values[i] = column < p.columns ? load_value(p, token, source_column(p, column)) : 0;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            st_shared(&shared.tile[thread % TOKENS * PITCH + i * READ_COLUMNS + thread / TOKENS],
                      (u16)converted(values[i] * factor));
        cta_barrier();
        if (first_token + written_token < p.m && first + written_column < p.columns)
            st_global_v4(converted_group(p, first_token + written_token, first + written_column),
                         ld_shared(reinterpret_cast<const u32x4*>(
                             &shared.tile[written_token * PITCH + written_column])));
        cta_barrier();
    }
}
