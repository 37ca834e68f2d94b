//! `optimizer`: optimizer step (SGD, AdamW), elementwise.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use qgemm_formats::DType;

use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Update rule.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum UpdateRule {
    /// AdamW: `m = β1·m + (1 − β1)·g`,
    /// `v = β2·v + (1 − β2)·g²`,
    /// `w −= rate·m̂ / (√v̂ + eps)`, with bias-corrected moments.
    AdamW {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the bias-corrected second moment.
        eps: f32,
    },
    /// SGD: `m = momentum·m + g`, `w −= rate·m`. Without
    /// momentum no moment is stored.
    Sgd {
        /// Decay of the moment.
        momentum: f32,
    },
}

/// Kind of update rule, which kernels are specialized for.
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
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::AdamW, Self::Sgd, Self::Momentum];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
        }
    }

    /// Moments for each parameter.
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
    /// Coefficients of the moments.
    pub fn factors(&self) -> MomentFactors {
        match *self {
            Self::AdamW { beta1, beta2, eps } => {
                MomentFactors { decay1: beta1, gain1: 1.0 - beta1, decay2: beta2, gain2: 1.0 - beta2, eps }
            }
            Self::Sgd { momentum } => MomentFactors { decay1: momentum, gain1: 1.0, decay2: 0.0, gain2: 0.0, eps: 0.0 },
        }
    }

    /// Kind of the rule.
    pub fn kind(&self) -> UpdateKind {
        match *self {
            Self::AdamW { .. } => UpdateKind::AdamW,
            Self::Sgd { momentum: 0.0 } => UpdateKind::Sgd,
            Self::Sgd { .. } => UpdateKind::Momentum,
        }
    }
}

/// Coefficients of the moments: `m = decay1·m + gain1·g`,
/// `v = decay2·v + gain2·g²`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentFactors {
    /// Decay of the first moment.
    pub decay1: f32,
    /// Factor of the gradient in the first moment.
    pub gain1: f32,
    /// Decay of the second moment.
    pub decay2: f32,
    /// Factor of the squared gradient in the second moment.
    pub gain2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
}

/// Numbers that change from step to step: four f32 in
/// device memory, in this order. A captured graph reads
/// them again at every replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFactors {
    /// Step size: the learning rate, for AdamW divided by the
    /// first moment's bias correction.
    pub size: f32,
    /// Inverse root of the second moment's bias correction; 1 without one.
    pub inverse_root_bias: f32,
    /// Relative decay of the parameter: learning rate times weight decay.
    pub decay: f32,
    /// Scale of the gradient.
    pub gradient_scale: f32,
}

impl StepFactors {
    /// Bytes in device memory.
    pub const BYTES: usize = 16;

    /// Factors of step number `step` (from 1), computed in f64.
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

    /// Layout in device memory.
    pub fn to_array(self) -> [f32; 4] {
        [self.size, self.inverse_root_bias, self.decay, self.gradient_scale]
    }
}

/// Optimizer step for `len` contiguous f32 parameters with f32
/// moments; validated by the API.
///
/// With `g` the scaled gradient, `w −= decay·w + size·u`, all
/// in f32. `u` is `m / (√v·inverse_root_bias + eps)` for AdamW,
/// and the moment or `g` for SGD ([`StepFactors`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedOptimizer {
    /// Parameters; at least 1.
    pub len: usize,
    /// The update rule.
    pub rule: UpdateRule,
    /// Element type of the gradient.
    pub gradient: DType,
    /// Element type of a copy of the parameters, rounded to nearest
    /// even, for products to read.
    pub copy: Option<DType>,
}

/// Plan cache key: numbers are finite and are
/// compared by their bits.
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
    /// Operands of `optimizer`.
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
        /// The 16-bit copy of the parameters.
        Copy: "the copy" Write,
    }
}

spec! {
    /// Kernel identity keys of `optimizer`. Types are run-time parameters.
    pub struct OptimizerSpec {
        /// The rule.
        rule: UpdateKind,
    }
}

impl OptimizerSpec {
    /// Key of a kernel for this kind of rule.
    pub const fn new(kind: UpdateKind) -> Self {
        Self { rule: kind }
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerLaunch {
    /// The config.
    pub config: OptimizerConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedOptimizer {
    /// Name in tables and messages: `optimizer_adamw_bf16`.
    pub fn kernel_name(&self) -> String {
        format!("optimizer_{}_{}", self.rule.kind(), self.gradient)
    }
}

impl Operation for CheckedOptimizer {
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

    fn describe(&self) -> String {
        let Self { len, rule, gradient, copy, .. } = self;
        let copy = copy.map_or(String::new(), |dtype| format!(", a copy in {dtype}"));
        format!("{} of {len} parameters by a gradient in {gradient}{copy}", rule.kind())
    }

    fn is_nothing(&self) -> bool {
        self.len == 0
    }

    fn config(plan: &OptimizerLaunch) -> &OptimizerConfig {
        &plan.config
    }

    fn estimate(plan: &OptimizerLaunch) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &OptimizerLaunch) -> KernelId {
        plan.config.kernel
    }

    fn noop_config(&self) -> Result<OptimizerConfig, Unsupported> {
        let kernel = KernelId::new("noop", None, Spec::Optimizer(OptimizerSpec::new(self.rule.kind())));
        Ok(OptimizerConfig { kernel, efficiency: 1000 })
    }
}

memory_bound!(CheckedOptimizer, OptimizerConfig, OptimizerLaunch, |_| 1);

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
        // After one gradient, the first moment is a tenth of it.
        assert!((first.size - 1.0).abs() < 1e-6 && (first.decay - 0.001).abs() < 1e-9, "{first:?}");
        let late = StepFactors::new(&ADAMW, 1_000_000, 0.1, 0.0, 1.0);
        assert_eq!((late.size, late.inverse_root_bias, late.decay), (0.1, 1.0, 0.0));
    }
}
