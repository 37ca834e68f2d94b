// Norm epilogue: unquantized output, in column pairs.

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n = norm_of_row(group, groups, thread);
    if (n.row >= p.shape.rows) {
        return;
    }
    for (var column = n.lane * 2u; column < p.shape.d_columns; column += p.shape.row_threads * 2u) {
        let count = min(2u, p.shape.d_columns - column);
        let pair = vec2<f32>(normalized(n, column), normalized(n, column + 1u));
        store_d(p.d_base + at(n.row, p.d_row, column), count, type_of(TYPE_D), pair);
    }
}
