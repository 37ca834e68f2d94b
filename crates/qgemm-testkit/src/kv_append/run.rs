//! Runs one KV-cache append on a device and judges the result.

use qgemm_api::{Context, DeviceKind, Error, KvAppend, KvAppendArgs, KvAppendPlan};
use qgemm_formats::DType;
use qgemm_hal::KvFormat;

use super::case::KvAppendCase;
use super::oracle::{angles, rotated, rotated_value};
use crate::attention::{AttentionStorage, KvOperand, api_keys, api_queries};
use crate::compare::compare;
use crate::expected::Expected;
use crate::limits::{Tolerance, rounded_to};
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions.
const EXEMPTIONS: &[Exemption<KvAppendCase>] = &[];
/// Error limit of rotated features before rounding.
const LIMIT: f64 = 1e-11;
/// Error limit of rounding to E4M3: half a unit in the last place
/// of 1, squared.
const E4M3_ROUNDING: f64 = 3.91e-3;
/// Error limit of Q8_0: steps of 1/127 of the largest of 32, if
/// that is four times their mean. A twelfth of the step squared.
const Q8_0_ROUNDING: f64 = 2e-4;
/// Error limit of Q4_0: eight steps, or seven for numbers of one
/// sign.
const Q4_0_ROUNDING: f64 = 5e-2;

/// Runs `case` on poisoned memory and judges the result. It runs
/// twice where a second run may differ.
pub fn run(ctx: &Context, case: &KvAppendCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands.
struct Stored {
    q: Operand,
    new_k: Operand,
    new_v: Operand,
    k: KvOperand,
    v: KvOperand,
}

/// Inputs of a run.
struct Inputs {
    q: Vec<f32>,
    new_k: Vec<f32>,
    new_v: Vec<f32>,
    /// Cosines and sines.
    tables: [Vec<f32>; 2],
    block_table: Vec<u32>,
}

/// Contents of the buffers after a run.
#[derive(PartialEq)]
struct Written {
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    k_scales: Vec<u8>,
    v_scales: Vec<u8>,
}

fn judge(ctx: &Context, case: &KvAppendCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let of = &case.of;
    let ((heads, kv_heads), (qk, v_dim), tokens) = (of.heads, of.dims, of.tokens());
    let rows = |heads: usize, columns| Operand::new(of.dtype, tokens * heads, columns, of.gap, of.offset);
    let stored = Stored {
        q: rows(heads, qk),
        new_k: rows(kv_heads, qk),
        new_v: rows(kv_heads, v_dim),
        k: KvOperand::empty(of, qk),
        v: KvOperand::empty(of, v_dim),
    };
    let inputs = Inputs {
        q: case.values(1, heads, qk),
        new_k: case.values(2, kv_heads, qk),
        new_v: case.values(3, kv_heads, v_dim),
        tables: [case.table(6), case.table(7)],
        block_table: if let AttentionStorage::Paged(size) = of.places { of.table(size) } else { Vec::new() },
    };
    let plan = ctx.plan_kv_append(&append(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let first = run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run)?;
    check(case, &stored, &inputs, &first, outcome)?;
    // Emulated threads run in one order, without a workspace: a
    // second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second = run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run)?;
        Failure::check_same(&first.q, &second.q)?;
        Failure::check_same(&first.k, &second.k)?;
        Failure::check_same(&first.v, &second.v)?;
        Failure::check_same(&first.k_scales, &second.k_scales)?;
        Failure::check_same(&first.v_scales, &second.v_scales)?;
    }
    Ok(())
}

fn append(case: &KvAppendCase, stored: &Stored) -> KvAppend {
    let of = &case.of;
    let ((heads, kv_heads), (qk, v_dim)) = (of.heads, of.dims);
    let strides =
        |operand: &Operand, heads: usize| ((heads * operand.row_stride()) as u64, operand.row_stride() as u64);
    let (q_token, q_head) = strides(&stored.q, heads);
    let (k_token, k_head) = strides(&stored.new_k, kv_heads);
    let (v_token, v_head) = strides(&stored.new_v, kv_heads);
    let (queries, keys) = (api_queries(of), api_keys(of));
    let mut append = match case.in_place {
        true => KvAppend::in_place(of.dtype, heads, qk, queries, keys),
        false => KvAppend::new(of.dtype, if case.has_queries { heads } else { 0 }, kv_heads, qk, queries, keys),
    };
    append = append
        .v_dim(v_dim)
        .kv_format(of.kv)
        .q_strides(q_token, q_head)
        .new_k_strides(k_token, k_head)
        .new_v_strides(v_token, v_head)
        .k_strides(stored.k.strides)
        .v_strides(stored.v.strides)
        .alignment(stored.q.alignment())
        .kv_alignment(stored.k.alignment);
    if let Some((eps, gamma)) = case.head_norm {
        append = append.head_norm(eps, gamma);
    }
    if let Some(rotary) = &case.rotary {
        append = append.rotary(rotary.rotary());
    }
    let [rotates_k, rotates_v] = case.hadamard;
    append = match (rotates_k, case.in_place) {
        (true, true) => append.hadamard(),
        (true, false) => append.rotate_k(),
        (false, _) => append,
    };
    append = if rotates_v { append.rotate_v() } else { append };
    if case.positions_from.is_some() { append.positions() } else { append }
}

fn run_on(
    ctx: &Context,
    plan: &KvAppendPlan,
    case: &KvAppendCase,
    stored: &Stored,
    inputs: &Inputs,
) -> Result<Written, Error> {
    let of = &case.of;
    let mut q = ctx.upload(&stored.q.encode(&inputs.q))?;
    let (new_k, new_v) = (stored.new_k.encode(&inputs.new_k), stored.new_v.encode(&inputs.new_v));
    let (new_k, new_v) = (ctx.upload(&new_k)?, ctx.upload(&new_v)?);
    let (mut k, mut v) = (ctx.upload(&stored.k.bytes)?, ctx.upload(&stored.v.bytes)?);
    let (mut k_scales, mut v_scales) = (ctx.upload(&stored.k.scales)?, ctx.upload(&stored.v.scales)?);
    let lengths: Vec<u32> = of.lengths.iter().map(|&(_, keys)| keys as u32).collect();
    let (lengths, table) = (ctx.upload(&lengths)?, ctx.upload(&inputs.block_table)?);
    let (q_offsets, kv_offsets) = (ctx.upload(&of.q_offsets())?, ctx.upload(&of.kv_offsets())?);
    let (k_factors, v_factors) = (ctx.upload(&of.factors(4))?, ctx.upload(&of.factors(5))?);
    let positions = ctx.upload(&case.positions())?;
    let (cos, sin) = (ctx.upload(&inputs.tables[0])?, ctx.upload(&inputs.tables[1])?);
    let of_gamma = case.head_norm.map_or(DType::F32, |(_, dtype)| dtype);
    let q_gamma = ctx.upload(&of_gamma.encode(&case.gamma(8)))?;
    let k_gamma = ctx.upload(&of_gamma.encode(&case.gamma(9)))?;
    let paged = matches!(of.places, AttentionStorage::Paged(_));
    let mut args = match case.in_place {
        true => KvAppendArgs::in_place(q.slice_mut(stored.q.range())?),
        false => {
            let args = KvAppendArgs::new(
                new_k.slice(stored.new_k.range())?,
                new_v.slice(stored.new_v.range())?,
                k.slice_mut(stored.k.range.clone())?,
                v.slice_mut(stored.v.range.clone())?,
            );
            if case.has_queries { args.q(q.slice_mut(stored.q.range())?) } else { args }
        }
    };
    if of.kv.has_factors() && !case.in_place {
        args.k_factors = Some((&k_factors).into());
        args.v_factors = Some((&v_factors).into());
    }
    if of.kv.has_scales() && !case.in_place {
        args.k_scales = Some((&mut k_scales).into());
        args.v_scales = Some((&mut v_scales).into());
    }
    args.q_offsets = of.ragged.then(|| (&q_offsets).into());
    args.kv_offsets = (of.places == AttentionStorage::Offsets).then(|| (&kv_offsets).into());
    args.kv_lengths = (paged || matches!(of.places, AttentionStorage::Lengths(_))).then(|| (&lengths).into());
    args.block_table = (paged && !case.in_place).then(|| (&table).into());
    args.positions = case.positions_from.is_some().then(|| (&positions).into());
    if case.head_norm.is_some() {
        args.q_gamma = case.has_queries.then(|| (&q_gamma).into());
        args.k_gamma = (!case.in_place).then(|| (&k_gamma).into());
    }
    if case.rotary.is_some_and(|rotary| rotary.tables.is_some()) {
        args.cos = Some((&cos).into());
        args.sin = Some((&sin).into());
    }
    plan.run(&ctx.default_stream(), args)?;
    let written = Written {
        q: ctx.download(&q)?,
        k: ctx.download(&k)?,
        v: ctx.download(&v)?,
        k_scales: ctx.download(&k_scales)?,
        v_scales: ctx.download(&v_scales)?,
    };
    for buffer in [&q, &k, &v, &k_scales, &v_scales] {
        buffer.raw().check_guards()?;
    }
    Ok(written)
}

/// Error limit of the cache.
fn of_cache(kv: KvFormat) -> Tolerance {
    match kv {
        KvFormat::Plain(dtype) => rounded_to(dtype, LIMIT),
        KvFormat::Q8_0 => Tolerance::relative(Q8_0_ROUNDING),
        KvFormat::Q4_0 => Tolerance::relative(Q4_0_ROUNDING),
        // Half the distance of subnormal numbers, times the largest
        // factor of the cases.
        _ => Tolerance { nmse: LIMIT + E4M3_ROUNDING, absolute: 2.0 / 1024.0, overflow: f64::INFINITY },
    }
}

/// Rows to compare.
struct Rows {
    columns: usize,
    got: Vec<f32>,
    values: Vec<f64>,
    energy: Vec<f64>,
}

impl Rows {
    fn of(columns: usize) -> Self {
        Self { columns, got: Vec::new(), values: Vec::new(), energy: Vec::new() }
    }

    fn push(&mut self, got: impl IntoIterator<Item = f32>, (values, energy): (Vec<f64>, Vec<f64>)) {
        self.got.extend(got);
        self.values.extend(values);
        self.energy.extend(energy);
    }

    fn compare(self, tolerance: Tolerance, outcome: &mut Outcome) -> Result<(), Failure> {
        let Self { columns, got, values, energy } = self;
        let floor = vec![0.0; values.len()];
        let comparison =
            compare(&got, &Expected { m: got.len() / columns, n: columns, values, energy, floor }, tolerance);
        (outcome.comparison, outcome.limit) = (Some(comparison), Some(tolerance.nmse));
        if comparison.within(tolerance) { Ok(()) } else { Err(Failure::Inaccurate(comparison)) }
    }
}

/// Checks that queries are rotated, every new key and value is in
/// the cache, and nothing else was written.
fn check(
    case: &KvAppendCase,
    stored: &Stored,
    inputs: &Inputs,
    written: &Written,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let of = &case.of;
    let ((heads, kv_heads), (qk, v_dim)) = (of.heads, of.dims);
    let (mut queries, mut keys, mut values) = (Rows::of(qk), Rows::of(qk), Rows::of(v_dim));
    // The cache without new keys and values, which are removed
    // below.
    let (mut k_rest, mut v_rest) = (written.k.clone(), written.v.clone());
    let (positions, got_q) = (case.positions(), stored.q.decode(&written.q));
    let (k_factors, v_factors) = (of.factors(4), of.factors(5));
    let (q_gamma, k_gamma) = (case.gamma(8), case.gamma(9));
    for (token, key) in case.keys().into_iter().enumerate() {
        let angles = key.and_then(|_| angles(case, positions[token], &inputs.tables));
        for head in 0..heads {
            let at = (token * heads + head) * qk..(token * heads + head + 1) * qk;
            let given = &inputs.q[at.clone()];
            match &angles {
                Some(angles) if case.rotates_queries() => {
                    queries.push(got_q[at].iter().copied(), rotated(case, angles, &q_gamma, given));
                }
                // Not rotated: unchanged to the bit.
                _ if got_q[at.clone()] != *given => {
                    return Err(Failure::WroteOutside(stored.q.range().start + at.start * of.dtype.bytes()));
                }
                _ => {}
            }
        }
        let (Some(angles), Some((sequence, key))) = (&angles, key) else { continue };
        let row = of.row(sequence, key, &inputs.block_table).filter(|_| !case.in_place);
        let Some(row) = row else { continue };
        for head in 0..kv_heads {
            let new = |all: &[f32], columns: usize| all[(token * kv_heads + head) * columns..][..columns].to_vec();
            let factor = |all: &[f32]| if of.kv.has_factors() { all[head] } else { 1.0 };
            let got = stored.k.take(of, qk, [row, head], factor(&k_factors), &written.k_scales, &mut k_rest);
            keys.push(got, rotated(case, angles, &k_gamma, &new(&inputs.new_k, qk)));
            let got = stored.v.take(of, v_dim, [row, head], factor(&v_factors), &written.v_scales, &mut v_rest);
            values.push(got, rotated_value(case, &new(&inputs.new_v, v_dim)));
        }
    }
    queries.compare(rounded_to(of.dtype, LIMIT), outcome)?;
    keys.compare(of_cache(of.kv), outcome)?;
    values.compare(of_cache(of.kv), outcome)?;
    stored.q.first_written_outside(&written.q).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    for rest in [&k_rest, &v_rest] {
        rest.iter().position(|&byte| byte != 0xff).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    }
    Ok(())
}
