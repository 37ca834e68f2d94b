// Runs one atom on registers from memory: lane l of CTA c takes words [32c + l][…], and writes what the atom yields to
// the same place of the results. The prelude lists the probes: QG_PROBES(number, words in, words out, name).
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
#include "atoms/warp.cuh"

struct AtomProbe {
    u64 in;
    u64 out;
    u32 probe;
    u32 reserved;
};

// What a probe may need beside its words: their address, and 16 bytes of shared memory for each lane.
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

// A probe of a matrix instruction whose A, B and D have as many registers as it says.
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

// Four words of each lane are a row in shared memory. The fifth word is the number of the row whose address the lane
// gives.
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
MMA_PROBE(mma_m16n8k16_s8, i32, 2, 1, 4, WORDS2(0), in[2])
MMA_PROBE(mma_m16n8k32_s8, i32, 4, 2, 4, WORDS4(0), WORDS2(4))

QG_DEVICE void probe_redux_add(const u32 (&in)[1], u32 (&out)[1], const Lane&) { out[0] = redux_add(in[0]); }
QG_DEVICE void probe_redux_max_u32(const u32 (&in)[1], u32 (&out)[1], const Lane&) { out[0] = redux_max_u32(in[0]); }
QG_DEVICE void probe_f32_to_bf16x2(const u32 (&in)[2], u32 (&out)[1], const Lane&) {
    out[0] = f32_to_bf16x2(bits_to_f32(in[0]), bits_to_f32(in[1]));
}

// The first word is the number of bytes to copy; the last four are the source. The destination is not zero before, so
// that zero-filling shows.
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

template <u32 IN, u32 OUT, void (*RUN)(const u32 (&)[IN], u32 (&)[OUT], const Lane&)>
QG_DEVICE void run_probe(const AtomProbe& p) {
    const u32 lane = thread_index();
    const u64 index = (u64)cta_index().x * 32 + lane;
    const u8* from = reinterpret_cast<const u8*>(p.in) + index * (IN * 4);
    u8* to = reinterpret_cast<u8*>(p.out) + index * (OUT * 4);
    u32 in[IN], out[OUT];
    for (u32 i = 0; i < IN; i++) in[i] = ld_global_u32(from + i * 4);
    RUN(in, out, Lane{lane, from, dynamic_shared()});
    for (u32 i = 0; i < OUT; i++) st_global_u32(to + i * 4, out[i]);
}

extern "C" __global__ void __launch_bounds__(32) atom_probe(const __grid_constant__ AtomProbe p) {
    switch (p.probe) {
#define PROBE(number, words_in, words_out, name)              \
    case number:                                              \
        run_probe<words_in, words_out, probe_##name>(p);      \
        break;
        QG_PROBES(PROBE)
    }
}
