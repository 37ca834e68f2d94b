//! [`FusedLinear`]: several weights of one X.

use std::sync::Arc;

use candle_core::{DType, Error, Result, Shape, Tensor, bail};
use qgemm_api::{BufferMut, FusedArgs, FusedPlan, FusedProblem, FusedWeight, HostWeight};

use crate::context::{Context, dtype_of};
use crate::norm::Gamma;
use crate::operands::{Input, WIDE};
use crate::operation::{Operation, Run};
use crate::plans::{Plans, Rows};

/// Products of one X with several weights, such as Q, K and V. Neighbours of one format are
/// one product.
#[derive(Clone, Debug)]
pub struct FusedLinear {
    context: Context,
    weight: FusedWeight,
    features: Vec<usize>,
    k: usize,
    gamma: Option<Gamma>,
    d_dtype: Option<DType>,
    plans: Arc<Plans<FusedPlan>>,
}

/// Results of a [`FusedLinear`] behind each other in one tensor.
#[derive(Clone, Debug)]
pub struct Segments {
    all: Tensor,
    /// Dimensions of X but the last.
    rows: Vec<usize>,
    features: Vec<usize>,
}

impl FusedLinear {
    /// Products with weights of equal K.
    ///
    /// # Errors
    /// When K differs, or the device is out of memory.
    pub fn new(ctx: &Context, weights: &[&HostWeight]) -> Result<Self> {
        let weight = ctx.qgemm().load_fused(weights).map_err(Error::wrap)?;
        let features = weights.iter().map(|weight| weight.n()).collect();
        let k = weights.first().map_or(0, |weight| weight.k());
        let (context, plans) = (ctx.clone(), Arc::default());
        Ok(Self { context, weight, features, k, gamma: None, d_dtype: None, plans })
    }

    /// RMSNorm of X's rows before the products: see [`Linear::with_norm`].
    ///
    /// # Errors
    /// As there.
    ///
    /// [`Linear::with_norm`]: crate::Linear::with_norm
    pub fn with_norm(self, gamma: &Tensor, eps: f64, dtype: DType) -> Result<Self> {
        let gamma = Some(Gamma::new(&self.context, gamma, eps, dtype)?);
        Ok(Self { gamma, plans: Arc::default(), ..self })
    }

    /// Type of the results. By default that of X.
    pub fn with_output(self, dtype: DType) -> Self {
        Self { d_dtype: Some(dtype), plans: Arc::default(), ..self }
    }

    /// Products of X `[…, K]`.
    ///
    /// # Errors
    /// When X has another device, type or number of features than expected.
    pub fn forward(&self, x: &Tensor) -> Result<Segments> {
        let all = x.contiguous()?.apply_op1_no_bwd(&Run(self))?;
        let rows = x.dims()[..x.rank() - 1].to_vec();
        Ok(Segments { all, rows, features: self.features.clone() })
    }

    fn plan(&self, key: Rows) -> Result<FusedPlan> {
        let (x, d) = (dtype_of(key.x)?, dtype_of(self.d_dtype.unwrap_or(key.x))?);
        let problem = FusedProblem::new(&self.weight, key.rows, x).each(|problem| {
            let problem = problem.x_precision(self.context.x_precision());
            let problem = if key.aligned { problem } else { problem.x_alignment(x.bytes()) };
            match &self.gamma {
                Some(gamma) => gamma.before(problem),
                None => problem,
            }
        });
        let mut start = 0;
        let problem = self.features.iter().enumerate().fold(problem, |problem, (segment, features)| {
            let is_wide = (start * d.bytes()).is_multiple_of(WIDE);
            start += key.rows * features;
            let problem = problem.output_dtype(segment, d);
            problem.output_alignment(segment, if is_wide { WIDE } else { d.bytes() })
        });
        self.context.qgemm().plan_fused(&problem).map_err(Error::wrap)
    }
}

impl Operation for FusedLinear {
    const NAME: &'static str = "qgemm-fused-linear";

    fn context(&self) -> &Context {
        &self.context
    }

    fn result(&self, inputs: &[Input<'_>]) -> Result<(Shape, DType)> {
        let x = inputs[0];
        let (columns, rows) = x.matrix(Self::NAME)?;
        if columns != self.k {
            bail!("{}: X: expected rows of {}, got {:?}", Self::NAME, self.k, x.dims);
        }
        Ok(((rows * self.features.iter().sum::<usize>()).into(), self.d_dtype.unwrap_or(x.dtype)))
    }

    fn run(&self, inputs: &[Input<'_>], d: BufferMut<'_>) -> Result<()> {
        let x = inputs[0];
        let (_, rows) = x.matrix(Self::NAME)?;
        let key = Rows { rows, x: x.dtype, aligned: x.view.alignment() >= WIDE };
        let plan = self.plans.get(key, || self.plan(key))?;
        let bytes = dtype_of(self.d_dtype.unwrap_or(x.dtype))?.bytes();
        self.context.with_workspace(plan.workspace_bytes(), |workspace| {
            let mut outputs = Vec::with_capacity(self.features.len());
            let mut rest = d;
            for features in &self.features {
                let (output, others) = rest.split_at(rows * features * bytes).map_err(Error::wrap)?;
                outputs.push(output);
                rest = others;
            }
            let mut args = FusedArgs::new(x.view, &self.weight, &mut outputs, workspace);
            args.gamma = self.gamma.as_ref().map(Gamma::view);
            plan.run(self.context.stream(), args).map_err(Error::wrap)
        })
    }
}

impl Segments {
    /// Result of each weight, `[…, N]`: views of one tensor.
    ///
    /// # Errors
    /// As [`Segments::get`].
    pub fn split(&self) -> Result<Vec<Tensor>> {
        (0..self.features.len()).map(|segment| self.get(segment)).collect()
    }

    /// Result of one weight, `[…, N]`: a view.
    ///
    /// # Errors
    /// When there is no such weight.
    pub fn get(&self, segment: usize) -> Result<Tensor> {
        let Some(&features) = self.features.get(segment) else {
            bail!("segments: expected one below {}, got {segment}", self.features.len());
        };
        let rows: usize = self.rows.iter().product();
        let start = rows * self.features[..segment].iter().sum::<usize>();
        let dims: Vec<usize> = self.rows.iter().copied().chain([features]).collect();
        self.all.narrow(0, start, rows * features)?.reshape(dims)
    }

    /// Results of all weights behind each other, `[Σ rows · N]`.
    pub fn all(&self) -> &Tensor {
        &self.all
    }

    /// Output features of each weight.
    pub fn features(&self) -> &[usize] {
        &self.features
    }
}
