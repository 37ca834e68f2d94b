//! Problems of the grid: products of real models and of their shards, and
//! the forms that few kernels serve.

use qgemm_api::{Activation, Context, DType, DescribedWeight, ExpertProblem, Format, Problem, XFormat, XPrecision};

/// N, K, and whether it is a gated pair: 7B to 70B models, shards of
/// these, small models, and few rows.
const SHAPES: [(usize, usize, bool); 24] = [
    (4096, 4096, false),
    (11008, 4096, true),
    (4096, 11008, false),
    (6144, 4096, false),
    (14336, 4096, true),
    (14336, 4096, false),
    (4096, 14336, false),
    (1024, 4096, false),
    (128_256, 4096, false),
    (8192, 8192, false),
    (28672, 8192, true),
    (8192, 28672, false),
    (1280, 8192, false),
    (3584, 8192, true),
    (8192, 3584, false),
    (5120, 13824, false),
    (2560, 9728, false),
    (2048, 2048, false),
    (8960, 1536, true),
    (1536, 8960, false),
    (256, 2048, false),
    (896, 896, false),
    (4864, 896, true),
    (384, 1536, false),
];
/// Shapes of the forms that are not the usual ones.
const FEW_SHAPES: [(usize, usize, bool); 6] = [
    (4096, 4096, false),
    (14336, 4096, true),
    (4096, 14336, false),
    (1280, 8192, false),
    (28672, 8192, false),
    (896, 896, false),
];
/// Tokens, with the borders of tiles and of waves.
const TOKENS: [usize; 44] = [
    1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 24, 32, 33, 40, 48, 64, 65, 80, 96, 112, 128, 129, 160, 192, 224, 256, 257,
    320, 384, 448, 512, 576, 640, 768, 896, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 8192,
];
const FEW_TOKENS: [usize; 12] = [1, 2, 4, 8, 16, 24, 48, 64, 128, 256, 512, 2048];
/// Features, experts and top-k of layers, and whether they are gated.
const LAYERS: [(usize, usize, bool, usize, usize); 9] = [
    (14336, 4096, true, 8, 2),
    (4096, 14336, false, 8, 2),
    (768, 2048, true, 128, 8),
    (2048, 768, false, 128, 8),
    (2048, 7168, true, 256, 8),
    (7168, 2048, false, 256, 8),
    (2880, 2880, true, 32, 4),
    (1024, 2048, true, 64, 8),
    (1792, 4096, true, 8, 2),
];

/// A problem of the grid.
pub enum Work {
    Gemm(Problem),
    Experts(ExpertProblem),
}

/// A problem with its text.
pub struct Case {
    pub text: String,
    pub work: Work,
}

/// All problems of a weight format.
///
/// # Errors
/// When a weight is too large.
pub fn cases(ctx: &Context, format: Format) -> anyhow::Result<Vec<Case>> {
    let mut all = Vec::new();
    for (n, k, gated) in SHAPES.into_iter().filter(|&(_, k, _)| format.check_k(k).is_ok()) {
        let weight = described(ctx, format, n, k, gated)?;
        for x in [DType::F16, DType::BF16] {
            all.extend(TOKENS.map(|m| case(&weight, (m, n, k), x.name(), usual(weight.problem(m), x, gated))));
        }
    }
    for (n, k, gated) in FEW_SHAPES.into_iter().filter(|&(_, k, _)| format.check_k(k).is_ok()) {
        let weight = described(ctx, format, n, k, gated)?;
        for m in FEW_TOKENS {
            all.extend(forms(&weight, m, gated).map(|(form, problem)| case(&weight, (m, n, k), &form, problem)));
        }
    }
    for (n, k, gated, experts, top_k) in LAYERS.into_iter().filter(|&(_, k, ..)| format.check_k(k).is_ok()) {
        let layer = described(ctx, format, n, k, gated)?.experts(experts)?;
        for tokens in TOKENS {
            let shape = format!("{tokens}x{n}x{k} {format}, {top_k} of {experts} experts");
            let rows = (tokens * top_k).div_ceil(experts);
            let forms = [
                ("f16", usual_rows(layer.indexed(tokens, top_k), DType::F16.into(), gated)),
                ("bf16, lists", usual_rows(layer.indexed(tokens, top_k).listed(), DType::BF16.into(), gated)),
                ("f16, sorted", usual_rows(layer.contiguous(tokens * top_k), DType::F16.into(), gated)),
                ("f16, masked", usual_rows(layer.masked(rows), DType::F16.into(), gated)),
            ];
            let plain = forms.into_iter().map(|(form, problem)| (form.to_owned(), problem));
            let x_formats = XFormat::ALL.into_iter().filter(|_| FEW_TOKENS.contains(&tokens)).map(|x| {
                let problem = layer.indexed(tokens, top_k).listed();
                (format!("X in {x}"), usual_rows(problem, x, gated))
            });
            let of_form = |(form, problem)| Case { text: format!("{shape}, {form}"), work: Work::Experts(problem) };
            all.extend(plain.chain(x_formats).map(of_form));
        }
    }
    Ok(all)
}

fn described(ctx: &Context, format: Format, n: usize, k: usize, gated: bool) -> anyhow::Result<DescribedWeight> {
    let weight = ctx.describe_weight(format, n, k)?;
    Ok(if gated { weight.gated()? } else { weight })
}

fn case(weight: &DescribedWeight, (m, n, k): (usize, usize, usize), form: &str, problem: Problem) -> Case {
    Case { text: format!("{m}x{n}x{k} {}, {form}", weight.format()), work: Work::Gemm(problem) }
}

fn usual(problem: Problem, x: impl Into<XFormat>, gated: bool) -> Problem {
    let problem = problem.x_format(x.into()).d_dtype(DType::F16);
    if gated { problem.activation(Activation::Silu) } else { problem }
}

fn usual_rows(problem: ExpertProblem, x: XFormat, gated: bool) -> ExpertProblem {
    problem.each(|each| usual(each, x, gated))
}

/// Other forms of a product: exact and quantized X, an X that kernels cannot
/// copy, permuted weights, plans with limits.
fn forms(weight: &DescribedWeight, m: usize, gated: bool) -> impl Iterator<Item = (String, Problem)> {
    let (weight, permuted) = (*weight, weight.permuted());
    let x_formats = XFormat::ALL.into_iter().map(move |x| (format!("X in {x}"), usual(weight.problem(m), x, gated)));
    let plain = |problem| usual(problem, DType::F16, gated);
    let own = [
        ("exact f32", usual(weight.problem(m), DType::F32, gated).x_precision(XPrecision::Exact)),
        ("f32 to int8", usual(weight.problem(m), DType::F32, gated).x_precision(XPrecision::Int8)),
        ("f16 to e4m3", plain(weight.problem(m)).x_precision(XPrecision::E4M3)),
        ("f16, batch-invariant", plain(weight.problem(m)).batch_invariant(true)),
        ("f16, no workspace", plain(weight.problem(m)).max_workspace(0)),
        ("f16, unaligned", plain(weight.problem(m)).x_alignment(2)),
        ("f16, unaligned, no workspace", plain(weight.problem(m)).x_alignment(2).max_workspace(0)),
        ("bf16, unaligned, no workspace", usual(weight.problem(m), DType::BF16, gated).x_alignment(2).max_workspace(0)),
        ("f16, transposed", plain(weight.problem(m)).x_transposed()),
        ("f16, permuted", plain(permuted.problem(m))),
    ];
    own.into_iter().map(|(form, problem)| (form.to_owned(), problem)).chain(x_formats)
}
