// setmaxnreg: register split between consumers and the
// producer warpgroup, which is last.
#pragma once
#include "atoms/registers.cuh"

// Producer threads keep PRODUCER registers,
// consumers get the rest.
// CTAS is the number of resident CTAs per SM.
template <u32 PRODUCER, u32 CTAS = 1>
struct RegisterShares {
    // Registers per thread at launch, a multiple of 8.
    // A larger total for consumers would make them wait forever.
    static constexpr u32 START = 65536 / CTAS / QG_THREADS / 8 * 8;
    static constexpr u32 CONSUMER = (START * QG_THREADS - PRODUCER * 128) / (QG_THREADS - 128) / 8 * 8;
    // Small CTAs start with the maximum per thread.
    static constexpr bool PASS = START < 248;

    // All warps of a consumer warpgroup call it.
    QG_DEVICE void take() {
        if constexpr (PASS) setmaxnreg_inc<CONSUMER>();
    }
    // All producer warps call it.
    QG_DEVICE void give() {
        if constexpr (PASS) setmaxnreg_dec<PRODUCER>();
    }
};
