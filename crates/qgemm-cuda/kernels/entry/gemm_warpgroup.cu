// D[m, n] for more than a few tokens on Hopper: warpgroups make weights from their codes in registers and multiply them with
// X in shared memory by instructions that run by themselves; a warpgroup of its own keeps W and X coming. Few tokens take two
// groups of warps that share the K dimension of the tile, slab by slab: one's instructions for weights hide the other's waits.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/sum_exchange.cuh"
#include "epilogue/warp_store.cuh"
#include "mainloop/warpgroup_pipeline.cuh"
#include "mainloop/warpgroup_tile.cuh"

static_assert(QG_K_GROUPS <= 2, "sums pass once");
static_assert(RUN_SLABS <= 2, "the loop leaves no more than one slab");
using Exchange = ExchangeOf<QG_K_GROUPS>::type;

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
    Exchange exchange;
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS == QG_WARPS_N * 32 && QG_CONSUMERS % 128 == 0, "the warps of a group are warpgroups");
constexpr u32 FIRST_FEEDER = QG_CONSUMERS * QG_K_GROUPS;
static_assert(QG_THREADS == FIRST_FEEDER + 128, "registers pass between whole warpgroups");

// Registers of a feeding thread and of one that multiplies: together as many as the block starts with.
constexpr u32 START_REGISTERS = 65536 / QG_BLOCKS_PER_SM / QG_THREADS / 8 * 8;
constexpr u32 FEEDER_REGISTERS = 32;
constexpr u32 CONSUMER_REGISTERS = (START_REGISTERS * QG_THREADS - FEEDER_REGISTERS * 128) / FIRST_FEEDER / 8 * 8;

// Chunks of whose instructions a warp waits for none: while one's run, the next one's weights are made, in registers of their own.
constexpr u32 UNDER_WAY = 2;
// Runs of the main loop, so that its chunks take turns with the registers. There is no branch among them: with instructions under
// way in one, the compiler takes their operands' registers for others (NVRTC 12.9; `build-kernels` looks for it).
constexpr u32 LOOP_RUNS = RUN_SLABS * CHUNKS % UNDER_WAY == 0 ? 1 : UNDER_WAY;
// Slabs from a group's run to its next, and those that the loop needs to go round once.
constexpr u32 GROUP_STRIDE = QG_K_GROUPS * RUN_SLABS;
constexpr u32 LOOP_SLABS = (LOOP_RUNS - 1) * GROUP_STRIDE + RUN_SLABS;

// Plain weights are loaded into the operands' registers, so not before the instructions that read them are done.
constexpr bool CODES_ARE_OPERANDS = QG_PLAIN_DTYPE == QG_X_DTYPE;

// A tile on its way through a warp.
struct Product {
    Sums sums;
    ChunkOperands operands[UNDER_WAY];
    // The stages that are read no more when the instructions on these operands are done.
    u32 read[UNDER_WAY];
    Position at;

    // The next SLABS slabs, all of a run or what is left of one; the first chunk takes the registers of turn TURN.
    template <u32 SLABS, u32 TURN>
    QG_DEVICE void multiply_run(Product& product, Pipeline& pipeline, u32 warp, u32 lane) {
        Position& at = product.at;
        const u8* bytes = pipeline.w[at.w].tile[warp];
        Slab slab;
#pragma unroll
        for (u32 i = 0; i < SLABS * CHUNKS; i++) {
            const u32 chunk = i % CHUNKS, of_stage = i % STAGE_CHUNKS, turn = (TURN + i) % UNDER_WAY;
            const u8* of_slab = bytes + i / CHUNKS * QG_SLAB_BYTES;
            if (of_stage == 0) mbarrier_wait(&pipeline.full[at.x], at.parity);
            if (chunk == 0) Slab::load_scales<FromShared>(slab, of_slab, lane);
            if constexpr (!CODES_ARE_OPERANDS) Slab::load_codes<FromShared>(slab, of_slab, chunk, lane);
            wgmma_wait_group<UNDER_WAY - 1>();
            Pipeline::release(pipeline, product.read[turn], lane);
            if constexpr (CODES_ARE_OPERANDS) Slab::load_codes<FromShared>(slab, of_slab, chunk, lane);
            start_chunk(product.sums, product.operands[turn], slab, chunk, pipeline.x[at.x][of_stage]);
            const bool ends_stage = of_stage == STAGE_CHUNKS - 1 || i == SLABS * CHUNKS - 1;
            product.read[turn] = ends_stage ? at.x : QG_X_STAGES;
            if (ends_stage) Position::next_stage(at);
        }
        Position::next_run(at);
        Position::skip<QG_K_GROUPS - 1>(at);
    }

    QG_DEVICE void wait(Product& product, Pipeline& pipeline, u32 lane) {
        wgmma_wait_group<0>();
#pragma unroll
        for (u32 turn = 0; turn < UNDER_WAY; turn++) {
            Pipeline::release(pipeline, product.read[turn], lane);
            product.read[turn] = QG_X_STAGES;
        }
    }
};

// All that warps of group GROUP do. It is no variable, so that their place in the ring is the same for all threads that execute
// the code, and the compiler keeps it and the instructions' descriptors in uniform registers.
template <u32 GROUP>
QG_DEVICE void consume(SharedStorage& shared, const GemmParams& p, u32 thread) {
    Pipeline& pipeline = shared.pipeline;
    const u32 lane = thread % 32, warp = thread / 32;
    TileWork work;
    WorkList list = WorkList::of_block(p);
    Position tile_at = {};
    bool is_first = true;
    while (WorkList::next(list, p, work)) {
        Product product;
        product.sums = {};
#pragma unroll
        for (u32 turn = 0; turn < UNDER_WAY; turn++) product.read[turn] = QG_X_STAGES;
        product.at = tile_at;
        Position::skip<GROUP>(product.at);
        u32 slab = work.begin + GROUP * RUN_SLABS;
#pragma unroll 1
        for (; slab + LOOP_SLABS <= work.end; slab += LOOP_RUNS * GROUP_STRIDE) {
            Product::multiply_run<RUN_SLABS, 0>(product, pipeline, warp, lane);
            if constexpr (LOOP_RUNS > 1) Product::multiply_run<RUN_SLABS, 1>(product, pipeline, warp, lane);
        }
        Product::wait(product, pipeline, lane);
        if (LOOP_SLABS > 1 && slab < work.end) {
            Product::multiply_run<1, 0>(product, pipeline, warp, lane);
            Product::wait(product, pipeline, lane);
        }
        Position::skip_all(tile_at, work);
        if constexpr (GROUP > 0) {
            Exchange::put(shared.exchange, product.sums, is_first, thread);
        } else {
            Exchange::add(shared.exchange, product.sums, thread);
            if (work.contributors == 1 || add_partial_sums(product.sums, p, work, thread, &shared.last))
                store_tile(product.sums, p, work, shared.staging[warp], warp, lane);
        }
        is_first = false;
    }
    if constexpr (GROUP > 0) Exchange::end(!is_first);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_BLOCKS_PER_SM)
    qg_gemm_warpgroup(const __grid_constant__ FedGemmParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline);
    block_barrier();
    griddepcontrol_launch_dependents();
    const u32 role = shfl_idx_u32(thread / QG_CONSUMERS, 0);
    if (role < QG_K_GROUPS) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        if (role == 0)
            consume<0>(shared, params.gemm, thread);
        else
            consume<QG_K_GROUPS - 1>(shared, params.gemm, thread - QG_CONSUMERS);
    } else {
        setmaxnreg_dec<FEEDER_REGISTERS>();
        const u32 feeder = (thread - FIRST_FEEDER) / 32, lane = thread % 32;
        if (feeder > 0)
            feed_w(shared.pipeline, params.gemm, feeder - 1, lane);
        else if (lane == 0)
            feed_x(shared.pipeline, params);
    }
}
