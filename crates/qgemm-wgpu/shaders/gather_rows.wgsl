// Row gather (embedding look-up):
// D[i] = scale * W[ids[i]].
// An invocation decodes four columns of four
// rows of W, of which one is the id's.
// The ids take the binding of C.
// `out_features` is the number of W's rows,
// and `x_row` has the bits of the scale.

fn put_quad(row: u32, stored: u32, four_values: vec4<f32>) {
    var values = four_values;
    if (!has(FLAG_K_ORDER)) {
        if (stored < p.shape.k) {
            store4(row, stored, min(4u, p.shape.k - stored), values);
        }
        return;
    }
    for (var i = 0u; i < 4u && stored + i < p.shape.stored_k; i++) {
        let column = k_order[k_order_first() + stored + i];
        if (column < p.shape.k) {
            store4(row, column, 1u, vec4<f32>(values[i]));
        }
    }
}

fn decoded(id: u32, stored: u32) -> vec4<f32> {
    let rows = rows_of(id / 4u * 4u, stored / PACKED_K);
    let column = stored % PACKED_K;
    let numbers = numbers_of(quad_words(rows, column / 4u));
    let affine = affine(rows, column / SUB_BLOCK);
    let lane = id % 4u;
    var a = scaled(numbers.a, 1.0, affine);
    var b = scaled(numbers.b, 1.0, affine);
    var c = scaled(numbers.c, 1.0, affine);
    var e = scaled(numbers.d, 1.0, affine);
    let values = vec4<f32>(a[lane], b[lane], c[lane], e[lane]);
    var factor = bitcast<f32>(p.x_row);
    if (has(FLAG_ROW_SCALE)) {
        factor *= row_scale[row_scale_first() + id];
    }
    return values * factor;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    begin(thread);
    let stored = (group.x * THREADS + thread) * 4u;
    let row = group.z * groups.y + group.y;
    if (row >= tokens() || stored >= k_tiles() * PACKED_K) {
        return;
    }
    let id = c_words[c_first() + row];
    if (id >= p.shape.out_features) {
        // The first dispatch writes the zeros.
        if (rows_first() == 0u) {
            put_quad(row, stored, vec4<f32>());
        }
        return;
    }
    if (id >= rows_first() && id < p.shape.stored_rows) {
        put_quad(row, stored, decoded(id, stored));
    }
}
