// Kernel parameter of the fault tests: 64 input words, 64 results, partial
// accumulators, and a zero counter.
#include "atoms/types.cuh"

struct Params {
    const u8* in;
    u8* out;
    u8* partials;
    u32* counter;
};
