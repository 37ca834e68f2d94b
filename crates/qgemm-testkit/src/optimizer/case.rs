//! A case of `optimizer` (SGD, AdamW), as data, and the suite.

use std::fmt;

use qgemm_api::{Optimizer, OptimizerStep, UpdateKind, UpdateRule};
use qgemm_formats::DType;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::activations::{ActivationKind, activations};
use crate::random::{gap, pick, skewed};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<OptimizerCase>] = &[
    group("optimizer_rules", "every rule, type of gradient and copy, at sizes around those of threads", rules),
    group(
        "optimizer_steps",
        "early and late steps, weight decay, gradient scales, gradients that are not finite",
        steps,
    ),
];

const LENGTHS: [usize; 7] = [1, 7, 8, 513, 2048, 4099, 70_000];

/// An optimizer step to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerCase {
    /// Number of parameters.
    pub len: usize,
    /// The update rule.
    pub rule: UpdateRule,
    /// Type of the gradient.
    pub gradient: DType,
    /// Type of the copy.
    pub copy: Option<DType>,
    /// The step.
    pub step: OptimizerStep,
    /// Kind of gradient.
    pub values: ActivationKind,
    /// Offset of operands from an aligned address, in elements.
    pub offset: usize,
    /// Seed of all random values.
    pub seed: u64,
}

impl OptimizerCase {
    /// The tenth step of `len` parameters, aligned, with weight
    /// decay.
    pub fn new(len: usize, kind: UpdateKind, gradient: DType) -> Self {
        let rule = match kind {
            UpdateKind::AdamW => UpdateRule::AdamW { beta1: 0.9, beta2: 0.98, eps: 1e-6 },
            UpdateKind::Sgd => UpdateRule::Sgd { momentum: 0.0 },
            UpdateKind::Momentum => UpdateRule::Sgd { momentum: 0.9 },
        };
        let step = OptimizerStep::new(10, 0.2).weight_decay(0.1);
        Self { len, rule, gradient, copy: None, step, values: ActivationKind::Normal, offset: 0, seed: 1 }
    }

    /// The description for the API.
    pub(super) fn optimizer(&self) -> Optimizer {
        let optimizer = Optimizer::adamw(self.len).rule(self.rule).gradient_dtype(self.gradient);
        self.copy.into_iter().fold(optimizer, Optimizer::copy)
    }

    /// Parameters, gradient, first and second moments.
    pub(super) fn inputs(&self) -> [Vec<f32>; 4] {
        let drawn = |kind, dtype, salt: u64| activations(kind, 1, self.len, dtype, self.seed ^ salt);
        let normal = |salt| drawn(ActivationKind::Normal, DType::F32, salt);
        let second = normal(0xb2).into_iter().map(|value| value * value * 0.5).collect();
        [normal(0x3), drawn(self.values, self.gradient, 0x9), normal(0xb1), second]
    }
}

fn rules() -> Vec<OptimizerCase> {
    let mut cases: Vec<OptimizerCase> = Vec::new();
    for (i, len) in LENGTHS.into_iter().enumerate() {
        for kind in UpdateKind::ALL {
            for (j, gradient) in DType::ALL.into_iter().enumerate() {
                let copy = [None, Some(DType::BF16), Some(DType::F16)][(i + j) % 3];
                let offset = [0, 0, 1, 3][cases.len() % 4];
                let seed = cases.len() as u64;
                cases.push(OptimizerCase { copy, offset, seed, ..OptimizerCase::new(len, kind, gradient) });
            }
        }
    }
    cases
}

fn steps() -> Vec<OptimizerCase> {
    let steps = [
        OptimizerStep::new(1, 0.1),
        OptimizerStep::new(2, 0.3).weight_decay(0.5),
        OptimizerStep::new(1_000_000, 0.05).gradient_scale(0.125),
        OptimizerStep::new(3, 0.1).gradient_scale(-2.0).weight_decay(1.0),
    ];
    let values = [ActivationKind::Normal, ActivationKind::Outliers, ActivationKind::NotFinite];
    let mut cases = Vec::new();
    for (i, step) in steps.into_iter().enumerate() {
        for kind in UpdateKind::ALL {
            for (j, values) in values.into_iter().enumerate() {
                let case = OptimizerCase::new(1000, kind, DType::ALL[(i + j) % 3]);
                cases.push(OptimizerCase { step, values, copy: Some(DType::BF16), seed: cases.len() as u64, ..case });
            }
        }
    }
    cases
}

/// The random case of `seed`.
pub(super) fn random_case(seed: u64) -> OptimizerCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let (kind, gradient) = (pick(rng, &UpdateKind::ALL), pick(rng, &DType::ALL));
    let step = OptimizerStep::new(rng.random_range(1..2000), pick(rng, &[0.1, 0.5]));
    OptimizerCase {
        copy: pick(rng, &[None, Some(DType::F16), Some(DType::BF16)]),
        step: step.weight_decay(pick(rng, &[0.0, 0.1])).gradient_scale(pick(rng, &[1.0, 0.25])),
        values: pick(rng, &[ActivationKind::Normal, ActivationKind::Outliers, ActivationKind::PositiveMean]),
        offset: gap(rng, 8),
        seed,
        ..OptimizerCase::new(skewed(rng, 200_000), kind, gradient)
    }
}

/// A line for tables: `1000 adamw bf16 normal step=10`, then
/// non-default fields.
impl fmt::Display for OptimizerCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, rule, gradient, copy, step, values, offset, seed } = self;
        write!(f, "{len} {} {gradient} {} step={} rate={}", rule.kind(), values.name(), step.number, step.rate)?;
        if let Some(dtype) = copy {
            write!(f, " copy={dtype}")?;
        }
        for (name, value, plain) in
            [("decay", step.weight_decay, 0.0), ("scale", step.gradient_scale, 1.0), ("offset", *offset as f32, 0.0)]
        {
            if value != plain {
                write!(f, " {name}={value}")?;
            }
        }
        write!(f, " seed={seed}")
    }
}
