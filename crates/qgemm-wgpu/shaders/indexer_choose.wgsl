// Sparse-attention indexer: top-k keys of a query, sorted by
// score; one workgroup per query. Radix select: histograms
// of eight score bits at a time find the k-th score. Keys
// above it, and the first keys equal to it, are sorted.

@group(0) @binding(0) var<storage, read> scores: array<u32>;
@group(0) @binding(1) var<storage, read> starts: array<u32>;  // or lengths
@group(0) @binding(2) var<storage, read> ends: array<u32>;  // or the block table
@group(0) @binding(3) var<storage, read_write> indices: array<u32>;

const MOST_CHOSEN: u32 = 2048u;
const BINS: u32 = 256u;
const NO_KEY: u32 = 0xffffffffu;

var<workgroup> sorted: array<u32, MOST_CHOSEN>;
var<workgroup> bins: array<atomic<u32>, BINS>;
var<workgroup> of_threads: array<u32, THREADS>;
// Radix-select state: bits of the bound,
// and the number of keys above it.
var<workgroup> found: vec2<u32>;
var<workgroup> gathered: atomic<u32>;

// Order-preserving bits of a score. Both
// zeros are equal; NaN is 1, no score is 0.
fn ordered(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    if (bits == NO_KEY) {
        return 0u;
    }
    if (magnitude > 0x7f800000u) {
        return 1u;
    }
    if (magnitude == 0u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, bits > 0x7fffffffu);
}

fn score_of(row: u32, key: u32) -> u32 {
    return ordered(scores[row + key]);
}

// Sort order: whether key `a` precedes key `b`.
fn is_before(row: u32, a: u32, b: u32) -> bool {
    if (a == NO_KEY || b == NO_KEY) {
        return b == NO_KEY && a != NO_KEY;
    }
    let of_a = score_of(row, a);
    let of_b = score_of(row, b);
    return of_a > of_b || (of_a == of_b && a < b);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let local_query = group.x + group.y * groups.x;
    if (local_query >= p.part_queries) {
        return;
    }
    let visible = visible_range(p.first_query + local_query);
    let row = p.scores_base + local_query * p.scores_row;
    if (thread == 0u) {
        found = vec2<u32>(0u);
        atomicStore(&gathered, 0u);
    }
    for (var i = thread; i < MOST_CHOSEN; i += THREADS) {
        sorted[i] = NO_KEY;
    }
    for (var pass_index = 0u; pass_index < 4u; pass_index++) {
        let shift = 24u - pass_index * 8u;
        workgroupBarrier();
        for (var i = thread; i < BINS; i += THREADS) {
            atomicStore(&bins[i], 0u);
        }
        let bound = workgroupUniformLoad(&found);
        for (var key = visible.x + thread; key < visible.y; key += THREADS) {
            let score = score_of(row, key);
            // Two shifts: a shift by 32 is undefined.
            if (score != 0u && ((score >> shift) >> 8u) == bound.x) {
                atomicAdd(&bins[(score >> shift) & 0xffu], 1u);
            }
        }
        workgroupBarrier();
        if (thread == 0u) {
            var above = bound.y;
            var bin = BINS - 1u;
            while (bin > 0u && above + atomicLoad(&bins[bin]) < p.chosen) {
                above += atomicLoad(&bins[bin]);
                bin -= 1u;
            }
            found = vec2<u32>((bound.x << 8u) | bin, above);
        }
    }
    let bound = workgroupUniformLoad(&found);
    // Each invocation counts scores equal
    // to the bound in its part of the keys.
    let part = (visible.y - visible.x + THREADS - 1u) / THREADS;
    let first = min(visible.x + thread * part, visible.y);
    let last = min(first + part, visible.y);
    var count = 0u;
    for (var key = first; key < last; key++) {
        let score = score_of(row, key);
        if (score != 0u && score == bound.x) {
            count += 1u;
        }
        if (score > bound.x) {
            sorted[atomicAdd(&gathered, 1u)] = key;
        }
    }
    of_threads[thread] = count;
    workgroupBarrier();
    var place = bound.y;
    for (var i = 0u; i < thread; i++) {
        place += of_threads[i];
    }
    for (var key = first; key < last && place < p.chosen; key++) {
        let score = score_of(row, key);
        if (score != 0u && score == bound.x) {
            sorted[place] = key;
            place += 1u;
        }
    }
    workgroupBarrier();
    // Bitonic sort over the next power of two.
    var size = 2u;
    while (size < p.chosen) {
        size *= 2u;
    }
    for (var run = 2u; run <= size; run *= 2u) {
        for (var distance = run / 2u; distance > 0u; distance /= 2u) {
            for (var pair = thread; pair < size / 2u; pair += THREADS) {
                let low = pair / distance * distance * 2u + pair % distance;
                let a = sorted[low];
                let b = sorted[low + distance];
                let falls = (low & run) == 0u;
                if (is_before(row, b, a) == falls && a != b) {
                    sorted[low] = b;
                    sorted[low + distance] = a;
                }
            }
            workgroupBarrier();
        }
    }
    for (var i = thread; i < p.chosen; i += THREADS) {
        indices[p.indices_base + (p.first_query + local_query) * p.chosen + i] = sorted[i];
    }
}
