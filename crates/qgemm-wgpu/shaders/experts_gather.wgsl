// Copies the index and the row factors to one buffer.
// Kernels with C bind both at once.

struct Params {
    index_words: u32,
    rows: u32,
    index_base: u32,
    factors_base: u32,
    gathered_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> index: array<u32>;
@group(0) @binding(1) var<storage, read> factors: array<u32>;
@group(0) @binding(2) var<storage, read_write> gathered: array<u32>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = (group.x + group.y * groups.x) * THREADS + thread;
    if (place < p.index_words) {
        gathered[p.gathered_base + place] = index[p.index_base + place];
    } else if (place - p.index_words < p.rows) {
        gathered[p.gathered_base + place] = factors[p.factors_base + place - p.index_words];
    }
}
