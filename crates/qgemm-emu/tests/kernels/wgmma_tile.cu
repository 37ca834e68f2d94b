// D[32 tokens, 64 features] = X[32, K] · W[64, K]ᵀ by the
// wgmma of one warpgroup. W is loaded to registers. TMA copies
// X in k-blocks of 64 columns, two in flight.
#include "atoms/launch.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "atoms/wgmma.cuh"

constexpr u32 FEATURES = 64, TOKENS = 32, STAGE_K = 64, STAGES = 2;
// Four consumer warps, and a producer warp whose first lane
// issues the copies.
constexpr u32 CONSUMERS = 128;

struct alignas(64) TensorMap {
    u8 opaque[128];
};

struct WgmmaTile {
    TensorMap x;  // X as [tokens][K] f16, boxes of 64 columns and 32 tokens, 128-byte swizzle.
    u64 w;        // W as [64][K] f16.
    u64 d;        // D as [32][64] f32.
    u64 k;        // A multiple of 64.
};
static_assert(sizeof(WgmmaTile) == 192, "the host lays out another size");

struct SharedStorage {
    // The swizzle repeats every 1024 bytes.
    alignas(1024) u8 x[STAGES][TOKENS * STAGE_K * 2];
    // `full`: the k-block has arrived. `empty`:
    // its readers are done.
    u64 full[STAGES], empty[STAGES];
};

QG_DEVICE SharedStorage& shared_storage() {
    const u64 start = reinterpret_cast<u64>(dynamic_shared());
    return *reinterpret_cast<SharedStorage*>((start + 1023) / 1024 * 1024);
}

QG_DEVICE void produce(const WgmmaTile& p, SharedStorage& shared, u32 k_blocks) {
    for (u32 k_block = 0; k_block < k_blocks; k_block++) {
        const u32 stage = k_block % STAGES, use = k_block / STAGES;
        // A stage is free before its first use.
        if (use > 0) mbarrier_wait(&shared.empty[stage], (use - 1) % 2);
        mbarrier_arrive_expect_tx(&shared.full[stage], sizeof(shared.x[0]));
        cp_async_bulk_tensor_2d(shared.x[stage], &p.x, (i32)(k_block * STAGE_K), 0, &shared.full[stage]);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) wgmma_tile(const __grid_constant__ WgmmaTile p) {
    SharedStorage& shared = shared_storage();
    const u32 thread = thread_index(), warp = thread / 32, lane = thread % 32;
    const u32 k_blocks = (u32)p.k / STAGE_K;
    if (thread == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            mbarrier_init(&shared.full[stage], 1);
            mbarrier_init(&shared.empty[stage], CONSUMERS);
        }
        fence_mbarrier_init();
    }
    cta_barrier();
    if (thread >= CONSUMERS) {
        if (lane == 0) produce(p, shared, k_blocks);
        return;
    }

    // Register i of A: row g (+ 8 for odd i), columns 2t (+ 8 for
    // i >= 2) of the warp's 16 rows.
    const u32 row = warp * 16 + lane / 4, pair = lane % 4 * 2;
    const u8* w = reinterpret_cast<const u8*>(p.w) + (row * p.k + pair) * 2;
    float d[16] = {};
    for (u32 k_block = 0; k_block < k_blocks; k_block++) {
        const u32 stage = k_block % STAGES;
        u32 a[STAGE_K / 16][4];
#pragma unroll
        for (u32 k16 = 0; k16 < STAGE_K / 16; k16++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                a[k16][i] = ld_global_u32(w + (i % 2 * 8 * p.k + k_block * STAGE_K + k16 * 16 + i / 2 * 8) * 2);
        mbarrier_wait(&shared.full[stage], k_block / STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (u32 k16 = 0; k16 < STAGE_K / 16; k16++)
            wgmma_k16_f16<32>(d, a[k16], wgmma_descriptor_128b(shared.x[stage] + k16 * 32));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        mbarrier_arrive(&shared.empty[stage]);
    }

#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u32 token = i / 4 * 8 + pair + i % 2, feature = row + i % 4 / 2 * 8;
        st_global_f32(reinterpret_cast<float*>(p.d) + token * FEATURES + feature, d[i]);
    }
}
