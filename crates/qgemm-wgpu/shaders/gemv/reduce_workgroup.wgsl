// Slice reduction in workgroup memory.

// Leaves the sums of all slices in `tile`: (TILE_M, LANES).
fn reduce(lane: u32, slice: u32, sums: ptr<function, Accumulators>) {
    let at = slice * TILE_M * LANES + lane;
    #for t TILE_M
    tile[at + $tu * LANES] = bitcast<vec4<u32>>((*sums)[$t]);
    #end
    add_parts(at, slice, SLICES, true);
}
