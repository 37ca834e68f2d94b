// D[m, n] from weights and activations that both have a scale a block: MXFP4 · MXFP4, NVFP4 · NVFP4, and MXFP4 or MXFP8 · MXFP8. Each warp
// owns one row tile of W and reads it straight into registers. The codes and scales of X pass through shared memory.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/store.cuh"
#if QG_X_E4M3
#include "mainloop/sm120/mxf8_k_tile.cuh"
#else
#include "mainloop/sm120/fp4_k_tile.cuh"
#endif

constexpr u32 WARPS = QG_THREADS / 32;
constexpr u32 TILE_N = WARPS * QG_TILE_ROWS;
constexpr u32 ELEMENTS = TILE_N * QG_TILE_M;
constexpr u32 TOKEN_TILES = QG_TILE_M / 8;
// Four words of padding put the tokens that the lanes of a warp hold into different banks.
constexpr u32 ACC_PITCH = TILE_N + 4;
using Tile = XTile<QG_TILE_M, QG_X_K_TILES>;
static_assert(QG_TILE_M * QG_X_K_TILES == QG_THREADS, "every thread moves one token's k-tile");

struct SharedStorage {
    union {
        Tile x[2];
        float acc[QG_TILE_M * ACC_PITCH];
    };
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(sizeof(BlockScaledParams) == sizeof(GemmParams) + 24, "the host lays out another size");

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm120_gemm_block_scaled(const __grid_constant__ BlockScaledParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const u32 first_token = cta_index().y * QG_TILE_M;
    const u32 tiles = (p.gemm.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS;
    const u32 k_tiles = p.gemm.shape.k_tiles;
    // Warps beyond the last row tile compute that tile again and store nothing.
    const u32 own_tile = cta_index().x * WARPS + warp;
    const u32 tile = own_tile < tiles ? own_tile : tiles - 1;
    const u8* w = reinterpret_cast<const u8*>(p.gemm.at.w) + (u64)tile * k_tiles * QG_K_TILE_BYTES;
    const u32 x_token = thread / QG_X_K_TILES, x_k_tile = thread % QG_X_K_TILES;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    float acc[TOKEN_TILES][4] = {};
    XKTile prefetched = load_x_k_tile(p, first_token + x_token, x_k_tile);
    Tile::store(shared.x[0], x_token, x_k_tile, prefetched);
    cta_barrier();
    u32 stage = 0;
    for (u32 first = 0; first < k_tiles; first += QG_X_K_TILES) {
        const bool more = first + QG_X_K_TILES < k_tiles;
        KTile k_tile[QG_X_K_TILES];
#pragma unroll
        for (u32 s = 0; s < QG_X_K_TILES; s++)
            if (first + s < k_tiles) KTile::load(k_tile[s], w + (u64)(first + s) * QG_K_TILE_BYTES, lane);
        if (more) prefetched = load_x_k_tile(p, first_token + x_token, first + QG_X_K_TILES + x_k_tile);
#pragma unroll
        for (u32 s = 0; s < QG_X_K_TILES; s++) {
            if (first + s < k_tiles) {
                const WOperand operand = w_operand(k_tile[s], lane);
#pragma unroll
                for (u32 tt = 0; tt < TOKEN_TILES; tt++)
                    Tile::accumulate(acc[tt], operand, shared.x[stage], tt * 8, s, lane);
            }
        }
        if (more) Tile::store(shared.x[stage ^ 1], x_token, x_k_tile, prefetched);
        cta_barrier();
        stage ^= 1;
    }

    // Transpose the accumulators, which lanes hold as [row][token], into rows of D.
    const float x_factor = p.x_given == 0 ? 1.0f : load_dense(DTYPE_F32, p.x_given, 0);
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 token = tt * 8 + lane % 4 * 2 + i % 2, row = warp * QG_TILE_ROWS + lane / 4 + i / 2 * 8;
            st_shared(&shared.acc[token * ACC_PITCH + row], x_factor * acc[tt][i]);
        }
    cta_barrier();
#pragma unroll 1
    for (u32 i = thread; i < ELEMENTS; i += QG_THREADS) {
        const u32 token = i / TILE_N, row = i % TILE_N;
        store_by_lane(p.gemm, first_token + token, cta_index().x * TILE_N + row,
                      ld_shared(&shared.acc[token * ACC_PITCH + row]), true);
    }
}
