// Optimizer step (SGD, momentum, AdamW): a thread updates eight
// adjacent parameters with all loads in flight. Arithmetic is
// f32; the low-precision copy is rounded to nearest even.
#include "atoms/float.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "atoms/sync.cuh"
#include "generated/abi.cuh"

struct OptimizerParams {
    OptimizerShape shape;
    OptimizerPointers at;
};

constexpr u32 RULE_ADAMW = 0, RULE_SGD = 1, RULE_MOMENTUM = 2;
constexpr u32 GROUP = 8;

// Eight adjacent f32 values; `count` of them exist.
struct Values {
    float v[GROUP];

    QG_DEVICE Values load(u64 address, u64 first, u32 count, bool whole) {
        const u8* at = reinterpret_cast<const u8*>(address) + first * 4;
        Values values = {};
        if (whole) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i += 4) {
                const u32x4 four = ld_global_v4(at + i * 4);
                values.v[i] = bits_to_f32(four.x), values.v[i + 1] = bits_to_f32(four.y);
                values.v[i + 2] = bits_to_f32(four.z), values.v[i + 3] = bits_to_f32(four.w);
            }
            return values;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (i < count) values.v[i] = bits_to_f32(ld_global_u32(at + i * 4));
        return values;
    }

    // For a run-time element type.
    QG_DEVICE Values load_as(u32 dtype, u64 address, u64 first, u32 count, bool whole) {
        if (dtype == DTYPE_F32) return load(address, first, count, whole);
        const u8* at = reinterpret_cast<const u8*>(address) + first * 2;
        u32 word[GROUP / 2] = {};
        if (whole) {
            const u32x4 all = ld_global_v4(at);
            word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
        } else {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++)
                if (i < count) word[i / 2] |= ld_global_cached_u16(at + i * 2) << (16 * (i % 2));
        }
        Values values;
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const u32 bits = word[i / 2] >> (16 * (i % 2)) & 0xffffu;
            values.v[i] = dtype == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
        }
        return values;
    }

    QG_DEVICE void store(const Values& values, u64 address, u64 first, u32 count, bool whole) {
        u8* at = reinterpret_cast<u8*>(address) + first * 4;
        if (whole) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i += 4)
                st_global_v4(at + i * 4, u32x4{f32_to_bits(values.v[i]), f32_to_bits(values.v[i + 1]),
                                               f32_to_bits(values.v[i + 2]), f32_to_bits(values.v[i + 3])});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (i < count) st_global_u32(at + i * 4, f32_to_bits(values.v[i]));
    }

    QG_DEVICE void store_half(const Values& values, u32 dtype, u64 address, u64 first, u32 count, bool whole) {
        u8* at = reinterpret_cast<u8*>(address) + first * 2;
        u32 word[GROUP / 2] = {};
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const u32 bits = dtype == DTYPE_F16 ? f32_to_f16(values.v[i]) : f32_to_bf16(values.v[i]);
            word[i / 2] |= bits << (16 * (i % 2));
        }
        if (whole) {
            st_global_v4(at, u32x4{word[0], word[1], word[2], word[3]});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (i < count) st_global_u16(at + i * 2, word[i / 2] >> (16 * (i % 2)) & 0xffffu);
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_optimizer(const __grid_constant__ OptimizerParams p) {
    const u64 first = ((u64)cta_index().x * QG_THREADS + thread_index()) * GROUP;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (first >= p.at.len) return;
    const u64 left = p.at.len - first;
    const u32 count = left < GROUP ? (u32)left : GROUP;
    const bool whole = (p.shape.flags & QG_FLAG_ALIGNED16) && count == GROUP;

    Values weight = Values::load(p.at.weights, first, count, whole);
    Values moment1 = {}, moment2 = {};
    if constexpr (QG_RULE != RULE_SGD) moment1 = Values::load(p.at.moment1, first, count, whole);
    if constexpr (QG_RULE == RULE_ADAMW) moment2 = Values::load(p.at.moment2, first, count, whole);
    const Values gradient = Values::load_as(p.shape.gradient, p.at.gradient, first, count, whole);
    const Values step = Values::load(p.at.step, 0, 4, false);
    const float size = step.v[0], inverse_root_bias = step.v[1], decay = step.v[2], scale = step.v[3];
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        const float g = gradient.v[i] * scale;
        float update = g;
        if constexpr (QG_RULE != RULE_SGD) {
            moment1.v[i] = fma_f32(p.shape.decay1, moment1.v[i], p.shape.gain1 * g);
            update = moment1.v[i];
        }
        if constexpr (QG_RULE == RULE_ADAMW) {
            moment2.v[i] = fma_f32(p.shape.decay2, moment2.v[i], p.shape.gain2 * (g * g));
            update = update / (sqrt_f32(moment2.v[i]) * inverse_root_bias + p.shape.eps);
        }
        weight.v[i] -= fma_f32(size, update, decay * weight.v[i]);
    }
    Values::store(weight, p.at.weights, first, count, whole);
    if constexpr (QG_RULE != RULE_SGD) Values::store(moment1, p.at.moment1, first, count, whole);
    if constexpr (QG_RULE == RULE_ADAMW) Values::store(moment2, p.at.moment2, first, count, whole);
    if (p.shape.flags & QG_FLAG_COPY) Values::store_half(weight, p.shape.copy, p.at.copy, first, count, whole);
}
