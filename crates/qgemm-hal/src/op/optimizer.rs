//! `optimizer`: parameters moved against their gradient, elementwise.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use qgemm_formats::DType;

use super::{Operation, operands};
use crate::kernel_id::{KernelId, Name, spec};

/// How a gradient moves a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum UpdateRule {
    /// AdamW: `m = β1·m + (1 − β1)·g`, `v = β2·v + (1 − β2)·g²`, `w −= rate·m̂ / (√v̂ + eps)`, with moments corrected for their bias.
    AdamW {
        /// What the first moment is multiplied with.
        beta1: f32,
        /// What the second moment is multiplied with.
        beta2: f32,
        /// Added to the root of the corrected second moment.
        eps: f32,
    },
    /// SGD: `m = momentum·m + g`, `w −= rate·m`. Without momentum there is no moment.
    Sgd {
        /// What the moment is multiplied with.
        momentum: f32,
    },
}

/// A rule without its numbers: what kernels are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpdateKind {
    /// [`UpdateRule::AdamW`].
    AdamW,
    /// [`UpdateRule::Sgd`] without momentum.
    Sgd,
    /// [`UpdateRule::Sgd`] with momentum.
    Momentum,
}

impl UpdateKind {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::AdamW, Self::Sgd, Self::Momentum];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
        }
    }

    /// Moments of a parameter.
    pub const fn moments(self) -> usize {
        match self {
            Self::AdamW => 2,
            Self::Sgd => 0,
            Self::Momentum => 1,
        }
    }
}

impl fmt::Display for UpdateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for UpdateKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("`{text}` is no update rule: expected adamw, sgd or momentum"))
    }
}

impl UpdateRule {
    /// The numbers that kernels compute with.
    pub fn factors(&self) -> MomentFactors {
        match *self {
            Self::AdamW { beta1, beta2, eps } => {
                MomentFactors { decay1: beta1, gain1: 1.0 - beta1, decay2: beta2, gain2: 1.0 - beta2, eps }
            }
            Self::Sgd { momentum } => MomentFactors { decay1: momentum, gain1: 1.0, decay2: 0.0, gain2: 0.0, eps: 0.0 },
        }
    }

    /// What kernels are made for.
    pub fn kind(&self) -> UpdateKind {
        match *self {
            Self::AdamW { .. } => UpdateKind::AdamW,
            Self::Sgd { momentum: 0.0 } => UpdateKind::Sgd,
            Self::Sgd { .. } => UpdateKind::Momentum,
        }
    }
}

/// The numbers of a rule: `m = decay1·m + gain1·g`, `v = decay2·v + gain2·g²`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentFactors {
    /// What the first moment is multiplied with.
    pub decay1: f32,
    /// What the gradient is multiplied with before it is added to the first moment.
    pub gain1: f32,
    /// What the second moment is multiplied with.
    pub decay2: f32,
    /// What the gradient's square is multiplied with before it is added to the second moment.
    pub gain2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
}

/// The numbers of a step that change from step to step, in device memory as four f32 in this order: what a captured graph reads anew
/// at every replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFactors {
    /// What moves the parameter is multiplied with: the rate, of AdamW over the bias of the first moment.
    pub size: f32,
    /// The inverse root of the bias of the second moment; 1 where there is none.
    pub inverse_root_bias: f32,
    /// What the parameter itself is multiplied with and loses: rate times weight decay.
    pub decay: f32,
    /// What the gradient is multiplied with first.
    pub gradient_scale: f32,
}

impl StepFactors {
    /// Bytes in device memory.
    pub const BYTES: usize = 16;

    /// Of the step numbered `step`, from 1, computed in f64.
    pub fn new(rule: &UpdateRule, step: u64, rate: f32, weight_decay: f32, gradient_scale: f32) -> Self {
        let rate = f64::from(rate);
        let bias = |beta: f32| 1.0 - f64::from(beta).powf(step as f64);
        let (size, inverse_root_bias) = match *rule {
            UpdateRule::AdamW { beta1, beta2, .. } => (rate / bias(beta1), 1.0 / bias(beta2).sqrt()),
            UpdateRule::Sgd { .. } => (rate, 1.0),
        };
        Self {
            size: size as f32,
            inverse_root_bias: inverse_root_bias as f32,
            decay: (rate * f64::from(weight_decay)) as f32,
            gradient_scale,
        }
    }

    /// As they are stored in device memory.
    pub fn to_array(self) -> [f32; 4] {
        [self.size, self.inverse_root_bias, self.decay, self.gradient_scale]
    }
}

/// One step for `len` parameters in f32, whose moments are f32, too; validated by the API. All operands are contiguous.
///
/// With `g` the gradient times its scale, `w −= decay·w + size·u`, where `u` is `m / (√v·inverse_root_bias + eps)` of AdamW, and the moment
/// or `g` of SGD ([`StepFactors`]); all of it in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedOptimizer {
    /// Parameters; at least 1.
    pub len: usize,
    /// How they are moved.
    pub rule: UpdateRule,
    /// Element type of the gradient.
    pub gradient: DType,
    /// Element type of a copy of the parameters, rounded to nearest even, for products to read.
    pub copy: Option<DType>,
}

/// Descriptions are keys of plans: numbers are finite, and told apart by their bits.
impl Eq for CheckedOptimizer {}

impl Hash for CheckedOptimizer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let numbers = match self.rule {
            UpdateRule::AdamW { beta1, beta2, eps } => [beta1, beta2, eps],
            UpdateRule::Sgd { momentum } => [momentum, 0.0, 0.0],
        };
        (self.len, self.rule.kind(), numbers.map(f32::to_bits), self.gradient, self.copy).hash(state);
    }
}

operands! {
    /// What `optimizer` reads and writes.
    pub enum OptimizerOperand {
        /// The parameters, in f32.
        Weights: "the parameters" Accumulate,
        /// Their gradient.
        Gradient: "the gradient" Read,
        /// First moments, in f32.
        Moment1: "the first moments" Accumulate,
        /// Second moments, in f32.
        Moment2: "the second moments" Accumulate,
        /// The factors of the step.
        Step: "the step" Read,
        /// The parameters in 16 bits.
        Copy: "the copy" Write,
    }
}

spec! {
    /// What tells the kernels of `optimizer` apart. Types are told at run time.
    pub struct OptimizerSpec {
        /// Name of the rule.
        rule: Name,
    }
}

impl OptimizerSpec {
    /// Of a kernel for this kind of rule.
    pub const fn new(kind: UpdateKind) -> Self {
        Self { rule: Name::new(kind.name()) }
    }
}

/// A kernel of a family, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Share of the device's bandwidth that it reaches, per mille.
    pub efficiency: u32,
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerLaunch {
    /// The configuration.
    pub config: OptimizerConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedOptimizer {
    /// Name in tables and messages: `optimizer_adamw_bf16`.
    pub fn kernel_name(&self) -> String {
        format!("optimizer_{}_{}", self.rule.kind(), self.gradient)
    }
}

impl Operation for CheckedOptimizer {
    const NAME: &'static str = "optimizer";
    type Operand = OptimizerOperand;
    type Config = OptimizerConfig;
    type Plan = OptimizerLaunch;

    fn operands(&self) -> Vec<OptimizerOperand> {
        use OptimizerOperand as O;
        let moments = self.rule.kind().moments();
        let optional = [(moments > 0, O::Moment1), (moments > 1, O::Moment2), (self.copy.is_some(), O::Copy)];
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        [O::Weights, O::Gradient, O::Step].into_iter().chain(given).collect()
    }

    /// Parameters and moments are read and written.
    fn traffic(&self) -> f64 {
        let moved = (1 + self.rule.kind().moments()) * 2 * DType::F32.bytes();
        self.len as f64 * (moved + self.gradient.bytes() + self.copy.map_or(0, DType::bytes)) as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADAMW: UpdateRule = UpdateRule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };

    #[test]
    fn rules_have_the_operands_that_they_move() {
        use OptimizerOperand as O;
        let op = CheckedOptimizer { len: 10, rule: ADAMW, gradient: DType::BF16, copy: Some(DType::BF16) };
        assert_eq!(op.operands(), [O::Weights, O::Gradient, O::Step, O::Moment1, O::Moment2, O::Copy]);
        assert_eq!(op.traffic(), 280.0);
        let plain = CheckedOptimizer { rule: UpdateRule::Sgd { momentum: 0.0 }, copy: None, ..op };
        assert_eq!((plain.operands().len(), plain.traffic()), (3, 100.0));
        for kind in UpdateKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
    }

    #[test]
    fn bias_is_corrected_by_the_number_of_the_step() {
        let first = StepFactors::new(&ADAMW, 1, 0.1, 0.01, 1.0);
        // A first moment of one gradient is a tenth of it.
        assert!((first.size - 1.0).abs() < 1e-6 && (first.decay - 0.001).abs() < 1e-9, "{first:?}");
        let late = StepFactors::new(&ADAMW, 1_000_000, 0.1, 0.0, 1.0);
        assert_eq!((late.size, late.inverse_root_bias, late.decay), (0.1, 1.0, 0.0));
    }
}
