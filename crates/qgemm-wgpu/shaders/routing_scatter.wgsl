// Routing scatter: writes a chunk's slots to the lists.
// A workgroup has one chunk, THREADS slots per iteration.

var<workgroup> places: array<u32, MOST_EXPERTS>;
var<workgroup> together: array<u32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let chunk = group.x;
    for (var e = thread; e < p.shape.experts; e += THREADS) {
        places[e] = workspace[place_of_count(chunk, e)];
    }
    let last = last_slot(chunk);
    for (var first = first_slot(chunk); first < last; first += THREADS) {
        let slot = first + thread;
        var id = p.shape.experts;
        if (slot < last) {
            id = min(ids[p.ids_base + slot], p.shape.experts);
        }
        together[thread] = id;
        workgroupBarrier();
        var before = 0u;
        var is_last = true;
        for (var other = 0u; other < THREADS; other++) {
            let is_same = together[other] == id;
            before += select(0u, 1u, is_same && other < thread);
            is_last = is_last && !(is_same && other > thread);
        }
        var place = 0u;
        if (id < p.shape.experts) {
            place = places[id] + before;
            rows[p.rows_base + place] = slot;
        }
        workgroupBarrier();
        if (id < p.shape.experts && is_last) {
            places[id] = place + 1u;
        }
        // The next iteration's first barrier orders this store.
    }
    let listed = workspace[place_of_count(p.shape.chunks, 0u)];
    for (var place = max(listed, first_slot(chunk)) + thread; place < last; place += THREADS) {
        rows[p.rows_base + place] = NO_SLOT;
    }
}
