// One-shot all-reduce over peer memory, for messages
// that latency bounds.
// Every rank writes its message to all others.
// It waits for theirs, and adds all in f32.
// The order is that of ranks: bits are the same on all.
//
// A thread has a packet: two words of the message.
// Beside each word is the number of the call.
// A word is there when its number is: no fence, no barrier.
//
// Packets have two slots, for even and odd calls.
// A rank sends call i + 1 when its call i has ended.
// Then all others have sent call i, and read call i - 1.
//
// Calls are counted in device memory.
// So a CUDA graph can be replayed.
// All threads of a grid must be resident at once: each
// waits for its counterparts.
#include "atoms/launch.cuh"
#include "atoms/peer.cuh"
#include "atoms/sync.cuh"
#include "epilogue/operands.cuh"

constexpr u32 MOST_RANKS = 8;

// `OneShotParams` in families/one_shot.rs.
struct OneShotParams {
    u64 d;
    u64 count;                // Elements of D.
    u64 slots[MOST_RANKS];    // Of each rank: [2, ranks, packets].
    u64 calls;                // Of this rank: calls of each packet.
    u64 failed;               // Of this rank: a silent rank plus one, else 0.
    u64 host;                 // Two words in host memory: stop, failed.
    u64 limit;                // Longest wait in nanoseconds.
    u32 dtype;
    u32 rank, ranks;
    u32 packets; // Of a slot.
};

// Polls between looks at the clock, and nanoseconds
// between looks at the host's word, which is far away.
constexpr u32 POLLS = 64;
constexpr u64 HOST_INTERVAL = 1000000;
// Words of the host.
constexpr u32 HOST_STOP = 0, HOST_FAILED = 4;
// `failed` where the host asked to stop.
constexpr u32 STOPPED = ~0u;

struct Message {
    u32 low, high;
};

// First element of a packet, its number of elements, and
// whether all are loaded as two words.
struct Elements {
    u64 first;
    u32 count;
    bool by_words;
};

QG_DEVICE u32 load_half(const OneShotParams& p, const Elements& own, u32 i) {
    if (i >= own.count) return 0;
    return ld_global_cached_u16(reinterpret_cast<const u8*>(p.d) + (own.first + i) * 2);
}

QG_DEVICE Message load_message(const OneShotParams& p, const Elements& own) {
    const u8* address = reinterpret_cast<const u8*>(p.d) + own.first * dense_bytes(p.dtype);
    if (p.dtype == DTYPE_F32) return {ld_global_u32(address), own.count > 1 ? ld_global_u32(address + 4) : 0};
    if (own.by_words) return {ld_global_u32(address), ld_global_u32(address + 4)};
    return {load_half(p, own, 0) | load_half(p, own, 1) << 16, load_half(p, own, 2) | load_half(p, own, 3) << 16};
}

QG_DEVICE void store_sum(const OneShotParams& p, const Elements& own, const float (&sum)[4]) {
    if (p.dtype != DTYPE_F32 && own.by_words) {
        u8* address = reinterpret_cast<u8*>(p.d) + own.first * 2;
        st_global_u32(address, f32_to_half(p.dtype, sum[0]) | f32_to_half(p.dtype, sum[1]) << 16);
        st_global_u32(address + 4, f32_to_half(p.dtype, sum[2]) | f32_to_half(p.dtype, sum[3]) << 16);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (i < own.count) store_dense(p.dtype, p.d, own.first + i, sum[i]);
}

// Element `i` of a message.
QG_DEVICE float element(const OneShotParams& p, const Message& message, u32 i) {
    if (p.dtype == DTYPE_F32) return bits_to_f32(i == 0 ? message.low : message.high);
    const u32 word = i < 2 ? message.low : message.high;
    return half_to_f32(p.dtype, i % 2 == 0 ? word & 0xffffu : word >> 16);
}

// Packet `index` from rank `from` in the memory of rank `of`.
QG_DEVICE u64 slot(const OneShotParams& p, u64 of, u32 call, u32 from, u32 index) {
    return of + ((u64)((call % 2) * p.ranks + from) * p.packets + index) * 16;
}

// Messages of all other ranks. Returns 0, or `failed`.
QG_DEVICE u32 receive(Message (&messages)[MOST_RANKS], const OneShotParams& p, u32 call, u32 index) {
    const u64 own = p.slots[p.rank];
    u64 start = 0, host = 0;
    for (u32 polls = 1;; polls++) {
        u32 missing = 0;
#pragma unroll
        for (u32 r = 0; r < MOST_RANKS; r++) {
            if (r >= p.ranks || r == p.rank) continue;
            const u32pairs packet = ld_sys_pairs(slot(p, own, call, r, index));
            messages[r] = {packet.low.x, packet.high.x};
            if (packet.low.y != call || packet.high.y != call) missing = r + 1;
        }
        if (missing == 0) return 0;
        if (polls % POLLS != 0) continue;
        const u64 now = global_nanoseconds();
        if (start == 0) start = now, host = now;
        if (now - start > p.limit) return missing;
        if (now - host < HOST_INTERVAL) continue;
        if (ld_sys_u32(p.host + HOST_STOP) != 0) return STOPPED;
        host = now;
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 2)
    qg_all_reduce_one_shot(const __grid_constant__ OneShotParams p) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 index = cta_index().x * QG_THREADS + thread_index(), width = p.dtype == DTYPE_F32 ? 2 : 4;
    const u64 first = (u64)index * width;
    if (first >= p.count) return;
    const u32 count = p.count - first < width ? (u32)(p.count - first) : width;
    const Elements elements = {first, count, count == width && p.d % 4 == 0};
    const Message own = load_message(p, elements);
    u8* calls = reinterpret_cast<u8*>(p.calls) + (u64)index * 4;
    const u32 call = ld_global_u32(calls) + 1;
    // Whoever lost a rank waits for no other.
    if (ld_sys_u32(p.failed) != 0) return;
#pragma unroll
    for (u32 r = 0; r < MOST_RANKS; r++)
        if (r < p.ranks && r != p.rank)
            st_sys_pairs(slot(p, p.slots[r], call, p.rank, index), {{own.low, call}, {own.high, call}});
    st_global_u32(calls, call);
    Message messages[MOST_RANKS];
    const u32 failed = receive(messages, p, call, index);
    if (failed != 0) {
        st_sys_u32(p.failed, failed);
        if (failed != STOPPED) st_sys_u32(p.host + HOST_FAILED, failed);
        return;
    }
    float sum[4];
#pragma unroll
    for (u32 r = 0; r < MOST_RANKS; r++) {
        if (r >= p.ranks) continue;
        const Message message = r == p.rank ? own : messages[r];
#pragma unroll
        for (u32 i = 0; i < 4; i++) sum[i] = r == 0 ? element(p, message, i) : sum[i] + element(p, message, i);
    }
    store_sum(p, elements, sum);
}
