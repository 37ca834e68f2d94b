// Orders of a row's logits after the repetition penalty.
// A workgroup has a part of the vocabulary and reads all
// earlier tokens of the row.

@group(0) @binding(0) var<storage, read> logits: array<u32>;
@group(0) @binding(1) var<storage, read> parameters: array<u32>;
@group(0) @binding(2) var<storage, read> earlier: array<u32>;
@group(0) @binding(3) var<storage, read> lengths: array<u32>;
@group(0) @binding(4) var<storage, read_write> orders: array<u32>;

const PART: u32 = 2048u;

var<workgroup> counts: array<atomic<u32>, PART>;

fn penalized_order(bits: u32, penalty: f32) -> u32 {
    let order = order_of(bits);
    if (order == NON_FINITE || order == EXCLUDED) {
        return order;
    }
    let logit = bitcast<f32>(bits);
    if (logit > 0.0f) {
        // The quotient may be infinite.
        return order_of(bitcast<u32>(min(logit / penalty, LARGEST)));
    }
    return order_of(bitcast<u32>(logit * penalty));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = group.x * PART;
    let row = group.y;
    for (var i = thread; i < PART; i += THREADS) {
        atomicStore(&counts[i], 0u);
    }
    workgroupBarrier();
    let count = min(lengths[p.lengths_base + row], p.shape.earlier);
    for (var i = thread; i < count; i += THREADS) {
        let id = earlier[p.earlier_base + row * p.earlier_row + i];
        // Ids below `first` wrap around.
        if (id - first < PART) {
            atomicAdd(&counts[id - first], 1u);
        }
    }
    workgroupBarrier();
    let penalty = bitcast<f32>(parameters[p.parameters_base + row * PARAMETER_WORDS + 4u]);
    for (var i = thread; i < PART && first + i < p.shape.vocabulary; i += THREADS) {
        let bits = logits[p.logits_base + row * p.logits_row + first + i];
        let order = select(order_of(bits), penalized_order(bits, penalty), atomicLoad(&counts[i]) > 0u);
        orders[p.orders_base + row * p.shape.vocabulary + first + i] = order;
    }
}
