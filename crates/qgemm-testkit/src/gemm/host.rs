//! The operands of a case in host memory.

use qgemm_api::{Context, FusedWeight, Weight, WeightOrder};
use qgemm_formats::{DType, Encoding, HostWeight};

use super::case::Case;
use super::oracle::{Added, Resolution, multiply, multiply_gated};
use crate::activations::{ActivationKind, activations};
use crate::expected::Expected;
use crate::norm::normalized_row;
use crate::weights::{TestWeightError, gated_weights, weight, with_channel_scale};

/// The weight of a case: one, a gated pair, or the parts of a
/// fused weight.
pub(crate) enum HostWeights {
    One(HostWeight),
    Pair([HostWeight; 2]),
    Fused { whole: HostWeight, parts: Vec<HostWeight> },
}

impl HostWeights {
    pub fn new(case: &Case) -> Result<Self, TestWeightError> {
        let Case { weights, format, n, k, act_order, seed, .. } = *case;
        // Transposed weights are loaded from plain values.
        if case.layout.w_transposed && case.epilogue.channel_scale {
            return Err(TestWeightError::TransposedWithScale);
        }
        let scaled = |weight, seed| match case.epilogue.channel_scale {
            true => with_channel_scale(weight, seed),
            false => Ok(weight),
        };
        if case.segments > 0 {
            let part = |(seed, rows): (u64, usize)| scaled(weight(weights, format, rows, k, act_order, seed)?, seed);
            let parts = (seed..).zip(case.segment_sizes()).map(part).collect::<Result<Vec<_>, _>>()?;
            let whole = HostWeight::concat_rows(&parts.iter().collect::<Vec<_>>())?;
            return Ok(HostWeights::Fused { whole, parts });
        }
        Ok(match case.gated {
            false => HostWeights::One(scaled(weight(weights, format, n, k, act_order, seed)?, seed)?),
            true => {
                let [gate, up] = gated_weights(weights, format, n, k, act_order, seed)?;
                HostWeights::Pair([scaled(gate, seed)?, scaled(up, !seed)?])
            }
        })
    }

    /// Column order; both weights of a pair share it.
    pub fn k_order(&self) -> Option<&[u32]> {
        match self {
            HostWeights::One(weight) | HostWeights::Pair([weight, _]) | HostWeights::Fused { whole: weight, .. } => {
                weight.k_order()
            }
        }
    }

    /// Whether `dtype` holds every value exactly.
    pub fn is_exact_in(&self, dtype: DType) -> bool {
        let weights = match self {
            HostWeights::One(weight) | HostWeights::Fused { whole: weight, .. } => std::slice::from_ref(weight),
            HostWeights::Pair(pair) => pair,
        };
        let holds = |row: Vec<f32>| dtype.decode(&dtype.encode(&row)) == row;
        weights.iter().all(|weight| (0..weight.n()).all(|n| holds(weight.dequantize_row(n))))
    }

    pub fn load(&self, ctx: &Context, transposed: bool) -> Result<Weight, qgemm_api::Error> {
        match self {
            HostWeights::One(weight) | HostWeights::Fused { whole: weight, .. } => load(ctx, weight, transposed),
            HostWeights::Pair([gate, up]) => ctx.load_gated(gate, up),
        }
    }

    /// Loads a fused weight with segments; `None` if the case's is
    /// not fused.
    pub fn load_fused(&self, ctx: &Context) -> Option<Result<FusedWeight, qgemm_api::Error>> {
        let HostWeights::Fused { parts, .. } = self else { return None };
        Some(ctx.load_fused(&parts.iter().collect::<Vec<_>>()))
    }

    pub fn multiply<X: Copy + Into<f64>>(&self, x: &[X], added: &Added<'_>) -> Expected {
        match self {
            HostWeights::One(weight) | HostWeights::Fused { whole: weight, .. } => multiply(weight, x, added),
            HostWeights::Pair([gate, up]) => multiply_gated([gate, up], x, added),
        }
    }
}

fn load(ctx: &Context, host: &HostWeight, transposed: bool) -> Result<Weight, qgemm_api::Error> {
    let Encoding::Plain(dtype) = host.format().encoding else { return ctx.load(host) };
    if !transposed {
        return ctx.load(host);
    }
    let (n, k) = (host.n(), host.k());
    let rows: Vec<Vec<f32>> = (0..n).map(|row| host.dequantize_row(row)).collect();
    let columns: Vec<f32> = (0..k).flat_map(|column| rows.iter().map(move |row| row[column])).collect();
    ctx.load_dense(&dtype.encode(&columns), dtype, n, k, WeightOrder::KN)
}

/// Contiguous operands of a case in host memory.
pub(crate) struct HostOperands {
    pub x: Vec<f32>,
    pub c: Vec<f32>,
    pub bias: Vec<f32>,
    pub token_scale: Vec<f32>,
    pub residual: Vec<f32>,
    /// Gamma of the norm of X, a value per column, if any.
    pub gamma: Vec<f32>,
    pub beta: Vec<f32>,
}

impl HostOperands {
    pub fn new(case: &Case) -> Self {
        // Exact cases add exact numbers only.
        let kind = if case.sums_are_exact() { ActivationKind::SmallIntegers } else { ActivationKind::Normal };
        let added = |rows, dtype: Option<DType>, salt| match dtype {
            Some(dtype) => activations(kind, rows, case.n, dtype, case.seed ^ salt),
            None => Vec::new(),
        };
        let of_columns = |dtype: Option<DType>, salt| match dtype {
            Some(dtype) => activations(ActivationKind::PositiveMean, 1, case.k, dtype, case.seed ^ salt),
            None => Vec::new(),
        };
        // Powers of two, over the magnitudes at which activations bend.
        let token_scale = |token: usize| [1.0, 0.25, 2.0, 0.0625, 0.5][(token + case.seed as usize) % 5];
        Self {
            x: activations(case.activations, case.m, case.k, case.x_dtype, case.seed),
            c: added(case.m, case.epilogue.c.map(|(_, dtype)| dtype), 0xc),
            bias: added(case.bias_rows(), case.epilogue.bias, 0xb1a5),
            token_scale: match case.epilogue.token_scale {
                true => (0..case.m).map(token_scale).collect(),
                false => Vec::new(),
            },
            residual: added(case.m, case.epilogue.residual, 0x4e5),
            gamma: of_columns(case.norm_function().and_then(|function| function.gamma), 0x9a3),
            beta: of_columns(case.norm_function().and_then(|function| function.beta), 0xbe7),
        }
    }

    /// The operands of one row.
    pub fn row(&self, case: &Case, row: usize) -> Self {
        self.rows(case, &[row], |row| row)
    }

    /// The operands of some rows. `x_row` maps a row to its row of X.
    pub fn rows(&self, case: &Case, rows: &[usize], x_row: impl Fn(usize) -> usize) -> Self {
        let part = |all: &[f32], width: usize, place: &dyn Fn(usize) -> usize| match all {
            [] => Vec::new(),
            all => rows.iter().flat_map(|&row| all[place(row) * width..][..width].to_vec()).collect(),
        };
        Self {
            x: part(&self.x, case.k, &x_row),
            c: part(&self.c, case.n, &|row| row),
            bias: self.bias.clone(),
            token_scale: part(&self.token_scale, 1, &|row| row),
            residual: part(&self.residual, case.n, &|row| row),
            gamma: self.gamma.clone(),
            beta: self.beta.clone(),
        }
    }

    /// X as the product reads it: normalized if the case has a norm,
    /// and rounded once.
    pub fn multiplied(&self, case: &Case) -> Vec<f32> {
        let Some(function) = case.norm_function() else { return self.x.clone() };
        let dtype = case.multiplied_dtype();
        let of_columns = |values: &[f32], missing: f32| match values {
            [] => vec![missing; case.k],
            values => values.to_vec(),
        };
        let (gamma, beta) = (of_columns(&self.gamma, 1.0), of_columns(&self.beta, 0.0));
        let rounded = |row: &[f32]| {
            let normalized = normalized_row(&function, row, &gamma, &beta);
            dtype.decode(&dtype.encode(&normalized.into_iter().map(|value| value as f32).collect::<Vec<_>>()))
        };
        self.x.chunks_exact(case.k).flat_map(rounded).collect()
    }

    pub fn added(&self, case: &Case, resolution: Resolution) -> Added<'_> {
        Added {
            alpha: case.epilogue.alpha,
            c: case.epilogue.c.filter(|(beta, _)| *beta != 0.0).map(|(beta, _)| (beta, &*self.c)),
            bias: case.epilogue.bias.map(|_| &*self.bias),
            token_scale: case.epilogue.token_scale.then_some(&*self.token_scale),
            activation: case.epilogue.activation,
            residual: case.epilogue.residual.map(|_| &*self.residual),
            resolution,
        }
    }
}
