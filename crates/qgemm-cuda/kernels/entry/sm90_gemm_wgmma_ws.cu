// Warp-specialized GEMM on Hopper for larger M.
// Consumer warpgroups dequantize W in registers and multiply
// by X in shared memory with `wgmma`.
// A producer warpgroup copies W and X.
// For few tokens, two consumer groups split K by k-tiles:
// one group dequantizes while the other waits.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/accumulator_exchange.cuh"
#include "epilogue/warpgroup_store.cuh"
#include "mainloop/expert_producer.cuh"
#include "mainloop/register_shares.cuh"
#if QG_CODE_SUMS
#include "mainloop/sm90/code_sums_product.cuh"
#else
#include "mainloop/sm90/warpgroup_product.cuh"
#endif

static_assert(QG_K_GROUPS <= 2, "accumulators pass once");
using Exchange = ExchangeOf<QG_K_GROUPS>::type;

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
    Exchange exchange;
    u32 last;
#if QG_EXPERT_TILES
    u32 faults[8];
    TileInfo infos[INFOS];
#endif
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS == QG_WARPS_N * 32 && QG_CONSUMERS % 128 == 0, "the warps of a group are warpgroups");
static_assert(FIRST_PRODUCER == QG_CONSUMERS * QG_K_GROUPS, "registers pass between whole warpgroups");

// Experts often have few rows, and few in their last tile.
// wgmma over fewer tokens is then faster.
// Kernels of 96 and 128 tokens would spill with this path.
// Or ptxas would serialize their wgmmas.
// A separate epilogue avoids the spills but is slower.
constexpr u32 FEW_ROWS = 32;
constexpr bool HAS_FEW_ROWS = QG_TILE_M < 96;

// Source of the consumers' tiles.
struct TileSource {
#if QG_EXPERT_TILES
    // Tile info from the producers.
    // The next tile's info arrives with its first stage.
    const TileInfo* info;
    u32 next_place;

    QG_DEVICE TileSource of_cta(const GemmParams&) { return {nullptr, 0}; }
    QG_DEVICE bool next(TileSource& source, SharedStorage& shared, const GemmParams& p, const Position& at, WorkTile& work) {
        mbarrier_wait(&shared.pipeline.full[at.x], at.parity);
        source.info = &shared.infos[source.next_place];
        source.next_place = next_info(source.next_place);
        return TileInfo::read(*source.info, p, work);
    }
    QG_DEVICE void store(const TileSource& source, Accumulators& acc, const GemmParams& p, const WorkTile& work, WarpStaging& staging,
                         u32 warp, u32 lane) {
        store_warpgroup_tile(acc, p, work, staging, warp, lane, *source.info);
    }
#else
    WorkList list;

    QG_DEVICE TileSource of_cta(const GemmParams& p) { return {WorkList::of_cta(p)}; }
    QG_DEVICE bool next(TileSource& source, SharedStorage&, const GemmParams& p, const Position&, WorkTile& work) {
        return WorkList::next(source.list, p, work);
    }
    QG_DEVICE void store(const TileSource&, Accumulators& acc, const GemmParams& p, const WorkTile& work, WarpStaging& staging, u32 warp,
                         u32 lane) {
        store_warpgroup_tile(acc, p, work, staging, warp, lane);
    }
#endif
};

// Work of the consumers of group GROUP.
// GROUP is a template parameter: the ring position is then
// uniform over all threads of the code. The compiler keeps it
// and the matrix descriptors in uniform registers.
template <u32 GROUP>
QG_DEVICE void consume(SharedStorage& shared, const GemmParams& p, u32 thread) {
    Pipeline& pipeline = shared.pipeline;
    const u32 lane = thread % 32, warp = thread / 32;
    WorkTile work;
    TileSource source = TileSource::of_cta(p);
    Position tile_at = {};
    bool is_first = true;
    while (TileSource::next(source, shared, p, tile_at, work)) {
        Product product = Product::of_tile(tile_at, p, work, warp);
        Position::skip<GROUP>(product.at);
#if QG_EXPERT_TILES
        if (HAS_FEW_ROWS && work.own.rows <= FEW_ROWS)
            Product::multiply<GROUP, FEW_ROWS>(product, pipeline, work, warp, lane);
        else
#endif
            Product::multiply<GROUP, QG_TILE_M>(product, pipeline, work, warp, lane);
        Position::skip_all(tile_at, work);
        if constexpr (GROUP > 0) {
            Exchange::put(shared.exchange, product.acc, is_first, thread);
        } else {
            Exchange::add(shared.exchange, product.acc, thread);
            // MoE GEMM does not split K.
            if (QG_EXPERT_TILES || work.peers == 1 || add_partials(product.acc, p, work, thread, &shared.last))
                TileSource::store(source, product.acc, problem_of(p, work), work, shared.staging[warp], warp, lane);
        }
        is_first = false;
    }
    if constexpr (GROUP > 0) Exchange::end(!is_first);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm90_gemm_wgmma_ws(const __grid_constant__ TmaGemmParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline, stage_producers(params.gemm));
    cta_barrier();
#if !QG_EXPERT_TILES
    griddepcontrol_launch_dependents();
#endif
    // Gathering needs registers.
    // Two consumer warpgroups leave enough.
    using Registers = RegisterShares<(QG_EXPERT_TILES && QG_THREADS <= 384 ? 56 : 32), QG_CTAS_PER_SM>;
    // The shuffle makes the role uniform for the compiler.
    const u32 role = shfl_idx_u32(thread / QG_CONSUMERS, 0);
    if (role < QG_K_GROUPS) {
        Registers::take();
        griddepcontrol_wait();
#if QG_EXPERT_TILES
        // Not earlier: expert data that the next launch reads before
        // its wait must be ready by then.
        // The next launch finds no room before CTAs end anyway.
        griddepcontrol_launch_dependents();
#endif
        if (role == 0)
            consume<0>(shared, params.gemm, thread);
        else
            consume<QG_K_GROUPS - 1>(shared, params.gemm, thread - QG_CONSUMERS);
    } else {
        Registers::give();
#if QG_EXPERT_TILES
        produce(shared.pipeline, params, thread - FIRST_PRODUCER, shared.faults, shared.infos);
#else
        produce(shared.pipeline, params, thread - FIRST_PRODUCER);
#endif
    }
}
