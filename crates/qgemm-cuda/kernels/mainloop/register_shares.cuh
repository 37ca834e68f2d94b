// How the registers of a multiprocessor are shared out between a CTA's consumers and its producers, the last warpgroup.
#pragma once
#include "atoms/registers.cuh"

// Threads that produce keep PRODUCER registers and give the others to those that consume. CTAS are on a multiprocessor at once.
template <u32 PRODUCER, u32 CTAS = 1>
struct RegisterShares {
    // What the CTA is launched with: as many as a thread may have then, in eights. Consumers that asked for more than all of them together
    // would wait forever.
    static constexpr u32 START = 65536 / CTAS / QG_THREADS / 8 * 8;
    static constexpr u32 CONSUMER = (START * QG_THREADS - PRODUCER * 128) / (QG_THREADS - 128) / 8 * 8;
    // In small CTAs, threads start with as many registers as a thread can have.
    static constexpr bool PASS = START < 248;

    // By all warps of a warpgroup of consumers.
    QG_DEVICE void take() {
        if constexpr (PASS) setmaxnreg_inc<CONSUMER>();
    }
    // By all warps of the producers.
    QG_DEVICE void give() {
        if constexpr (PASS) setmaxnreg_dec<PRODUCER>();
    }
};
