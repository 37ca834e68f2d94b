// Routing prefix sum over the chunks' counts, one workgroup.
// Writes offsets, counts, the status, and the start of each
// chunk's part of each list.

const EACH: u32 = MOST_EXPERTS / THREADS;

var<workgroup> totals: array<u32, THREADS>;
var<workgroup> bad: atomic<u32>;

// Neighbouring experts of an invocation.
fn expert_of(thread: u32, i: u32) -> u32 {
    return thread * EACH + i;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    if (thread == 0u) {
        atomicStore(&bad, NO_SLOT);
    }
    workgroupBarrier();
    for (var chunk = thread; chunk < p.shape.chunks; chunk += THREADS) {
        atomicMin(&bad, workspace[p.workspace_base + chunk]);
    }
    workgroupBarrier();
    if (thread == 0u) {
        let slot = atomicLoad(&bad);
        let is_bad = slot != NO_SLOT;
        var id = 0u;
        if (is_bad) {
            id = ids[p.ids_base + slot];
        }
        let code = select(STATUS_TOO_FEW, STATUS_BAD_ID, has(FLAG_GIVEN_IDS));
        status[p.status_base] = select(0u, code, is_bad);
        status[p.status_base + 1u] = select(0u, slot / p.shape.top_k, is_bad);
        status[p.status_base + 2u] = select(0u, slot % p.shape.top_k, is_bad);
        status[p.status_base + 3u] = id;
    }
    if (!has(FLAG_LISTS)) {
        return;
    }
    var own = array<u32, EACH>();
    var all = 0u;
    for (var i = 0u; i < EACH; i++) {
        let e = expert_of(thread, i);
        if (e < p.shape.experts) {
            for (var chunk = 0u; chunk < p.shape.chunks; chunk++) {
                own[i] += workspace[place_of_count(chunk, e)];
            }
        }
        all += own[i];
    }
    // Inclusive prefix sums over invocations.
    totals[thread] = all;
    workgroupBarrier();
    for (var distance = 1u; distance < THREADS; distance *= 2u) {
        var before = 0u;
        if (thread >= distance) {
            before = totals[thread - distance];
        }
        workgroupBarrier();
        totals[thread] += before;
        workgroupBarrier();
    }
    var offset = totals[thread] - all;
    for (var i = 0u; i < EACH; i++) {
        let e = expert_of(thread, i);
        if (e < p.shape.experts) {
            offsets[p.offsets_base + e] = offset;
            counts[p.counts_base + e] = own[i];
            var place = offset;
            for (var chunk = 0u; chunk < p.shape.chunks; chunk++) {
                let at = place_of_count(chunk, e);
                let count = workspace[at];
                workspace[at] = place;
                place += count;
            }
        }
        offset += own[i];
    }
    if (thread == THREADS - 1u) {
        offsets[p.offsets_base + p.shape.experts] = offset;
        workspace[place_of_count(p.shape.chunks, 0u)] = offset;
    }
}
