// Append with head norms or a Hadamard rotation: one invocation per eight features
// of a head of a token; a workgroup has whole heads. The file before
// stores eight features.

const EIGHTS: u32 = COLUMNS / 8u;
// Whole heads of a workgroup.
const GROUP_HEADS: u32 = THREADS / EIGHTS;

// Features of all invocations.
var<workgroup> features: array<array<f32, 8>, THREADS>;

fn exchanged(x: array<f32, 8>, thread: u32) {
    workgroupBarrier();
    features[thread] = x;
    workgroupBarrier();
}

// Sum of squares of the features of each invocation.
var<workgroup> squares: array<f32, THREADS>;

// RMS norm of the head of these features.
fn normalized(x: array<f32, 8>, column: u32, thread: u32) -> array<f32, 8> {
    var result = x;
    if (!NORMED) {
        return result;
    }
    var own = 0.0;
    for (var i = 0u; i < 8u; i++) {
        own += x[i] * x[i];
    }
    squares[thread] = own;
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < EIGHTS; i++) {
        sum += squares[min(thread - column / 8u + i, THREADS - 1u)];
    }
    let factor = 1.0 / sqrt(sum / f32(COLUMNS) + bitcast<f32>(EPS));
    for (var i = 0u; i < 8u; i++) {
        let at = p.sines_or_gamma_base + column + i;
        result[i] *= factor * element(sines_or_gamma[word_of(at, GAMMA_DTYPE)], at, GAMMA_DTYPE);
    }
    return result;
}

// Rotary embedding of the features from `column` on.
fn rotary_embedding(x: array<f32, 8>, column: u32, position: u32, thread: u32) -> array<f32, 8> {
    var result = x;
    if (ROTARY_PAIRS == 0u) {
        return result;
    }
    exchanged(x, thread);
    let first = thread - column / 8u;
    for (var i = 0u; i < 8u; i++) {
        let feature = column + i;
        if (feature < 2u * ROTARY_PAIRS) {
            var pair = feature / 2u;
            var other = feature ^ 1u;
            var is_second = (feature & 1u) == 1u;
            if (!INTERLEAVED) {
                is_second = feature >= ROTARY_PAIRS;
                pair = select(feature, feature - ROTARY_PAIRS, is_second);
                other = select(pair + ROTARY_PAIRS, pair, is_second);
            }
            let partner = features[min(first + other / 8u, THREADS - 1u)][other % 8u];
            let angle = angle_of(pair, position);
            result[i] = result[i] * angle.x + select(-partner, partner, is_second) * angle.y;
        }
    }
    return result;
}

// Hadamard rotation: butterflies of strides 1, 2, 4, …, then
// one multiplication, in this order on every device.
fn hadamard(x: array<f32, 8>, thread: u32) -> array<f32, 8> {
    var sums = x;
    if (!HADAMARD) {
        return sums;
    }
    for (var stride = 1u; stride < 8u; stride *= 2u) {
        for (var i = 0u; i < 8u; i++) {
            if ((i & stride) == 0u) {
                let first = sums[i];
                let second = sums[i + stride];
                sums[i] = first + second;
                sums[i + stride] = first - second;
            }
        }
    }
    for (var stride = 1u; stride < HADAMARD_EIGHTS; stride *= 2u) {
        exchanged(sums, thread);
        for (var i = 0u; i < 8u; i++) {
            let other = features[thread ^ stride][i];
            sums[i] = other + select(sums[i], -sums[i], (thread & stride) != 0u);
        }
    }
    let scale = bitcast<f32>(HADAMARD_SCALE);
    for (var i = 0u; i < 8u; i++) {
        sums[i] *= scale;
    }
    return sums;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    // Workgroups of a token are adjacent.
    let place = group.x + group.y * groups.x;
    let token = place / GROUPS_A_TOKEN;
    let head = place % GROUPS_A_TOKEN * GROUP_HEADS + thread / EIGHTS;
    let column = thread % EIGHTS * 8u;
    var to = Place();
    if (token < p.tokens && head < HEADS && thread / EIGHTS < GROUP_HEADS) {
        to = place_of(token, head);
    }
    var x = array<f32, 8>();
    if (to.is_there) {
        for (var i = 0u; i < 8u; i++) {
            x[i] = load(to.source_at + column + i);
        }
    }
    x = normalized(x, column, thread);
    if (TURNS_LAST) {
        x = rotary_embedding(hadamard(x, thread), column, to.position, thread);
    } else {
        x = hadamard(rotary_embedding(x, column, to.position, thread), thread);
    }
    let eight = Eight(vec4<f32>(x[0], x[1], x[2], x[3]), vec4<f32>(x[4], x[5], x[6], x[7]));
    store_eight(eight, head, to.written_at + column, to.is_there, thread);
}
