// Sums and maximums over the invocations of a workgroup.

var<workgroup> sums_low: array<u32, THREADS>;
var<workgroup> sums_high: array<u32, THREADS>;

// Sum over this invocation and those before it.
// The last one's is the sum of all.
fn prefix_of(own: vec2<u32>, thread: u32) -> vec2<u32> {
    workgroupBarrier();
    sums_low[thread] = own.x;
    sums_high[thread] = own.y;
    workgroupBarrier();
    for (var distance = 1u; distance < THREADS; distance *= 2u) {
        var before = vec2<u32>(0u);
        if (thread >= distance) {
            before = vec2<u32>(sums_low[thread - distance], sums_high[thread - distance]);
        }
        workgroupBarrier();
        let through = sum64(before, vec2<u32>(sums_low[thread], sums_high[thread]));
        sums_low[thread] = through.x;
        sums_high[thread] = through.y;
        workgroupBarrier();
    }
    return vec2<u32>(sums_low[thread], sums_high[thread]);
}

fn total_of_all() -> vec2<u32> {
    return vec2<u32>(sums_low[THREADS - 1u], sums_high[THREADS - 1u]);
}

// The most likely token of all invocations: largest order,
// then lowest id. The result is in the first sums.
fn find_best(order: u32, id: u32, thread: u32) {
    workgroupBarrier();
    sums_high[thread] = order;
    sums_low[thread] = id;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread < half) {
            let other = sums_high[thread + half];
            let other_id = sums_low[thread + half];
            if (other > sums_high[thread] || (other == sums_high[thread] && other_id < sums_low[thread])) {
                sums_high[thread] = other;
                sums_low[thread] = other_id;
            }
        }
    }
    workgroupBarrier();
}
