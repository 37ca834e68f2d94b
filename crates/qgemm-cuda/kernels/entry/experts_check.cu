// What is wrong with an index: the kind of fault and its first place, as `ExpertFault` of qgemm-hal numbers them. One CTA looks at
// all of it.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "generated/abi.cuh"

constexpr u32 NONE = 0xffffffffu;
constexpr u32 WARPS = QG_THREADS / 32;

struct SharedStorage {
    u32 of_index[WARPS], of_weights[WARPS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

QG_DEVICE u32 word(u64 base, u32 place) {
    return ld_global_u32(reinterpret_cast<const u8*>(base) + (u64)place * 4);
}

QG_DEVICE bool is_wrong(const ExpertCheck& p, u32 place) {
    const u32 own = word(p.index, place);
    if (p.form == QG_FORM_CONTIGUOUS) return own > p.rows || (place > 0 && own < word(p.index, place - 1));
    return p.form == QG_FORM_INDEXED ? own >= p.experts : own > p.rows;
}

QG_DEVICE u32 smaller(u32 a, u32 b) {
    return a < b ? a : b;
}

// The smallest value of all threads, in thread 0.
QG_DEVICE u32 cta_min(u32 value, u32* warps) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) value = smaller(value, shfl_xor_u32(value, mask));
    if (thread_index() % 32 == 0) st_shared(&warps[thread_index() / 32], value);
    cta_barrier();
    for (u32 warp = 0; warp < WARPS; warp++) value = smaller(value, ld_shared(&warps[warp]));
    return value;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_experts_check(const __grid_constant__ ExpertCheck p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const bool indexed = p.form == QG_FORM_INDEXED;
    const u32 places = (indexed ? p.rows : p.experts) + (p.form == QG_FORM_CONTIGUOUS ? 1 : 0);
    u32 in_index = NONE, in_weights = NONE;
    for (u32 place = thread_index(); place < places; place += QG_THREADS) {
        if (is_wrong(p, place)) in_index = smaller(in_index, place);
        if (p.router_weights != 0 && (word(p.router_weights, place) & 0x7fffffffu) > 0x7f800000u)
            in_weights = smaller(in_weights, place);
    }
    in_index = cta_min(in_index, shared.of_index);
    in_weights = cta_min(in_weights, shared.of_weights);
    if (thread_index() != 0) return;
    const u32 of_index = indexed ? QG_FAULT_ID : p.form == QG_FORM_MASKED ? QG_FAULT_COUNT : QG_FAULT_OFFSET;
    u32 fault = 0, place = 0;
    if (in_index != NONE)
        fault = of_index, place = in_index;
    else if (in_weights != NONE)
        fault = QG_FAULT_ROUTER_WEIGHT, place = in_weights;
    u8* status = reinterpret_cast<u8*>(p.status);
    st_global_u32(status, fault);
    st_global_u32(status + 4, place);
}
