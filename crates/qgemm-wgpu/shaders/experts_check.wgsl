// Validation of an expert index: the first fault and its offset.
// Faults are numbered like `ExpertFault` of qgemm-hal.
// One workgroup checks the index.

struct Params {
    form: u32,
    experts: u32,
    rows: u32,         // of all experts; with FORM_MASKED the capacity of each
    has_weights: u32,  // whether slots have router weights
    index_base: u32,
    weights_base: u32,
    status_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> index: array<u32>;
@group(0) @binding(1) var<storage, read> weights: array<u32>;
@group(0) @binding(2) var<storage, read_write> status: array<u32>;

const NONE: u32 = 0xffffffffu;

// First fault per invocation: in the index, in the weights.
var<workgroup> first: array<vec2<u32>, THREADS>;

fn is_wrong(place: u32) -> bool {
    let word = index[p.index_base + place];
    if (p.form == FORM_CONTIGUOUS) {
        let before = index[p.index_base + max(place, 1u) - 1u];
        return word > p.rows || (place > 0u && word < before);
    }
    return select(word > p.rows, word >= p.experts, p.form == FORM_INDEXED);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    var places = select(p.experts, p.rows, p.form == FORM_INDEXED);
    places += select(0u, 1u, p.form == FORM_CONTIGUOUS);
    var seen = vec2<u32>(NONE);
    for (var place = thread; place < places; place += THREADS) {
        if (is_wrong(place)) {
            seen.x = min(seen.x, place);
        }
        if (p.has_weights == 1u && (weights[p.weights_base + place] & 0x7fffffffu) > 0x7f800000u) {
            seen.y = min(seen.y, place);
        }
    }
    first[thread] = seen;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread < half) {
            first[thread] = min(first[thread], first[thread + half]);
        }
    }
    if (thread > 0u) {
        return;
    }
    let found = first[0];
    var fault = vec2<u32>();
    if (found.x != NONE) {
        fault.y = found.x;
        if (p.form == FORM_INDEXED) {
            fault.x = FAULT_ID;
        } else if (p.form == FORM_MASKED) {
            fault.x = FAULT_COUNT;
        } else {
            fault.x = FAULT_OFFSET;
        }
    } else if (found.y != NONE) {
        fault = vec2<u32>(FAULT_ROUTER_WEIGHT, found.y);
    }
    status[p.status_base] = fault.x;
    status[p.status_base + 1u] = fault.y;
}
