//! [`Linear`]: a product with a quantized weight.

use std::sync::{Arc, OnceLock};

use candle_core::quantized::QTensor;
use candle_core::{DType, Error, Module, Result, Shape, Tensor, bail};
use qgemm_api::{Activation, Buffer, BufferMut, HostWeight, Problem, Weight};

use crate::context::{Context, dtype_of};
use crate::norm::Gamma;
use crate::operands::{Input, WIDE};
use crate::operation::{Operation, Run};
use crate::weights::host_weight;

/// Product `X·Wᵀ` with a quantized weight, in the place of candle's `QMatMul`.
///
/// X is `[…, K]` in f32, f16 or bf16; the result is `[…, N]`. One launch has the product and
/// its epilogue. Plans are made once for each number of rows.
#[derive(Clone, Debug)]
pub struct Linear {
    context: Context,
    weight: Weight,
    gamma: Option<Gamma>,
    bias: Option<Arc<Buffer>>,
    activation: Option<Activation>,
    d_dtype: Option<DType>,
    /// Layers of X's type, with a residual or without, and of its alignment.
    layers: [OnceLock<qgemm_api::Linear>; 12],
}

impl Linear {
    /// Product with a weight of any format that qgemm reads.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn new(ctx: &Context, weight: &HostWeight) -> Result<Self> {
        Ok(Self::of(ctx, ctx.qgemm().load(weight).map_err(Error::wrap)?, None))
    }

    /// Product with candle's quantized matrix `[N, K]`.
    ///
    /// # Errors
    /// As [`host_weight`] and [`Linear::new`].
    pub fn from_qtensor(ctx: &Context, weight: &QTensor) -> Result<Self> {
        Self::new(ctx, &host_weight(weight)?)
    }

    /// Gated pair `activation(X·Gᵀ) · (X·Uᵀ)` in one launch.
    ///
    /// # Errors
    /// When the weights differ in shape or format, or the device is out of memory.
    pub fn gated(ctx: &Context, gate: &HostWeight, up: &HostWeight, activation: Activation) -> Result<Self> {
        Ok(Self::of(ctx, ctx.qgemm().load_gated(gate, up).map_err(Error::wrap)?, Some(activation)))
    }

    fn of(ctx: &Context, weight: Weight, activation: Option<Activation>) -> Self {
        let (context, layers) = (ctx.clone(), Default::default());
        Self { context, weight, gamma: None, bias: None, activation, d_dtype: None, layers }
    }

    /// Adds a bias of N values (of a gated pair 2 N, gate first).
    ///
    /// # Errors
    /// When its values cannot be copied.
    pub fn with_bias(self, bias: &Tensor) -> Result<Self> {
        let bias = Some(Arc::new(self.context.upload(bias)?));
        Ok(Self { bias, layers: Default::default(), ..self })
    }

    /// RMSNorm of X's rows before the product, rounded to `dtype`. One launch has both where
    /// a kernel normalizes.
    ///
    /// # Errors
    /// As [`RmsNorm::new`](crate::RmsNorm::new).
    pub fn with_norm(self, gamma: &Tensor, eps: f64, dtype: DType) -> Result<Self> {
        let gamma = Some(Gamma::new(&self.context, gamma, eps, dtype)?);
        Ok(Self { gamma, layers: Default::default(), ..self })
    }

    /// Type of the result. By default that of X.
    pub fn with_output(self, dtype: DType) -> Self {
        Self { d_dtype: Some(dtype), layers: Default::default(), ..self }
    }

    /// The packed weight.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// Plans for these numbers of rows of type `x`, and makes their kernels ready. Otherwise
    /// the first run of a number does.
    ///
    /// # Errors
    /// As [`qgemm_api::Context::plan`].
    pub fn prepare(&self, rows: impl IntoIterator<Item = usize>, x: DType, residual: bool) -> Result<()> {
        self.layer(x, residual, true)?.prepare(rows).map(drop).map_err(Error::wrap)
    }

    /// Result plus a residual of its shape and type, in one launch.
    ///
    /// # Errors
    /// When a tensor has another device, type or shape than expected.
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op2_no_bwd(&residual.contiguous()?, &Run(self))
    }

    fn output(&self, x: DType) -> DType {
        self.d_dtype.unwrap_or(x)
    }

    /// The layer of such operands, made on first use.
    fn layer(&self, x: DType, residual: bool, aligned: bool) -> Result<&qgemm_api::Linear> {
        let (of_x, of_d) = (dtype_of(x)?, dtype_of(self.output(x))?);
        let place = 4 * of_x as usize + 2 * usize::from(residual) + usize::from(aligned);
        let Some(place) = self.layers.get(place) else { bail!("linear: {x:?} is no type of activations") };
        if let Some(layer) = place.get() {
            return Ok(layer);
        }
        let layer = self.context.qgemm().layer(&self.weight, |problem| {
            let problem = self.prologue(problem.x_dtype(of_x).d_dtype(of_d).x_precision(self.context.x_precision()));
            let problem = if residual { problem.residual(of_d) } else { problem };
            match aligned {
                true => problem,
                false => {
                    let problem = problem.x_alignment(of_x.bytes()).d_alignment(of_d.bytes());
                    problem.residual_alignment(of_d.bytes())
                }
            }
        });
        let layer = layer.map_err(Error::wrap)?;
        Ok(place.get_or_init(|| layer))
    }

    fn prologue(&self, problem: Problem) -> Problem {
        let problem = match &self.gamma {
            Some(gamma) => gamma.before(problem),
            None => problem,
        };
        let problem = if self.bias.is_some() { problem.bias(qgemm_api::DType::F32) } else { problem };
        match self.activation {
            Some(activation) => problem.activation(activation),
            None => problem,
        }
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op1_no_bwd(&Run(self))
    }
}

impl Operation for Linear {
    const NAME: &'static str = "qgemm-linear";

    fn context(&self) -> &Context {
        &self.context
    }

    fn result(&self, inputs: &[Input<'_>]) -> Result<(Shape, DType)> {
        let x = inputs[0];
        let (columns, _) = x.matrix(Self::NAME)?;
        if columns != self.weight.k() {
            bail!("{}: X: expected rows of {}, got {:?}", Self::NAME, self.weight.k(), x.dims);
        }
        let mut dims = x.dims.to_vec();
        dims.pop();
        dims.push(self.weight.n());
        if let Some(residual) = inputs.get(1)
            && (residual.dims != dims || residual.dtype != self.output(x.dtype))
        {
            let (expected, got) = (self.output(x.dtype), residual.dtype);
            bail!("{}: residual: expected {expected:?} {dims:?}, got {got:?} {:?}", Self::NAME, residual.dims);
        }
        Ok((dims.into(), self.output(x.dtype)))
    }

    fn run(&self, inputs: &[Input<'_>], d: BufferMut<'_>) -> Result<()> {
        let (x, residual) = (inputs[0], inputs.get(1));
        let (_, rows) = x.matrix(Self::NAME)?;
        let aligned = d.view().alignment() >= WIDE && inputs.iter().all(|input| input.view.alignment() >= WIDE);
        let layer = self.layer(x.dtype, residual.is_some(), aligned)?;
        let plan = layer.plan(rows).map_err(Error::wrap)?;
        let mut args = layer.args(x.view, d);
        args.residual = residual.map(|residual| residual.view);
        args.bias = self.bias.as_ref().map(|bias| bias.view());
        args.gamma = self.gamma.as_ref().map(Gamma::view);
        let stream = self.context.stream();
        match plan.workspace_bytes() {
            0 => plan.run(stream, args).map_err(Error::wrap),
            bytes => self
                .context
                .with_workspace(bytes, |workspace| plan.run(stream, args.workspace(workspace)).map_err(Error::wrap)),
        }
    }
}
