//! [`Optimizer`]: which parameters move how, and its validation into a [`CheckedOptimizer`].

use qgemm_formats::DType;
use qgemm_hal::{CheckedOptimizer, StepFactors, UpdateRule};

use crate::error::Error;

/// A step of an optimizer, described for [`Context::plan_optimizer`](crate::Context::plan_optimizer): parameters in f32 (master weights),
/// moments in f32, a gradient of any type, all contiguous.
///
/// ```text
/// AdamW:  m = β1·m + (1 − β1)·g      v = β2·v + (1 − β2)·g²
///         w = w − rate·decay·w − rate · (m / (1 − β1ᵗ)) / (√(v / (1 − β2ᵗ)) + eps)
/// SGD:    m = momentum·m + g          w = w − rate·decay·w − rate·m
/// ```
///
/// Weight decay is decoupled from the gradient. What changes from step to step (its number `t`, the rate, the decay, a factor of the
/// gradient) lies in device memory, 16 bytes that [`OptimizerPlan::step`](crate::OptimizerPlan::step) makes: a captured CUDA graph reads
/// them anew at every replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    len: usize,
    rule: UpdateRule,
    gradient: DType,
    copy: Option<DType>,
}

/// What is particular to one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct OptimizerStep {
    /// Its number, from 1: AdamW corrects moments, which begin at 0, by it.
    pub number: u64,
    /// The learning rate.
    pub rate: f32,
    /// What parameters lose, as a share a unit of rate.
    pub weight_decay: f32,
    /// What the gradient is multiplied with first: the inverse of a loss scale, say.
    pub gradient_scale: f32,
}

impl OptimizerStep {
    /// The step numbered `number`, from 1, without weight decay, with the gradient as it is.
    pub const fn new(number: u64, rate: f32) -> Self {
        Self { number, rate, weight_decay: 0.0, gradient_scale: 1.0 }
    }

    /// With this weight decay.
    pub const fn weight_decay(self, share: f32) -> Self {
        Self { weight_decay: share, ..self }
    }

    /// With this factor of the gradient.
    pub const fn gradient_scale(self, factor: f32) -> Self {
        Self { gradient_scale: factor, ..self }
    }
}

impl Optimizer {
    /// AdamW for `len` parameters, with β1 = 0.9, β2 = 0.999 and eps = 10⁻⁸, of a gradient in f32. There may be no parameters: such a plan
    /// launches nothing.
    pub const fn adamw(len: usize) -> Self {
        let rule = UpdateRule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
        Self { len, rule, gradient: DType::F32, copy: None }
    }

    /// SGD for `len` parameters, without momentum, of a gradient in f32.
    pub const fn sgd(len: usize) -> Self {
        Self { len, rule: UpdateRule::Sgd { momentum: 0.0 }, gradient: DType::F32, copy: None }
    }

    /// Another rule, with its numbers.
    pub fn rule(mut self, rule: UpdateRule) -> Self {
        self.rule = rule;
        self
    }

    /// Element type of the gradient.
    pub fn gradient_dtype(mut self, dtype: DType) -> Self {
        self.gradient = dtype;
        self
    }

    /// Writes the parameters in f16 or bf16, too, rounded to nearest even: what products of the next step read.
    pub fn copy(mut self, dtype: DType) -> Self {
        self.copy = Some(dtype);
        self
    }

    /// Validates everything that does not depend on the buffers of a run.
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

/// The numbers of `step` as they are stored in device memory, after checks.
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
