// Reduction of peers' partial sums in order of their K ranges.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void add_to(f32x2& sum, const f32x2& v) {
    sum.x += v.x, sum.y += v.y;
}
QG_DEVICE void add_to(f32x4& sum, const f32x4& v) {
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

// Adds the sums of all peers.
// `load(peer, i)` gives sums[i] of a peer.
// Loads of AT_ONCE peers overlap their latencies.
template <u32 AT_ONCE, u32 COUNT, class V, class Load>
QG_DEVICE void add_peers(V (&sums)[COUNT], u32 peers, Load load) {
#pragma unroll 1
    for (u32 first = 0; first < peers; first += AT_ONCE) {
        V theirs[AT_ONCE][COUNT] = {};
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (u32 i = 0; i < COUNT; i++)
                if (AT_ONCE == 1 || first + j < peers) theirs[j][i] = load(first + j, i);
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) add_to(sums[i], theirs[j][i]);
    }
}
