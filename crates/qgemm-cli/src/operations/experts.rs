//! `--op experts` of the command: cases, explanation and measurement of mixture-of-experts products.

use std::fmt;

use anyhow::ensure;
use clap::ValueEnum;
use qgemm_api::{
    Context, DType, ExpertArgs, ExpertProblem, Experts, Format, HostExperts, MoeArgs, MoeLayer, PlanRecord,
    Quantization, expert_lists,
};

use super::gemm::quantized_x;
use qgemm_testkit::{Case, ExpertCase, FormCase, Selection, TestCase, WeightKind};

use crate::bench::subject::{normal_rows, repeated_rows};
use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies_of_part};
use crate::choice::{self, FormatChoice, Shape, Sizes};
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "MxNxK of each expert: tokens x output features x input features";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--format", "--family", "--x-format"];

/// Assignment of rows to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// Rows sorted by expert, with offsets.
    Contiguous,
    /// A fixed capacity per expert, with counts.
    Masked,
    /// Slots with expert ids. A token's slots share X.
    Indexed,
    /// As `Indexed`, with the slot lists of experts.
    Listed,
    /// A whole MoE layer: routing of f32 logits, gate and up of N
    /// features with SiLU, down, combine.
    Layer,
}

/// A MoE GEMM to measure: `shape.m` tokens with `top_k` experts
/// each.
pub struct Subject {
    shape: Shape,
    experts: usize,
    top_k: usize,
    form: Form,
    format: Format,
    x_dtype: DType,
    zipf: bool,
    even: bool,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape, experts, top_k, format, .. } = self;
        write!(f, "{shape} {experts}/{top_k} {format}")
    }
}

/// Every shape with every format and form of the options.
///
/// # Errors
/// When a shape is invalid, a format cannot store it, or `top_k`
/// exceeds the experts.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => vec![Shape { m: 1, n: 768, k: 2048 }, Shape { m: 64, n: 768, k: 2048 }],
        _ => crate::choice::gemm_shapes(&args.shape)?,
    };
    let (experts, top_k) = (args.experts, args.top_k);
    ensure!(top_k > 0 && top_k <= experts, "--top-k {top_k}: expected 1 to {experts}, the number of experts");
    let formats = match args.format {
        Some(choice) => choice.formats(),
        None => vec!["q4_k".parse()?],
    };
    let forms = args.form.map_or(Form::value_variants().to_vec(), |form| vec![form]);
    let mut subjects = Vec::new();
    for &shape in &shapes {
        for &format in &formats {
            match format.check_k(shape.k) {
                Ok(()) => {}
                Err(error) if args.format == Some(FormatChoice::All) => {
                    eprintln!("left out: {error}");
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            let Args { x_dtype, zipf, even, .. } = *args;
            let of = |&form: &Form| Subject { shape, experts, top_k, form, format, x_dtype, zipf, even };
            subjects.extend(forms.iter().map(of));
        }
    }
    Ok(subjects)
}

impl Subject {
    /// The expert id of every slot. Tokens take different experts in
    /// no simple order.
    /// Experts have about equal shares, or shares by Zipf's law, or
    /// exactly equal shares.
    fn ids(&self) -> Vec<usize> {
        if self.even {
            return (0..self.shape.m * self.top_k).map(|slot| slot % self.experts).collect();
        }
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        let token = move |_| {
            // A partial shuffle: a token's experts are distinct.
            let mut all: Vec<usize> = (0..self.experts).collect();
            for i in 0..self.top_k {
                let share = |expert: usize| if self.zipf { ZIPF_SCALE / (expert + 1) } else { 1 };
                let mut left = random(all[i..].iter().map(|&expert| share(expert)).sum());
                let drawn = all[i..].iter().position(|&expert| {
                    let is_drawn = left < share(expert);
                    left = left.saturating_sub(share(expert));
                    is_drawn
                });
                all.swap(i, i + drawn.unwrap_or(0));
            }
            all.truncate(self.top_k);
            all
        };
        (0..self.shape.m).flat_map(token).collect()
    }

    /// Number of experts with rows.
    fn used(&self) -> usize {
        let mut used = self.ids();
        used.sort_unstable();
        used.dedup();
        used.len()
    }

    /// The problem, its index, and the number of rows of X and D.
    fn problem(&self, experts: &Experts) -> (ExpertProblem, Vec<u32>, [usize; 2]) {
        let Shape { m: tokens, .. } = self.shape;
        let slots = tokens * self.top_k;
        let ids = self.ids();
        let mut counts = vec![0u32; self.experts];
        ids.iter().for_each(|&id| counts[id] += 1);
        match self.form {
            Form::Contiguous => {
                let mut offsets = vec![0];
                counts.iter().for_each(|count| offsets.push(offsets[offsets.len() - 1] + count));
                (ExpertProblem::contiguous(experts, slots), offsets, [slots, slots])
            }
            Form::Masked => {
                let capacity = counts.iter().max().map_or(1, |&most| most.max(1) as usize);
                let rows = capacity * self.experts;
                (ExpertProblem::masked(experts, capacity), counts, [rows, rows])
            }
            Form::Indexed | Form::Listed | Form::Layer => {
                let words = ids.iter().map(|&id| id as u32).collect();
                let problem = ExpertProblem::indexed(experts, tokens, self.top_k);
                let problem = if self.form == Form::Listed { problem.listed() } else { problem };
                (problem, words, [tokens, slots])
            }
        }
    }

    /// Slot lists of experts, as in [`expert_lists`].
    fn lists(&self) -> Vec<u8> {
        let ids = self.ids();
        let mut slots: Vec<u32> = (0..ids.len() as u32).collect();
        slots.sort_by_key(|&slot| ids[slot as usize]);
        let offset = |expert: usize| ids.iter().filter(|&&id| id < expert).count() as u32;
        let bytes = |words: Vec<u32>| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let mut lists = bytes((0..=self.experts).map(offset).collect());
        lists.resize(expert_lists(self.experts, ids.len()).map_or(0, |[_, slots]| slots.start), 0);
        lists.extend(bytes(slots));
        lists
    }

    /// Minimum traffic of a run: weights of experts with rows, X and
    /// D.
    fn bytes(&self, rows: [usize; 2]) -> f64 {
        let Shape { n, k, .. } = self.shape;
        let weights = (self.used() * self.format.row_bytes(k) * n) as f64;
        let slots = (self.shape.m * self.top_k) as f64;
        let x_rows = (rows[0] as f64).min(slots);
        weights + (x_rows * k as f64 + slots * n as f64) * self.x_dtype.bytes() as f64
    }
}

/// Denominator of Zipf shares.
const ZIPF_SCALE: usize = 1 << 20;

/// Times a whole layer, rotating copies of the weights.
fn measure_layer(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { shape: Shape { m, n, k }, experts, top_k, format, x_dtype, .. } = subject;
    let quantization = args.x_format.map(|format| Quantization::new(m, k, x_dtype, format));
    let gate = repeated_rows(format, n, k)?;
    let ups = HostExperts::gated(&vec![(gate.clone(), gate); experts])?;
    let downs = HostExperts::of_stacked(&repeated_rows(format, experts * k, n)?, experts)?;
    let layer = || -> anyhow::Result<_> {
        let (up, down) = (ctx.load_experts(&ups)?, ctx.load_experts(&downs)?);
        let bytes = up.bytes() + down.bytes();
        let layer = ctx.moe_layer(&up, &down, top_k, |moe| {
            let moe = match &quantization {
                Some(quantization) => moe.x_quantization(quantization),
                None => moe,
            };
            moe.x_dtype(x_dtype)
                .d_dtype(x_dtype)
                .x_precision(args.x_precision)
                .activation(args.activation)
                .routed(DType::F32, |routing| routing.renormalized())
        })?;
        Ok((layer, bytes))
    };
    let (first, bytes) = layer()?;
    let mut layers = vec![first];
    let count = copies_of_part(ctx, bytes * subject.used() / experts, bytes);
    while layers.len() < count {
        layers.push(layer()?.0);
    }
    let mut logits = vec![0.0f32; m * experts];
    for (slot, id) in subject.ids().into_iter().enumerate() {
        logits[slot / top_k * experts + id] = 4.0 + (slot % top_k) as f32;
    }
    let (x, logits) = (ctx.upload(&normal_rows(x_dtype, m, k))?, ctx.upload(&logits)?);
    let quantized = quantization.map(|quantization| quantized_x(ctx, &quantization, &x)).transpose()?;
    let mut d = ctx.allocate(m * k * x_dtype.bytes())?;
    let mut workspace = layers[0].workspace(m)?;
    layers[1..].iter().try_for_each(|layer| layer.prepare(m).map(drop))?;
    let stream = ctx.new_stream()?;
    let name = {
        let plan = layers[0].plan(m)?;
        format!("{} launches, {}", plan.launches(), plan.up().kernel_name())
    };
    let launch = |layer: &MoeLayer| {
        let mut args = match &quantized {
            Some((x, _)) => MoeArgs::from_logits(x, &logits, &mut d),
            None => MoeArgs::from_logits(&x, &logits, &mut d),
        };
        args.x_factor = quantized.as_ref().and_then(|(_, factor)| factor.as_ref()).map(Into::into);
        layer.run(&stream, m, args, &mut workspace)
    };
    let timing = time_launches(ctx, &stream, &layers, args.pace(), launch)?;
    Ok(BenchRow {
        shape: format!("{} {experts}/{top_k}", subject.shape),
        format: format!("{format} layer"),
        x_dtype: args.x_name(),
        kernel: name,
        kernel_id: None,
        flops: 2.0 * (m * top_k * n * k * 3) as f64 / timing.median,
        ..BenchRow::timed(
            ctx,
            timing,
            (subject.used() * (2 * n * format.row_bytes(k) + k * format.row_bytes(n))) as f64,
            bandwidth,
            layers.len(),
        )
    })
}

/// Times the planned kernel of a subject, rotating copies of the
/// weights.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    if subject.form == Form::Layer {
        return measure_layer(ctx, args, subject, bandwidth);
    }
    let &Subject { shape: Shape { m, n, k }, experts, top_k, form, format, x_dtype, .. } = subject;
    let host = HostExperts::of_stacked(&repeated_rows(format, experts * n, k)?, experts)?;
    let first = ctx.load_experts(&host)?;
    let (problem, index, rows) = subject.problem(&first);
    let problem = problem.each(|problem| {
        let problem = problem.x_format(args.x_format.unwrap_or(x_dtype.into())).x_precision(args.x_precision);
        let problem = problem.d_dtype(x_dtype);
        match &args.family {
            Some(family) => problem.family(family),
            None => problem,
        }
    });
    let problem = if args.index_ready { problem.index_ready() } else { problem };
    let plan = match args.candidate {
        None => ctx.plan_experts(&problem)?,
        Some(candidate) => {
            let mut all = ctx.plan_experts_candidates(&problem)?;
            ensure!(candidate < all.len(), "--candidate {candidate}: there are {} candidates", all.len());
            all.swap_remove(candidate)
        }
    };
    let count = copies_of_part(ctx, first.bytes() * subject.used() / experts, first.bytes());
    let mut weights = vec![first];
    while weights.len() < count {
        weights.push(ctx.load_experts(&host)?);
    }
    let x = ctx.upload(&normal_rows(x_dtype, rows[0], k))?;
    let quantization = args.x_format.map(|format| Quantization::new(rows[0], k, x_dtype, format));
    let quantized = quantization.map(|quantization| quantized_x(ctx, &quantization, &x)).transpose()?;
    let index = ctx.upload(&index.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())?;
    let lists = if form == Form::Listed { Some(ctx.upload(&subject.lists())?) } else { None };
    let mut d = ctx.allocate(rows[1] * n * x_dtype.bytes())?;
    let mut status = ctx.allocate(8)?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let launch = |weights: &Experts| {
        let mut args = match &quantized {
            Some((x, _)) => ExpertArgs::new(x, weights, &index, &mut d),
            None => ExpertArgs::new(&x, weights, &index, &mut d),
        }
        .status(&mut status);
        args.x_factor = quantized.as_ref().and_then(|(_, factor)| factor.as_ref()).map(Into::into);
        args.lists = lists.as_ref().map(Into::into);
        plan.run(&stream, args.workspace(&mut workspace))
    };
    let timing = time_launches(ctx, &stream, &weights, args.pace(), launch)?;
    let macs = (m * top_k * n * k) as f64;
    Ok(BenchRow {
        shape: format!("{} {experts}/{top_k}", subject.shape),
        format: format!("{format} {}", form.to_possible_value().map_or(String::new(), |v| v.get_name().to_owned())),
        x_dtype: args.x_name(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        unused_math: plan.unused_math().map(|math| math.name().to_owned()),
        flops: 2.0 * macs / timing.median,
        ..BenchRow::timed(ctx, timing, subject.bytes(rows), bandwidth, weights.len())
    })
}

/// Each shape with 8 experts and top-2, in every form and every
/// format that can store it. It is an error if a named format
/// cannot.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, wanted: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    const EXPERTS: usize = 8;
    const TOP_K: usize = 2;
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for shape in choice::gemm_shapes(&args.shape)? {
        for &format in &wanted.formats {
            if let Err(error) = format.check_k(shape.k) {
                ensure!(args.format == FormatChoice::All, "{shape}: {error}");
                eprintln!("left out: {error}");
                continue;
            }
            let indexed = |combined| FormCase::Indexed { top_k: TOP_K, x_per_slot: false, combined };
            let masked = FormCase::Masked { capacity: (shape.m * TOP_K).div_ceil(EXPERTS) };
            for form in [FormCase::Contiguous, masked, indexed(false), indexed(true)] {
                for x_dtype in DType::ALL {
                    let each = Case::new(format, shape.m, shape.n, shape.k);
                    let each = args.x_format.map_or(each, |format| each.with_x_format(format));
                    let (weights, norm) = (WeightKind::Raw, args.norm);
                    let each = Case { x_dtype, norm, weights, family: wanted.family, ..each };
                    cases.push(Box::new(ExpertCase::new(each, EXPERTS, shape.m, form)));
                }
            }
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let shape = sizes.gemm()?;
    let experts = args.weight(ctx, shape.n, shape.k)?.experts(args.experts)?;
    Ok(ctx.explain_experts(&experts.indexed(shape.m, args.top_k).each(|problem| args.state(problem)))?)
}
