// Rotary embedding: angles of a token's position, in shared
// memory, and their rotation of a lane's eight features.
#pragma once
#include "atoms/bits.cuh"
#include "atoms/opaque_register.cuh"
#include "attention/problem.cuh"

// Cosine and sine of an angle in units of 2^-64 turns. Rounds to
// 2^-32 turns and subtracts the nearest quarter turn; polynomials
// for the rest, at most an eighth of a turn, within 2^-24.
QG_DEVICE void cos_sin(u64 turns, float& cosine, float& sine) {
    const u32 nearest = (u32)((turns + (1ull << 31)) >> 32);
    const u32 quarter = (nearest + (1u << 29)) >> 30;
    const float x = (float)(i32)(nearest - (quarter << 30)) * 1.46291807926715968e-9f, square = x * x;
    float s = fma_f32(square, 2.75573192e-6f, -1.98412698e-4f);
    s = fma_f32(square, s, 8.33333333e-3f);
    s = fma_f32(square, s, -1.66666667e-1f);
    s = fma_f32(square * x, s, x);
    float c = fma_f32(square, -2.75573192e-7f, 2.48015873e-5f);
    c = fma_f32(square, c, -1.38888889e-3f);
    c = fma_f32(square, c, 4.16666667e-2f);
    c = fma_f32(square, c, -0.5f);
    c = fma_f32(square, c, 1.0f);
    const float swapped_c = quarter & 1u ? s : c, swapped_s = quarter & 1u ? c : s;
    cosine = (quarter + 1) & 2u ? -swapped_c : swapped_c;
    sine = quarter & 2u ? -swapped_s : swapped_s;
}

// Cosine and sine of each rotary pair, times the
// amplitude. A head has at most 256 features.
struct Turns {
    float cosine[128], sine[128];
};
// Frequency of the thread's pair. The load overlaps
// with the lookup of the token's position.
QG_DEVICE u64 frequency_of_thread(const KvAppendPointers& at) {
    const u32 pair = thread_index();
    if (!at.frequencies || pair >= at.rotary_dim / 2) return 0;
    return (u64)index_at(at.frequencies, 2 * pair + 1) << 32 | index_at(at.frequencies, 2 * pair);
}

// Computes one pair per thread.
QG_DEVICE void write_turns(const KvAppendPointers& at, u32 position, u64 frequency, Turns& turns) {
    const u32 pair = thread_index();
    if (pair >= at.rotary_dim / 2) return;
    float cosine, sine;
    if (at.frequencies) {
        cos_sin(frequency * position, cosine, sine);
    } else {
        const u64 row = position * at.table_row;
        cosine = bits_to_f32(index_at(at.cos, row + pair));
        sine = bits_to_f32(index_at(at.sin, row + pair));
    }
    st_shared(&turns.cosine[pair], cosine * at.amplitude);
    st_shared(&turns.sine[pair], sine * at.sine_amplitude);
}

// Rotation factors of a lane's features and of their partners.
struct Angles {
    float own[8], partner[8];

    // `whole`: the eight features belong to eight
    // pairs, and the first pair is a multiple of eight.
    QG_DEVICE Angles of(const Turns& turns, const KvAppendPointers& at, u32 column, bool whole) {
        Angles angles;
        const u32 half = at.rotary_dim / 2;
        if (whole && column < at.rotary_dim) {
            const bool is_second = column >= half;
            const u32 pair = is_second ? column - half : column;
#pragma unroll
            for (u32 i = 0; i < 8; i += 4) {
                const u32x4 c = ld_shared(reinterpret_cast<const u32x4*>(&turns.cosine[pair + i]));
                const u32x4 s = ld_shared(reinterpret_cast<const u32x4*>(&turns.sine[pair + i]));
                const u32 cosines[4] = {c.x, c.y, c.z, c.w}, sines[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    angles.own[i + j] = bits_to_f32(cosines[j]);
                    angles.partner[i + j] = is_second ? bits_to_f32(sines[j]) : -bits_to_f32(sines[j]);
                }
            }
            return angles;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            angles.own[i] = 1.0f, angles.partner[i] = 0.0f;
            const u32 feature = column + i;
            if (feature >= at.rotary_dim) continue;
            const bool is_second = at.interleaved ? feature & 1u : feature >= half;
            const u32 pair = at.interleaved ? feature / 2 : is_second ? feature - half : feature;
            const float sine = ld_shared(&turns.sine[pair]);
            angles.own[i] = ld_shared(&turns.cosine[pair]);
            angles.partner[i] = is_second ? sine : -sine;
        }
        return angles;
    }
};

// Partners of eight features from the lanes of a head,
// for any rotary dimension. Warp-collective.
QG_DEVICE void partners_of(const float (&x)[8], const KvAppendPointers& at, u32 column, float (&partners)[8]) {
    // Opaque: the compiler would keep 64 comparisons in
    // registers from one head to the next.
    const u32 first = opaque_register(column), half = at.rotary_dim / 2, first_lane = thread_index() % 32 - first / 8;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const u32 feature = first + i, pair = feature < half ? feature + half : feature - half;
        const u32 partner = at.interleaved ? feature ^ 1u : pair;
        partners[i] = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            const u32 bits = shfl_idx_u32(f32_to_bits(x[j]), first_lane + partner / 8);
            if (feature < at.rotary_dim && partner % 8 == j) partners[i] = bits_to_f32(bits);
        }
    }
}
