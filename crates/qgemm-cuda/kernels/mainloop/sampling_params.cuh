// Kernel parameters of sampling, and those of a row.
#pragma once
#include "atoms/memory.cuh"
#include "generated/abi.cuh"
#include "mainloop/sampling_arithmetic.cuh"

struct SamplingParams {
    SamplingShape shape;
    SamplingPointers at;
};

constexpr u32 NO_TOKEN = 0xffffffffu;
constexpr u32 PARAMETER_WORDS = 10;
constexpr u32 STATUS_FINE = 0, STATUS_NON_FINITE = 1, STATUS_NO_CANDIDATE = 2, STATUS_PARAMETER = 3;
// Index of a valid row's refused parameter.
constexpr u32 NONE_REFUSED = 4;

// Address of word `index`.
QG_DEVICE u8* word_at(u64 address, u64 index) {
    return reinterpret_cast<u8*>(address) + index * 4;
}

// Sampling parameters of a row.
struct RowParameters {
    float temperature;
    u32 top_k;
    float top_p, min_p, repetition_penalty;
    u32 seed[2], position[2];

    QG_DEVICE RowParameters of(const SamplingParams& p, u32 row) {
        u32 words[PARAMETER_WORDS];
#pragma unroll
        for (u32 i = 0; i < PARAMETER_WORDS; i++) words[i] = ld_global_u32(word_at(p.at.parameters, (u64)row * PARAMETER_WORDS + i));
        return {bits_to_f32(words[0]), words[1], bits_to_f32(words[2]), bits_to_f32(words[3]), bits_to_f32(words[4]),
                {words[6], words[7]}, {words[8], words[9]}};
    }

    // Index and bits of the first invalid parameter.
    __device__ __forceinline__ u32 refused(u32& bits) const {
        const auto is_share = [](float value) { return value >= 0.0f && value <= 1.0f; };
        const float values[4] = {temperature, top_p, min_p, repetition_penalty};
        const bool valid[4] = {temperature >= 0.0f && temperature <= LARGEST, is_share(top_p), is_share(min_p),
                               repetition_penalty > 0.0f && repetition_penalty <= LARGEST};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (valid[i]) continue;
            bits = f32_to_bits(values[i]);
            return i;
        }
        return NONE_REFUSED;
    }

    // Whether the best token is chosen without a draw.
    __device__ __forceinline__ bool is_argmax() const { return temperature < SMALLEST_NORMAL || top_k == 1 || top_p == 0.0f; }
};
