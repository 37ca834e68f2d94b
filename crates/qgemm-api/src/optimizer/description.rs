//! Optimizer problem: the builder [`Optimizer`] and its validation into
//! a [`CheckedOptimizer`].

use qgemm_formats::DType;
use qgemm_hal::{CheckedOptimizer, StepFactors, UpdateRule};

use crate::error::Error;

/// Optimizer step, for
/// [`Context::plan_optimizer`](crate::Context::plan_optimizer).
///
/// Master weights and moments are f32, gradients of
/// any type, all contiguous.
///
/// ```text
/// AdamW:  m = β1·m + (1 − β1)·g      v = β2·v + (1 − β2)·g²
///         w = w − rate·decay·w − rate · (m / (1 − β1ᵗ)) / (√(v / (1 − β2ᵗ)) + eps)
/// SGD:    m = momentum·m + g          w = w − rate·decay·w − rate·m
/// ```
///
/// Weight decay is decoupled from the gradient. Numbers
/// that change per step are in device memory: the step `t`,
/// the rate, the decay, and a factor of the gradient.
/// [`OptimizerPlan::step`](crate::OptimizerPlan::step) makes these 16
/// bytes. Each replay of a captured CUDA graph reads them anew.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    len: usize,
    rule: UpdateRule,
    gradient: DType,
    copy: Option<DType>,
}

/// Parameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct OptimizerStep {
    /// Step number from 1. AdamW uses it for bias correction of the moments.
    pub number: u64,
    /// Learning rate.
    pub rate: f32,
    /// Weight decay, per unit of the learning rate.
    pub weight_decay: f32,
    /// Factor of the gradient, e.g. the inverse of a loss scale.
    pub gradient_scale: f32,
}

impl OptimizerStep {
    /// Step `number` (from 1), without weight decay and gradient scaling.
    pub const fn new(number: u64, rate: f32) -> Self {
        Self { number, rate, weight_decay: 0.0, gradient_scale: 1.0 }
    }

    /// Sets the weight decay.
    pub const fn weight_decay(self, share: f32) -> Self {
        Self { weight_decay: share, ..self }
    }

    /// Sets the gradient factor.
    pub const fn gradient_scale(self, factor: f32) -> Self {
        Self { gradient_scale: factor, ..self }
    }
}

impl Optimizer {
    /// AdamW for `len` parameters with an f32 gradient: β1 = 0.9, β2 = 0.999,
    /// eps = 10⁻⁸. With 0 parameters the plan launches nothing.
    pub const fn adamw(len: usize) -> Self {
        let rule = UpdateRule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
        Self { len, rule, gradient: DType::F32, copy: None }
    }

    /// SGD without momentum for `len` parameters with an f32 gradient.
    pub const fn sgd(len: usize) -> Self {
        Self { len, rule: UpdateRule::Sgd { momentum: 0.0 }, gradient: DType::F32, copy: None }
    }

    /// Sets the update rule with its parameters.
    pub fn rule(mut self, rule: UpdateRule) -> Self {
        self.rule = rule;
        self
    }

    /// Element type of the gradient.
    pub fn gradient_dtype(mut self, dtype: DType) -> Self {
        self.gradient = dtype;
        self
    }

    /// Also writes the parameters in f16 or bf16, rounded to nearest even,
    /// for products of the next step.
    pub fn copy(mut self, dtype: DType) -> Self {
        self.copy = Some(dtype);
        self
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedOptimizer, Error> {
        let &Self { len, rule, gradient, copy } = self;
        let share = "a number from 0 to below 1";
        let numbers = match rule {
            UpdateRule::AdamW { beta1, beta2, eps } => {
                check_number("eps", eps, "a finite number, not negative", eps.is_finite() && eps >= 0.0)?;
                vec![("beta1", beta1), ("beta2", beta2)]
            }
            UpdateRule::Sgd { momentum } => vec![("momentum", momentum)],
            _ => Vec::new(),
        };
        for (name, got) in numbers {
            check_number(name, got, share, (0.0..1.0).contains(&got))?;
        }
        if copy == Some(DType::F32) {
            return Err(Error::CopyInF32);
        }
        let bytes = len.checked_mul(DType::F32.bytes()).filter(|&bytes| isize::try_from(bytes).is_ok());
        match bytes {
            Some(_) => Ok(CheckedOptimizer { len, rule, gradient, copy }),
            None => Err(Error::ExtentOverflow { operand: "parameters", rows: 1, row_stride: len as u64 }),
        }
    }
}

/// Validated numbers of `step`, as stored in device memory.
pub(super) fn step_factors(rule: &UpdateRule, step: &OptimizerStep) -> Result<[f32; 4], Error> {
    let &OptimizerStep { number, rate, weight_decay, gradient_scale } = step;
    if number == 0 {
        return Err(Error::OptimizerNumber { name: "step", expected: "a number from 1", got: 0.0 });
    }
    for (name, got) in [("rate", rate), ("weight decay", weight_decay), ("gradient scale", gradient_scale)] {
        check_number(name, got, "a finite number", got.is_finite())?;
    }
    Ok(StepFactors::new(rule, number, rate, weight_decay, gradient_scale).to_array())
}

fn check_number(name: &'static str, got: f32, expected: &'static str, is_fit: bool) -> Result<(), Error> {
    if is_fit { Ok(()) } else { Err(Error::OptimizerNumber { name, expected, got: got.into() }) }
}
