//! Runs one attention on a device and judges the result.

use qgemm_api::{Attention, AttentionArgs, AttentionPlan, Buffer, Context, DeviceKind, Error, Workspace};
use qgemm_formats::DType;
use qgemm_hal::Spec;

use super::cache::{KvOperand, api_keys, api_queries_of};
use super::case::{AttentionCase, AttentionStorage};
use super::oracle::{Row, attend};
use crate::compare::{Mismatch, compare};
use crate::expected::Expected;
use crate::limits::rounded_to;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions.
const EXEMPTIONS: &[Exemption<AttentionCase>] = &[Exemption {
    device: DeviceKind::Wgpu,
    applies: |case, _| {
        let has_lengths = case.places != AttentionStorage::Each;
        let is_paged = matches!(case.places, AttentionStorage::Paged(_));
        case.mask.is_some() && !case.formats().are_plain() && case.ragged && has_lengths && is_paged
    },
    reason: "wgpu has no storage buffer for a mask beside codes, their scales, offsets of queries and a block table",
}];

/// Error limit before rounding: f32 sums and, if Q is 16-bit,
/// weights rounded to its type.
fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-9,
        DType::F16 => 1e-6,
        DType::BF16 => 2e-5,
    }
}

/// Rounding error of a score, relative to its summands'
/// magnitudes: eight f32 units in the last place.
const SCORE_ERROR: f64 = 1e-6;

/// Relative error of a score that rounding dequantized keys
/// to the type of Q adds: a fourth of a unit in the last place,
/// because errors of features partly cancel. 0 for plans that
/// multiply codes.
fn key_rounding(case: &AttentionCase, plan: &AttentionPlan) -> f64 {
    let kernel = plan.kernel_id().map(|id| id.spec);
    let is_plain = matches!(kernel, Some(Spec::Attention(spec)) if spec.kv.are_plain());
    let is_quantized = !case.formats().are_plain();
    match case.dtype {
        DType::F16 if is_plain && is_quantized => 2f64.powi(-13),
        DType::BF16 if is_plain && is_quantized => 2f64.powi(-10),
        _ => 0.0,
    }
}

/// Runs `case` on poisoned memory and judges the result. It runs
/// twice where a second run may differ.
pub fn run(ctx: &Context, case: &AttentionCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Inputs of runs, on the device.
struct Given {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    k_scales: Buffer,
    v_scales: Buffer,
    k_factors: Buffer,
    v_factors: Buffer,
    mask: Buffer,
    sinks: Buffer,
    gate: Buffer,
}

/// Index operands of a run: queries and keys of each sequence.
struct Index {
    sequences: usize,
    q_offsets: Vec<u32>,
    kv_offsets: Vec<u32>,
    lengths: Vec<u32>,
    table: Vec<u32>,
}

impl Index {
    /// The index of all sequences.
    fn of(case: &AttentionCase) -> Self {
        Self {
            sequences: case.lengths.len(),
            q_offsets: case.q_offsets(),
            kv_offsets: case.kv_offsets(),
            lengths: case.lengths.iter().map(|&(_, keys)| keys as u32).collect(),
            table: if let AttentionStorage::Paged(size) = case.places { case.table(size) } else { Vec::new() },
        }
    }

    /// The index of one sequence alone.
    fn alone(&self, sequence: usize) -> Self {
        let width = self.table.len() / self.sequences;
        Self {
            sequences: 1,
            q_offsets: self.q_offsets[sequence..sequence + 2].to_vec(),
            kv_offsets: self.kv_offsets[sequence..sequence + 2].to_vec(),
            lengths: vec![self.lengths[sequence]],
            table: self.table[sequence * width..][..width].to_vec(),
        }
    }
}

/// The operands of a case.
struct Stored {
    q: Operand,
    d: Operand,
    lse: Operand,
    gate: Operand,
    k: KvOperand,
    v: KvOperand,
}

/// Context and expected result of all runs of a case.
#[derive(Clone, Copy)]
struct Made<'a> {
    stored: &'a Stored,
    given: &'a Given,
    index: &'a Index,
    rows: &'a [Option<Row>],
}

fn judge(ctx: &Context, case: &AttentionCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let (tokens, heads) = (case.tokens(), case.heads.0);
    let of_tokens = |columns| Operand::new(case.dtype, tokens * heads, columns, case.gap, case.offset);
    let (queries, keys, values) = (case.queries(), case.keys(2), case.keys(3));
    let stored = Stored {
        q: of_tokens(case.dims.0),
        d: of_tokens(case.dims.1),
        gate: Operand::new(case.dtype, tokens * heads, case.dims.1, 2 * case.gap, case.offset),
        lse: Operand::new(DType::F32, 1, tokens * heads, 0, case.offset),
        k: KvOperand::new(case, case.formats().k, case.dims.0, &keys),
        v: KvOperand::new(case, case.formats().v, case.dims.1, &values),
    };
    let index = Index::of(case);
    let given = (|| {
        Ok::<_, Error>(Given {
            q: ctx.upload(&stored.q.encode(&queries))?,
            k: ctx.upload(&stored.k.bytes)?,
            v: ctx.upload(&stored.v.bytes)?,
            k_scales: ctx.upload(&stored.k.scales)?,
            v_scales: ctx.upload(&stored.v.scales)?,
            k_factors: ctx.upload(&case.factors(4))?,
            v_factors: ctx.upload(&case.factors(5))?,
            sinks: ctx.upload(&case.head_sinks())?,
            gate: ctx.upload(&if case.gated { stored.gate.encode(&case.gates()) } else { Vec::new() })?,
            mask: ctx.upload(&case.mask.map_or(Vec::new(), |mask| mask.words(case)))?,
        })
    })()
    .map_err(Failure::of_run)?;
    let described = attention(case, &stored, &index);
    let plans = match case.every_kernel {
        true => ctx.plan_attention_candidates(&described),
        false => ctx.plan_attention(&described).map(|plan| vec![plan]),
    };
    let rows = attend(case, &queries, &keys, &values);
    let made = Made { stored: &stored, given: &given, index: &index, rows: &rows };
    for plan in plans.map_err(Failure::of_plan)? {
        judge_plan(ctx, case, made, &plan, outcome)?;
    }
    Ok(())
}

/// Runs `plan` and judges the result.
fn judge_plan(
    ctx: &Context,
    case: &AttentionCase,
    Made { stored, given, index, rows }: Made<'_>,
    plan: &AttentionPlan,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let mut workspace = ctx.workspace(plan.workspace_bytes()).map_err(Failure::of_run)?;
    let mut run = |plan: &AttentionPlan, index: &Index| {
        run_on(ctx, plan, case, stored, given, index, &mut workspace).map_err(Failure::of_run)
    };
    let (d, lse) = run(plan, index)?;
    let score_error = SCORE_ERROR + key_rounding(case, plan);
    check(case, stored, rows, score_error, (&d, &lse), outcome)?;
    // Emulated threads run in one order, but the workspace that the
    // first run leaves must not change the second.
    if ctx.info().id.kind != DeviceKind::Emu || plan.workspace_bytes() > 0 {
        let (second, second_lse) = run(plan, index)?;
        Failure::check_same(&d, &second)?;
        Failure::check_same(&lse, &second_lse)?;
    }
    if case.batch_invariant {
        let (heads, pitch) = (case.heads.0, stored.d.row_stride() * case.dtype.bytes());
        for sequence in 0..case.lengths.len() {
            let index = index.alone(sequence);
            let plan = ctx.plan_attention(&attention(case, stored, &index)).map_err(Failure::of_plan)?;
            let (alone, _) = run(&plan, &index)?;
            let rows = index.q_offsets[0] as usize * heads..index.q_offsets[1] as usize * heads;
            let differs = rows.clone().find(|row| {
                let at = stored.d.range().start + row * pitch;
                let bytes = at..at + case.dims.1 * case.dtype.bytes();
                d[bytes.clone()] != alone[bytes]
            });
            differs.map_or(Ok(()), |row| Err(Failure::DependsOnBatch(row)))?;
        }
    }
    Ok(())
}

fn attention(case: &AttentionCase, stored: &Stored, index: &Index) -> Attention {
    let ((heads, kv_heads), (qk, v_dim)) = (case.heads, case.dims);
    let (queries, keys) = (api_queries_of(case, index.sequences), api_keys(case));
    let strides = |operand: &Operand| ((heads * operand.row_stride()) as u64, operand.row_stride() as u64);
    let ((q_token, q_head), (d_token, d_head)) = (strides(&stored.q), strides(&stored.d));
    let mut attention = Attention::new(case.dtype, heads, kv_heads, qk, queries, keys)
        .v_dim(v_dim)
        .kv_formats(case.formats().k, case.formats().v)
        .q_strides(q_token, q_head)
        .d_strides(d_token, d_head)
        .k_strides(stored.k.strides)
        .v_strides(stored.v.strides)
        .alignment(stored.q.alignment())
        .kv_alignment(stored.k.alignment.min(stored.v.alignment));
    if case.causal {
        attention = attention.causal();
    }
    if let Some(window) = case.window {
        attention = attention.window(window);
    }
    if let Some(mask) = case.mask {
        attention = attention.mask(mask.bits);
    }
    if case.sinks {
        attention = attention.sinks();
    }
    if case.gated {
        let (token, head) = strides(&stored.gate);
        attention = attention.gated().gate_strides(token, head);
    }
    if let Some(scale) = case.scale {
        attention = attention.scale(scale);
    }
    if let Some(cap) = case.soft_cap {
        attention = attention.soft_cap(cap);
    }
    if case.lse {
        attention = attention.log_sum_exp();
    }
    if case.batch_invariant { attention.batch_invariant() } else { attention }
}

/// Contents of the buffers around D and the log-sum-exp after a
/// run.
fn run_on(
    ctx: &Context,
    plan: &AttentionPlan,
    case: &AttentionCase,
    stored: &Stored,
    given: &Given,
    index: &Index,
    workspace: &mut Workspace,
) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let (mut d, mut lse) = (ctx.upload(&stored.d.poison())?, ctx.upload(&stored.lse.poison())?);
    let [q_offsets, kv_offsets, lengths] =
        [&index.q_offsets, &index.kv_offsets, &index.lengths].map(|words| ctx.upload(words));
    let (q_offsets, kv_offsets, lengths, table) = (q_offsets?, kv_offsets?, lengths?, ctx.upload(&index.table)?);
    let paged = matches!(case.places, AttentionStorage::Paged(_));
    let mut args = AttentionArgs::new(
        given.q.slice(stored.q.range())?,
        given.k.slice(stored.k.range.clone())?,
        given.v.slice(stored.v.range.clone())?,
        d.slice_mut(stored.d.range())?,
    );
    let formats = case.formats();
    args.k_factors = formats.k.has_factors().then(|| (&given.k_factors).into());
    args.v_factors = formats.v.has_factors().then(|| (&given.v_factors).into());
    args.k_scales = formats.k.has_scales().then(|| (&given.k_scales).into());
    args.v_scales = formats.v.has_scales().then(|| (&given.v_scales).into());
    args.q_offsets = case.ragged.then(|| (&q_offsets).into());
    args.kv_offsets = (case.places == AttentionStorage::Offsets).then(|| (&kv_offsets).into());
    args.kv_lengths = (paged || matches!(case.places, AttentionStorage::Lengths(_))).then(|| (&lengths).into());
    args.block_table = paged.then(|| (&table).into());
    args.mask = case.mask.map(|_| (&given.mask).into());
    args.sinks = case.sinks.then(|| (&given.sinks).into());
    args.gate = if case.gated { Some(given.gate.slice(stored.gate.range())?) } else { None };
    args.lse = if case.lse { Some(lse.slice_mut(stored.lse.range())?) } else { None };
    args.workspace = Some(workspace);
    plan.run(&ctx.default_stream(), args)?;
    let written = (ctx.download(&d)?, ctx.download(&lse)?);
    d.raw().check_guards()?;
    lse.raw().check_guards()?;
    Ok(written)
}

/// Checks the result of every query, and that nothing else was
/// written.
fn check(
    case: &AttentionCase,
    stored: &Stored,
    rows: &[Option<Row>],
    score_error: f64,
    (d, lse): (&[u8], &[u8]),
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let v_dim = case.dims.1;
    let (all, sums) = (stored.d.decode(d), stored.lse.decode(lse));
    let (mut got, mut expected) = (Vec::new(), Vec::<&Row>::new());
    for (row, oracle) in rows.iter().enumerate() {
        let values = &all[row * v_dim..][..v_dim];
        match oracle {
            Some(oracle) => {
                got.extend_from_slice(values);
                expected.push(oracle);
            }
            None => {
                let start = stored.d.range().start + row * stored.d.row_stride() * case.dtype.bytes();
                let bytes = start..start + v_dim * case.dtype.bytes();
                let written = bytes.clone().find(|&byte| d[byte] != 0xff);
                written.map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
            }
        }
    }
    stored.d.first_written_outside(d).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    stored.lse.first_written_outside(lse).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    let magnitude = expected.iter().map(|row| row.magnitude).fold(0.0, f64::max);
    let of_scores = (magnitude * score_error).powi(2);
    let tolerance = rounded_to(case.dtype, limit(case.dtype) + of_scores);
    let values: Vec<f64> = expected.iter().flat_map(|row| row.values.iter().copied()).collect();
    let energy: Vec<f64> = expected.iter().flat_map(|row| row.energy.iter().copied()).collect();
    let floor: Vec<f64> = expected.iter().flat_map(|row| row.floor.iter().copied()).collect();
    let comparison = compare(&got, &Expected { m: expected.len(), n: v_dim, values, energy, floor }, tolerance);
    outcome.comparison = Some(comparison);
    outcome.limit = Some(tolerance.nmse);
    if !comparison.within(tolerance) {
        return Err(Failure::Inaccurate(comparison));
    }
    for (place, oracle) in rows.iter().enumerate().filter(|_| case.lse) {
        let (row, column, got) = (place / case.heads.0, place % case.heads.0, f64::from(sums[place]));
        let Some(oracle) = oracle else { continue };
        let of_scores = score_error * oracle.magnitude;
        let near = (got - oracle.lse).abs() <= 2e-5 * (1.0 + oracle.lse.abs()) + of_scores;
        let same =
            got == oracle.lse || (!oracle.lse.is_finite() && oracle.lse != f64::NEG_INFINITY && !got.is_finite());
        if !near && !same {
            return Err(Failure::WrongLogSumExp(Mismatch { row, column, expected: oracle.lse, got }));
        }
    }
    Ok(())
}
