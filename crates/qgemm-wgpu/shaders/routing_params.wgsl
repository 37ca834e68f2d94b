// Parameters of routing kernels.
// `*_base` offsets count elements (see `params.wgsl`).

struct Params {
    shape: RoutingShape,  // of this dispatch
    logits_row: u32,      // elements between rows of the logits
    logits_base: u32,
    bias_base: u32,
    ids_base: u32,
    weights_base: u32,
    workspace_base: u32,
    offsets_base: u32,
    counts_base: u32,
    rows_base: u32,
    status_base: u32,
}

var<immediate> p: Params;

// Id of a slot whose expert is not local.
const ELSEWHERE: u32 = 0xfffffffeu;

fn has(flag: u32) -> bool {
    return (p.shape.flags & flag) != 0u;
}
