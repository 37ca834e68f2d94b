// Validation of a row gather's ids.
// Status: code, row, 0, id of the first id outside W.
// One workgroup checks all.

struct Params {
    rows: u32,
    table_rows: u32,
    ids_base: u32,
    status_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> ids: array<u32>;
@group(0) @binding(1) var<storage, read_write> status: array<u32>;

const NONE: u32 = 0xffffffffu;

var<workgroup> first: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    var found = NONE;
    for (var row = thread; row < p.rows; row += THREADS) {
        if (ids[p.ids_base + row] >= p.table_rows) {
            found = min(found, row);
        }
    }
    first[thread] = found;
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread < half) {
            first[thread] = min(first[thread], first[thread + half]);
        }
    }
    if (thread > 0u) {
        return;
    }
    let fault = first[0] != NONE;
    let row = select(0u, first[0], fault);
    status[p.status_base] = select(0u, 1u, fault);
    status[p.status_base + 1u] = row;
    status[p.status_base + 2u] = 0u;
    status[p.status_base + 3u] = select(0u, ids[p.ids_base + row], fault);
}
