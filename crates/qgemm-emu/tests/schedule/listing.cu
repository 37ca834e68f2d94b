// Lists the work tiles of every CTA and sums each tile
// as gemm kernels do: the last peer to arrive adds all
// partial accumulators in peer order. `x` has a weight
// per k-tile. Element i of a k-tile's product is
// that weight plus i.
#include "atoms/float.cuh"
#include "atoms/memory.cuh"
#include "sched/split.cuh"

constexpr u32 ELEMENTS = QG_THREADS;
constexpr u32 FIELDS = 9;

extern "C" __global__ void listing(const __grid_constant__ GemmParams p) {
    u32* flag = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    u8* list = reinterpret_cast<u8*>(p.at.c) + (u64)cta_index().x * p.at.c_row;
    WorkList works = WorkList::of_cta(p);
    WorkTile work;
    while (WorkList::next(works, p, work)) {
        if (thread == 0) {
            const u32 fields[FIELDS] = {1,          work.tile,         work.n_tile, work.m_tile,     work.begin,
                                        work.end,   work.peers, work.index,  work.first_slot + work.index};
            for (u32 i = 0; i < FIELDS; i++) st_global_u32(list + i * 4, fields[i]);
        }
        list += FIELDS * 4;
        float sum = 0;
        for (u32 k_tile = work.begin; k_tile < work.end; k_tile++)
            sum += bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(p.at.x) + k_tile * 4)) + thread;
        if (work.peers > 1) {
            st_global_f32(partial_slot(p, work, work.index, ELEMENTS) + thread, sum);
            if (!arrive_and_check_last(p, work, flag)) continue;
            float all = 0;
            for (u32 i = 0; i < work.peers; i++)
                all += i == work.index ? sum : ld_global_cg_f32(partial_slot(p, work, i, ELEMENTS) + thread);
            sum = all;
        }
        st_global_u32(reinterpret_cast<u8*>(p.at.d) + ((u64)work.tile * ELEMENTS + thread) * 4, f32_to_bits(sum));
    }
}
