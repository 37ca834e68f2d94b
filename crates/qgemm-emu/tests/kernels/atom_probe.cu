// Atom probe: runs one atom on registers from memory.
// Lane l of CTA c reads words [QG_LANES * c + l][…] and
// writes the result of the atom to the same index of the
// outputs. The prelude lists QG_PROBES(number, words in,
// words out, name).
#include "atoms/cp_async.cuh"
#include "atoms/float.cuh"
#include "atoms/fp8.cuh"
#include "atoms/launch.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/match.cuh"
#include "atoms/memory.cuh"
#include "atoms/mma.cuh"
#include "atoms/mma_fp8.cuh"
#include "atoms/mma_s8.cuh"
#include "atoms/numeric.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "atoms/warp.cuh"
#if QG_VARIANT == 90
#include "atoms/wgmma.cuh"
#include "atoms/wgmma_fp8.cuh"
#include "atoms/wgmma_fp8_shared.cuh"
#include "atoms/wgmma_s8_s8.cuh"
#endif

struct AtomProbe {
    u64 in;
    u64 out;
    u32 probe;
    u32 reserved;
};

// Other operands of a probe: the address of its words,
// and shared memory. A lane of a warp has 16 bytes;
// a warpgroup has the tiles of both operands.
struct Lane {
    u32 index;
    const u8* in;
    u8* shared;
};

// The last N words are the accumulators.
template <u32 N, u32 IN>
QG_DEVICE void take_accumulators(float (&d)[N], const u32 (&in)[IN]) {
    for (u32 i = 0; i < N; i++) d[i] = bits_to_f32(in[IN - N + i]);
}
template <u32 N, u32 IN>
QG_DEVICE void take_accumulators(i32 (&d)[N], const u32 (&in)[IN]) {
    for (u32 i = 0; i < N; i++) d[i] = (i32)in[IN - N + i];
}
template <u32 N>
QG_DEVICE void give(u32 (&out)[N], const float (&d)[N]) {
    for (u32 i = 0; i < N; i++) out[i] = f32_to_bits(d[i]);
}
template <u32 N>
QG_DEVICE void give(u32 (&out)[N], const i32 (&d)[N]) {
    for (u32 i = 0; i < N; i++) out[i] = (u32)d[i];
}

// Probe of a matrix instruction with A, B and D registers.
#define MMA_PROBE(atom, type, A, B, D, a, b)                                                    \
    QG_DEVICE void probe_##atom(const u32 (&in)[A + B + D], u32 (&out)[D], const Lane&) {       \
        type d[D];                                                                              \
        take_accumulators(d, in);                                                                       \
        atom(d, a, b);                                                                          \
        give(out, d);                                                                           \
    }
#define WORDS2(first) {in[first], in[first + 1]}
#define WORDS4(first) {in[first], in[first + 1], in[first + 2], in[first + 3]}

MMA_PROBE(mma_m8n8k4_f16, float, 2, 2, 8, WORDS2(0), WORDS2(2))

QG_DEVICE void probe_shfl_xor(const u32 (&in)[2], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_bits(shfl_xor(bits_to_f32(in[0]), in[1]));
}
QG_DEVICE void probe_shfl_xor_u32(const u32 (&in)[2], u32 (&out)[1], const Lane&) {
    out[0] = shfl_xor_u32(in[0], in[1]);
}
QG_DEVICE void probe_shfl_idx_u32(const u32 (&in)[2], u32 (&out)[1], const Lane&) {
    out[0] = shfl_idx_u32(in[0], in[1]);
}
QG_DEVICE void probe_match_any(const u32 (&in)[1], u32 (&out)[1], const Lane&) { out[0] = match_any(in[0]); }
QG_DEVICE void probe_ballot(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = ballot(in[0] % 2 != 0);
}

QG_DEVICE void probe_prmt(const u32 (&in)[3], u32 (&out)[1], const Lane&) { out[0] = prmt(in[0], in[1], in[2]); }
QG_DEVICE void probe_and_or(const u32 (&in)[3], u32 (&out)[1], const Lane&) { out[0] = and_or(in[0], in[1], in[2]); }
QG_DEVICE void probe_dp4a(const u32 (&in)[3], u32 (&out)[1], const Lane&) {
    out[0] = (u32)dp4a((i32)in[0], (i32)in[1], (i32)in[2]);
}
QG_DEVICE void probe_sub_f16x2(const u32 (&in)[2], u32 (&out)[1], const Lane&) { out[0] = sub_f16x2(in[0], in[1]); }
QG_DEVICE void probe_mul_f16x2(const u32 (&in)[2], u32 (&out)[1], const Lane&) { out[0] = mul_f16x2(in[0], in[1]); }
QG_DEVICE void probe_fma_f16x2(const u32 (&in)[3], u32 (&out)[1], const Lane&) {
    out[0] = fma_f16x2(in[0], in[1], in[2]);
}
QG_DEVICE void probe_f16_to_f32(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_bits(f16_to_f32(in[0] & 0xffffu));
}
QG_DEVICE void probe_f32_to_f16(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_f16(bits_to_f32(in[0]));
}
QG_DEVICE void probe_bf16_to_f32(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_bits(bf16_to_f32(in[0] & 0xffffu));
}
QG_DEVICE void probe_f32_to_bf16(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_bf16(bits_to_f32(in[0]));
}
QG_DEVICE void probe_e4m3_to_f32(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_bits(e4m3_to_f32(in[0] & 0xffu));
}

#if QG_VARIANT >= 75
MMA_PROBE(mma_m16n8k8_f16, float, 2, 1, 4, WORDS2(0), in[2])
MMA_PROBE(mma_m8n8k16_s8, i32, 1, 1, 2, in[0], in[1])

// Four words of each lane are a row in shared
// memory. The fifth is the index of the row whose
// address the lane passes.
QG_DEVICE const u8* share_rows(const u32 (&in)[5], const Lane& lane) {
    st_shared(reinterpret_cast<u32x4*>(lane.shared + lane.index * 16), u32x4{in[0], in[1], in[2], in[3]});
    cta_barrier();
    return lane.shared + in[4] * 16;
}
#define LDMATRIX_PROBE(atom, N)                                                             \
    QG_DEVICE void probe_##atom(const u32 (&in)[5], u32 (&out)[N], const Lane& lane) {      \
        atom(out, share_rows(in, lane));                                                    \
    }
LDMATRIX_PROBE(ldmatrix_x1, 1)
LDMATRIX_PROBE(ldmatrix_x2, 2)
LDMATRIX_PROBE(ldmatrix_x4, 4)
LDMATRIX_PROBE(ldmatrix_x1_trans, 1)
LDMATRIX_PROBE(ldmatrix_x2_trans, 2)
LDMATRIX_PROBE(ldmatrix_x4_trans, 4)
#endif

#if QG_VARIANT >= 80
MMA_PROBE(mma_m16n8k16_f16, float, 4, 2, 4, WORDS4(0), WORDS2(4))
MMA_PROBE(mma_m16n8k16_bf16, float, 4, 2, 4, WORDS4(0), WORDS2(4))
MMA_PROBE(mma_m16n8k8_tf32, float, 4, 2, 4, WORDS4(0), WORDS2(4))
MMA_PROBE(mma_m16n8k16_s8, i32, 2, 1, 4, WORDS2(0), in[2])
MMA_PROBE(mma_m16n8k32_s8, i32, 4, 2, 4, WORDS4(0), WORDS2(4))

QG_DEVICE void probe_redux_add(const u32 (&in)[1], u32 (&out)[1], const Lane&) { out[0] = redux_add(in[0]); }
QG_DEVICE void probe_redux_max_u32(const u32 (&in)[1], u32 (&out)[1], const Lane&) { out[0] = redux_max_u32(in[0]); }
QG_DEVICE void probe_f32_to_bf16x2(const u32 (&in)[2], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_bf16x2(bits_to_f32(in[0]), bits_to_f32(in[1]));
}

// The first word is the number of bytes, the last four
// the source. The destination is non-zero at first, so
// that zero fill shows.
#define CP_ASYNC_PROBE(atom, BYTES)                                                                        \
    QG_DEVICE void probe_##atom(const u32 (&in)[8], u32 (&out)[BYTES / 4], const Lane& lane) {             \
        u8* place = lane.shared + lane.index * 16;                                                         \
        st_shared(reinterpret_cast<u32x4*>(place), u32x4{~0u, ~0u, ~0u, ~0u});                             \
        cta_barrier();                                                                                   \
        atom(place, lane.in + 16, in[0]);                                                                  \
        cp_async_commit_group();                                                                           \
        cp_async_wait_group<0>();                                                                          \
        for (u32 i = 0; i < BYTES / 4; i++) out[i] = ld_shared(reinterpret_cast<const u32*>(place) + i);   \
    }
CP_ASYNC_PROBE(cp_async_4, 4)
CP_ASYNC_PROBE(cp_async_8, 8)
CP_ASYNC_PROBE(cp_async_16, 16)
#endif

#if QG_VARIANT >= 89
MMA_PROBE(mma_m16n8k32_e4m3, float, 4, 2, 4, WORDS4(0), WORDS2(4))
MMA_PROBE(mma_m16n8k32_e5m2, float, 4, 2, 4, WORDS4(0), WORDS2(4))
MMA_PROBE(mma_m16n8k32_e4m3_e5m2, float, 4, 2, 4, WORDS4(0), WORDS2(4))

QG_DEVICE void probe_cvt_f16x2_e4m3x2(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = cvt_f16x2_e4m3x2(in[0] & 0xffffu);
}
QG_DEVICE void probe_cvt_f16x2_e5m2x2(const u32 (&in)[1], u32 (&out)[1], const Lane&) {
    out[0] = cvt_f16x2_e5m2x2(in[0] & 0xffffu);
}
QG_DEVICE void probe_cvt_e4m3x2_f32(const u32 (&in)[2], u32 (&out)[1], const Lane&) {
    out[0] = cvt_e4m3x2_f32(bits_to_f32(in[0]), bits_to_f32(in[1]));
}
QG_DEVICE void probe_cvt_e5m2x2_f32(const u32 (&in)[2], u32 (&out)[1], const Lane&) {
    out[0] = cvt_e5m2x2_f32(bits_to_f32(in[0]), bits_to_f32(in[1]));
}
#endif

#if QG_VARIANT == 90
// Two instructions accumulate into the same registers.
// A lane has the first two and the last two of 32
// accumulators. B is 64 columns of 64 bytes;
// each instruction uses one half. A is the same for both.
// A lane provides half a column of B. If A is in shared
// memory, it also provides half of a 32-byte row.
constexpr u32 WGMMA_COLUMNS = 64, WGMMA_D = WGMMA_COLUMNS / 2;

QG_DEVICE u8* swizzle_aligned(const Lane& lane) {
    return reinterpret_cast<u8*>((reinterpret_cast<u64>(lane.shared) + 1023) / 1024 * 1024);
}
// Swizzled address of 16-byte chunk `chunk` in
// a row of `BYTES`.
template <u32 BYTES>
QG_DEVICE void st_swizzled(u8* tile, u32 row, u32 chunk, const u32* words) {
    const u32 place = BYTES == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
    st_shared(reinterpret_cast<u32x4*>(tile + row * BYTES + place * 16), u32x4{words[0], words[1], words[2], words[3]});
}
template <class Number, u32 IN>
QG_DEVICE void take_corners(Number (&d)[WGMMA_D], const u32 (&in)[IN]) {
    Number corners[4];
    take_accumulators(corners, in);
    for (u32 i = 0; i < WGMMA_D; i++) d[i] = 0;
    d[0] = corners[0], d[1] = corners[1], d[WGMMA_D - 2] = corners[2], d[WGMMA_D - 1] = corners[3];
}
template <class Number>
QG_DEVICE void give_corners(u32 (&out)[4], const Number (&d)[WGMMA_D]) {
    const Number corners[4] = {d[0], d[1], d[WGMMA_D - 2], d[WGMMA_D - 1]};
    give(out, corners);
}

#define WGMMA_PROBE(probe, type, BYTES, atom)                                                              \
    QG_DEVICE void probe_##probe(const u32 (&in)[16], u32 (&out)[4], const Lane& lane) {                   \
        u8* b = swizzle_aligned(lane);                                                                     \
        for (u32 i = 0; i < 2; i++)                                                                        \
            st_swizzled<BYTES>(b, lane.index / 2, lane.index % 2 * 2 + i, &in[4 + i * 4]);                 \
        u32 a[4] = WORDS4(0);                                                                              \
        type d[WGMMA_D];                                                                                   \
        take_corners(d, in);                                                                               \
        fence_proxy_async();                                                                               \
        cta_barrier();                                                                                     \
        wgmma_fence_accumulators(d);                                                                       \
        wgmma_fence();                                                                                     \
        atom(d, a, wgmma_descriptor_##BYTES##b(b));                                                        \
        atom(d, a, wgmma_descriptor_##BYTES##b(b + 32));                                                   \
        wgmma_commit_group();                                                                              \
        wgmma_wait_group<0>();                                                                             \
        wgmma_fence_accumulators(d);                                                                       \
        give_corners(out, d);                                                                              \
    }
WGMMA_PROBE(wgmma_k16_f16, float, 128, wgmma_k16_f16<WGMMA_COLUMNS>)
WGMMA_PROBE(wgmma_k16_bf16, float, 128, wgmma_k16_bf16<WGMMA_COLUMNS>)
WGMMA_PROBE(wgmma_k32_e4m3_e4m3, float, 64, (wgmma_k32_e4m3_e4m3<WGMMA_COLUMNS, 1>))
WGMMA_PROBE(wgmma_k32_e4m3_e5m2, float, 64, (wgmma_k32_e4m3_e5m2<WGMMA_COLUMNS, 1>))
WGMMA_PROBE(wgmma_k32_s8_u8, i32, 64, (wgmma_k32_s8_u8<WGMMA_COLUMNS, 1>))
WGMMA_PROBE(wgmma_k32_s8_s8, i32, 64, (wgmma_k32_s8_s8<WGMMA_COLUMNS, 1>))

QG_DEVICE void probe_wgmma_shared_k32_e4m3(const u32 (&in)[16], u32 (&out)[4], const Lane& lane) {
    u8* b = swizzle_aligned(lane);
    u8* a = b + WGMMA_COLUMNS * 128;
    st_swizzled<128>(a, lane.index / 2, lane.index % 2, &in[0]);
    for (u32 i = 0; i < 2; i++) st_swizzled<128>(b, lane.index / 2, lane.index % 2 * 2 + i, &in[4 + i * 4]);
    float d[WGMMA_D];
    take_corners(d, in);
    fence_proxy_async();
    cta_barrier();
    wgmma_fence_accumulators(d);
    wgmma_fence();
    for (u32 step = 0; step < 2; step++)
        wgmma_shared_k32_e4m3<WGMMA_COLUMNS, 1>(d, wgmma_descriptor_128b(a), wgmma_descriptor_128b(b + step * 32));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(d);
    give_corners(out, d);
}
#endif

template <u32 IN, u32 OUT, void (*RUN)(const u32 (&)[IN], u32 (&)[OUT], const Lane&)>
QG_DEVICE void run_probe(const AtomProbe& p) {
    const u32 lane = thread_index();
    const u64 index = (u64)cta_index().x * QG_LANES + lane;
    const u8* from = reinterpret_cast<const u8*>(p.in) + index * (IN * 4);
    u8* to = reinterpret_cast<u8*>(p.out) + index * (OUT * 4);
    u32 in[IN], out[OUT];
    for (u32 i = 0; i < IN; i++) in[i] = ld_global_u32(from + i * 4);
    RUN(in, out, Lane{lane, from, dynamic_shared()});
    for (u32 i = 0; i < OUT; i++) st_global_u32(to + i * 4, out[i]);
}

extern "C" __global__ void __launch_bounds__(QG_LANES) atom_probe(const __grid_constant__ AtomProbe p) {
    switch (p.probe) {
#define PROBE(number, words_in, words_out, name)              \
    case number:                                              \
        run_probe<words_in, words_out, probe_##name>(p);      \
        break;
        QG_PROBES(PROBE)
    }
}
