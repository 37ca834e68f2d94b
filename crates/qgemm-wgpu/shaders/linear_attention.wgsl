// Linear attention, token by token (gated delta rule, KDA, Mamba-2).
// A workgroup has some rows (values) of a head's state for a
// sequence. Eight invocations share a row.
// Tokens pass through workgroup memory a chunk at a time.
// The output uses the state before the update:
// S q = (decayed S) q + u (k q).

struct Params {
    sequences: u32,
    q_base: u32,
    k_base: u32,
    v_base: u32,
    decay_base: u32,
    beta_base: u32,
    gathered_base: u32,
    states_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> q_words: array<u32>;
@group(0) @binding(1) var<storage, read> k_words: array<u32>;
@group(0) @binding(2) var<storage, read> v_words: array<u32>;
@group(0) @binding(3) var<storage, read> decay_words: array<u32>;
@group(0) @binding(4) var<storage, read> betas: array<f32>;
@group(0) @binding(5) var<storage, read> gathered: array<u32>;
@group(0) @binding(6) var<storage, read_write> states: array<f32>;
@group(0) @binding(7) var<storage, read_write> d: array<atomic<u32>>;

const INFINITY: u32 = 0x7f800000u;
const LARGEST: u32 = 0x42ae0000u;         // 87
const LANES: u32 = 8u;                    // of a row
const ROWS: u32 = THREADS / LANES;
const COLUMNS: u32 = QK_DIM / LANES;      // of an invocation
const CHUNK: u32 = 4u;                    // tokens
const TOKEN_LANES: u32 = THREADS / CHUNK; // that load a token
const SLICES: u32 = V_DIM / ROWS;         // workgroups of a head

var<workgroup> queries: array<f32, CHUNK * QK_DIM>;
var<workgroup> keys: array<f32, CHUNK * QK_DIM>;
var<workgroup> decays: array<f32, CHUNK * DECAYS>;
var<workgroup> values: array<f32, CHUNK * ROWS>;
var<workgroup> chunk_betas: array<f32, CHUNK>;
var<workgroup> products: array<f32, CHUNK>;  // of query and key
var<workgroup> sums: array<vec3<f32>, THREADS>;
var<workgroup> outputs: array<f32, ROWS>;
var<workgroup> record: array<u32, RECORD_WORDS>;

// Position of an invocation.
struct Place {
    thread: u32,
    row: u32,   // in the workgroup
    lane: u32,
    head: u32,
    first_row: u32,
}

// ln(1 + exp(x)) of a finite number.
// ln(1 + e) is 2 · atanh(s) with s = e / (2 + e) ≤ 1/3.
// Below -16 it is e up to rounding.
fn softplus(x: f32) -> f32 {
    if (x < -16.0) {
        return exp_nonpositive(x);
    }
    let e = exp_nonpositive(-abs(x));
    let s = e / (2.0 + e);
    let square = s * s;
    var series = 0.0666666667;
    series = series * square + 0.0769230769;
    series = series * square + 0.0909090909;
    series = series * square + 0.111111111;
    series = series * square + 0.142857143;
    series = series * square + 0.2;
    series = series * square + 0.333333333;
    series = series * square + 1.0;
    return max(x, 0.0) + 2.0 * s * series;
}

// exp(min(g, 0)). Infinity and NaN are tested by bits, because
// adapters may assume that they do not occur.
fn factor_of(g: f32) -> f32 {
    let bits = bitcast<u32>(g);
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > INFINITY) {
        return g;
    }
    if (bits == magnitude) {
        return 1.0;
    }
    if (magnitude > LARGEST) {
        return 0.0;
    }
    return exp_nonpositive(g);
}

// Logistic function of a finite number.
fn sigmoid(x: f32) -> f32 {
    let e = exp_nonpositive(-abs(x));
    return select(1.0, e, x < 0.0) / (1.0 + e);
}

// Log-decay of a token, or `a`.
fn log_decay_of(token: u32, index: u32) -> f32 {
    let at = p.decay_base + token * DECAY_TOKEN + index;
    return element(decay_words[word_of(at, A_DTYPE)], at, A_DTYPE);
}

// a + dt_bias of a token.
fn biased_of(token: u32, index: u32) -> f32 {
    let of_heads = p.gathered_base + p.sequences * RECORD_WORDS;
    return log_decay_of(token, index) + bitcast<f32>(gathered[of_heads + 2u * HEADS + index]);
}

// Factor of a head's update.
fn beta_of(token: u32, head: u32) -> f32 {
    if (TIME_STEP) {
        return softplus(biased_of(token, head));
    }
    if (!BETA) {
        return 1.0;
    }
    let given = betas[p.beta_base + token * BETA_TOKEN + head];
    if (SIGMOID) {
        return sigmoid(given);
    }
    return given;
}

// Decay `index` of a token, of the head's parameters.
fn decay_of(token: u32, head: u32, index: u32) -> f32 {
    if (!MADE) {
        return factor_of(log_decay_of(token, index));
    }
    let of_heads = p.gathered_base + p.sequences * RECORD_WORDS;
    let a = biased_of(token, index);
    let bits = bitcast<u32>(a);
    if ((bits & 0x7fffffffu) > INFINITY) {
        return a;
    }
    if ((bits & 0x7fffffffu) == INFINITY) {
        return select(0.0, 1.0, bits != INFINITY);
    }
    return factor_of(-bitcast<f32>(gathered[of_heads + HEADS + head]) * softplus(a));
}

// Loads `count` tokens from `first` on.
fn load_chunk(at: Place, first: u32, count: u32) {
    let token = at.thread / TOKEN_LANES;
    let lane = at.thread % TOKEN_LANES;
    var own = vec3<f32>();
    if (token < count) {
        let key_head = select(at.head / GROUP, at.head % KEY_HEADS, TILED_HEADS);
        let q = p.q_base + (first + token) * Q_TOKEN + key_head * Q_HEAD;
        let k = p.k_base + (first + token) * K_TOKEN + key_head * K_HEAD;
        for (var column = lane; column < QK_DIM; column += TOKEN_LANES) {
            let query = element(q_words[word_of(q + column, DTYPE)], q + column, DTYPE);
            let key = element(k_words[word_of(k + column, DTYPE)], k + column, DTYPE);
            queries[token * QK_DIM + column] = query;
            keys[token * QK_DIM + column] = key;
            own += vec3<f32>(query * query, key * key, query * key);
        }
        if (FEATURES) {
            for (var column = lane; column < QK_DIM; column += TOKEN_LANES) {
                decays[token * DECAYS + column] = decay_of(first + token, at.head, at.head * QK_DIM + column);
            }
        } else if (lane == 0u) {
            decays[token * DECAYS] = 1.0;
            if (DECAY) {
                decays[token * DECAYS] = decay_of(first + token, at.head, at.head);
            }
        }
        if (lane == 0u) {
            chunk_betas[token] = beta_of(first + token, at.head);
        }
        for (var row = lane; row < ROWS; row += TOKEN_LANES) {
            let v = p.v_base + (first + token) * V_TOKEN + at.head * V_HEAD + at.first_row + row;
            values[token * ROWS + row] = element(v_words[word_of(v, DTYPE)], v, DTYPE);
        }
    }
    sums[at.thread] = own;
    workgroupBarrier();
    var sum = vec3<f32>();
    for (var i = 0u; i < TOKEN_LANES; i++) {
        sum += sums[token * TOKEN_LANES + i];
    }
    var factors = vec2<f32>(bitcast<f32>(SCALE), 1.0);
    if (NORM) {
        factors /= sqrt(sum.xy + bitcast<f32>(EPSILON));
    }
    for (var column = lane; column < QK_DIM; column += TOKEN_LANES) {
        queries[token * QK_DIM + column] *= factors.x;
        keys[token * QK_DIM + column] *= factors.y;
    }
    if (lane == 0u) {
        products[token] = sum.z * factors.x * factors.y;
    }
    workgroupBarrier();
}

var<private> state: array<f32, COLUMNS>;

// First element of the invocation's row of a stored state.
fn row_of(at: Place, slot: u32) -> u32 {
    return p.states_base + slot * SLOT_STRIDE + (at.head * V_DIM + at.first_row + at.row) * QK_DIM + at.lane;
}

fn store_state(at: Place, slot: u32) {
    let first = row_of(at, slot);
    for (var i = 0u; i < COLUMNS; i++) {
        states[first + i * LANES] = state[i];
    }
}

// A token of the chunk; writes its outputs to workgroup memory.
fn step(at: Place, token: u32) {
    let single = decays[token * DECAYS];
    var own = vec3<f32>();
    for (var i = 0u; i < COLUMNS; i++) {
        let column = token * QK_DIM + i * LANES + at.lane;
        var decay = single;
        if (FEATURES) {
            decay = decays[column];
        }
        // Decay 0 forgets everything, even NaN.
        state[i] = select(state[i] * decay, 0.0, decay == 0.0);
        own += vec3<f32>(state[i] * keys[column], state[i] * queries[column], 0.0);
    }
    sums[at.thread] = own;
    workgroupBarrier();
    var sum = vec3<f32>();
    for (var i = 0u; i < LANES; i++) {
        sum += sums[at.row * LANES + i];
    }
    let v = values[token * ROWS + at.row];
    let update = chunk_betas[token] * select(v, v - sum.x, DELTA);
    for (var i = 0u; i < COLUMNS; i++) {
        state[i] += update * keys[token * QK_DIM + i * LANES + at.lane];
    }
    if (at.lane == 0u) {
        outputs[at.row] = sum.y + update * products[token];
        if (SKIP) {
            outputs[at.row] += bitcast<f32>(gathered[p.gathered_base + p.sequences * RECORD_WORDS + at.head]) * v;
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = group.x + group.y * groups.x;
    let of_sequence = index / SLICES;
    let sequence = of_sequence / HEADS;
    if (sequence >= p.sequences) {
        return;
    }
    let at = Place(thread, thread / LANES, thread % LANES, of_sequence % HEADS, index % SLICES * ROWS);
    if (thread < RECORD_WORDS) {
        record[thread] = gathered[p.gathered_base + sequence * RECORD_WORDS + thread];
    }
    let tokens = workgroupUniformLoad(&record);
    let count = tokens[1];
    let advance = tokens[2];
    let pending = tokens[3];
    let slot = tokens[4];
    if (count == 0u) {
        return;
    }
    let is_read = slot != NO_SLOT && !FROM_ZERO;
    for (var i = 0u; i < COLUMNS; i++) {
        state[i] = 0.0;
        if (is_read) {
            state[i] = states[row_of(at, slot) + i * LANES];
        }
    }
    if (slot != NO_SLOT && FROM_ZERO && advance == 0u) {
        store_state(at, slot);
    }
    var begin = 0u;
    while (begin < count) {
        // A chunk ends where the state is stored.
        let end = select(count, advance, begin < advance);
        let chunk = min(end - begin, CHUNK);
        load_chunk(at, tokens[0] + begin, chunk);
        for (var token = 0u; token < chunk; token++) {
            step(at, token);
            if (begin + token >= pending && thread < ROWS / 2u) {
                let first = (tokens[0] + begin + token) * D_TOKEN + at.head * D_HEAD + at.first_row + 2u * thread;
                store_d(p.d_base + first, 2u, DTYPE, vec2<f32>(outputs[2u * thread], outputs[2u * thread + 1u]));
            }
        }
        begin += chunk;
        if (begin == advance && slot != NO_SLOT) {
            store_state(at, slot);
        }
        workgroupBarrier();
    }
}
