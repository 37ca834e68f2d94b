//! [`RmsNorm`], and the norm before a product.

use std::sync::Arc;

use candle_core::{DType, Error, Module, Result, Shape, Tensor, bail};
use qgemm_api::{Buffer, BufferMut, BufferRef, Norm, NormArgs, NormFunction, NormPlan, Problem};

use crate::context::{Context, dtype_of};
use crate::operands::{Input, WIDE};
use crate::operation::{Operation, Run};
use crate::plans::{Plans, Rows};

/// Gamma of a norm on the device, and the type of normalized rows.
#[derive(Clone, Debug)]
pub(crate) struct Gamma {
    values: Arc<Buffer>,
    columns: usize,
    eps: f32,
    dtype: DType,
    /// qgemm's name of `dtype`.
    of_rows: qgemm_api::DType,
}

impl Gamma {
    pub fn new(ctx: &Context, gamma: &Tensor, eps: f64, dtype: DType) -> Result<Self> {
        let of_rows = dtype_of(dtype)?;
        Ok(Self { values: Arc::new(ctx.upload(gamma)?), columns: gamma.elem_count(), eps: eps as f32, dtype, of_rows })
    }

    /// States the norm before a product.
    pub fn before(&self, problem: Problem) -> Problem {
        problem.norm(self.function()).normed_dtype(self.of_rows)
    }

    fn function(&self) -> NormFunction {
        NormFunction::rms(self.eps).gamma(qgemm_api::DType::F32)
    }

    pub fn view(&self) -> BufferRef<'_> {
        self.values.view()
    }
}

/// RMSNorm of rows in f32, rounded once to the type of the result.
///
/// A norm before a product costs no launch of its own in [`Linear::with_norm`].
///
/// [`Linear::with_norm`]: crate::Linear::with_norm
#[derive(Clone, Debug)]
pub struct RmsNorm {
    context: Context,
    gamma: Gamma,
    plans: Arc<Plans<NormPlan>>,
}

impl RmsNorm {
    /// RMSNorm with `gamma`; the result has type `dtype`.
    ///
    /// # Errors
    /// When `dtype` is no type of activations, or the device is out of memory.
    pub fn new(ctx: &Context, gamma: &Tensor, eps: f64, dtype: DType) -> Result<Self> {
        Ok(Self { context: ctx.clone(), gamma: Gamma::new(ctx, gamma, eps, dtype)?, plans: Arc::default() })
    }

    fn plan(&self, key: Rows) -> Result<NormPlan> {
        let (x, d) = (dtype_of(key.x)?, self.gamma.of_rows);
        let norm = Norm::new(key.rows, self.gamma.columns, x, self.gamma.function()).d_dtype(d);
        let norm = if key.aligned { norm } else { norm.x_alignment(x.bytes()).d_alignment(d.bytes()) };
        self.context.qgemm().plan_norm(&norm).map_err(Error::wrap)
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op1_no_bwd(&Run(self))
    }
}

impl Operation for RmsNorm {
    const NAME: &'static str = "qgemm-rms-norm";

    fn context(&self) -> &Context {
        &self.context
    }

    fn result(&self, inputs: &[Input<'_>]) -> Result<(Shape, DType)> {
        let x = inputs[0];
        if x.matrix(Self::NAME)?.0 != self.gamma.columns {
            bail!("{}: X: expected rows of {}, got {:?}", Self::NAME, self.gamma.columns, x.dims);
        }
        Ok((x.dims.into(), self.gamma.dtype))
    }

    fn run(&self, inputs: &[Input<'_>], d: BufferMut<'_>) -> Result<()> {
        let x = inputs[0];
        let aligned = x.view.alignment().min(d.view().alignment()) >= WIDE;
        let rows = Rows { rows: x.matrix(Self::NAME)?.1, x: x.dtype, aligned };
        let plan = self.plans.get(rows, || self.plan(rows))?;
        plan.run(self.context.stream(), NormArgs::new(x.view, d).gamma(self.gamma.view())).map_err(Error::wrap)
    }
}
