//! Feed-forward part of a layer: dense, or experts with a router.

use qgemm_api::{
    Activation, Buffer, Context, DType, FormatError, HostWeight, MoeArgs, MoeLayer, MoeWorkspace, NormArgs, NormPlan,
    Stream, Workspace, XPrecision, quantize,
};

use crate::error::Error;
use crate::hyperparameters::{ExpertNumbers, Hyperparameters};
use crate::loader::{Loader, normed_problem};
use crate::projection::Projection;

/// Feed-forward part of a layer.
pub enum FeedForward {
    /// One pair of gate and up, and down, for all tokens.
    Dense {
        /// Gate and up as one gated pair.
        gate_up: Projection,
        /// Down projection; adds to the residual stream.
        down: Projection,
    },
    /// Experts, of which a router chooses some for each token.
    Experts {
        /// Router: logits of the experts in f32.
        router: Projection,
        /// The experts.
        experts: MoeLayer,
    },
}

/// Memory of layers of experts, which they use in turn.
pub struct ExpertMemory {
    /// Normalized residual stream: X of the router and of the experts.
    normed: Buffer,
    router_logits: Buffer,
    /// Residual stream after the part; it trades places with the one before.
    next: Buffer,
    workspace: MoeWorkspace,
}

impl ExpertMemory {
    /// Memory for steps of up to `tokens` tokens, and ready kernels. `None` without experts.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn new<'a>(
        ctx: &Context,
        parts: impl IntoIterator<Item = &'a FeedForward>,
        (numbers, activations): (&Hyperparameters, DType),
        tokens: usize,
    ) -> Result<Option<Self>, Error> {
        let Some(ExpertNumbers { count, .. }) = numbers.experts else { return Ok(None) };
        // Layers differ in formats at most, so the largest workspace serves all.
        let mut most: Option<(usize, &MoeLayer)> = None;
        for part in parts {
            let FeedForward::Experts { experts, .. } = part else { continue };
            let bytes = experts.prepare(tokens)?;
            if most.is_none_or(|(other, _)| bytes > other) {
                most = Some((bytes, experts));
            }
        }
        let Some((_, largest)) = most else { return Ok(None) };
        let rows = |dtype, columns: usize| ctx.allocate_elements(dtype, tokens.saturating_mul(columns));
        Ok(Some(Self {
            normed: rows(activations, numbers.hidden)?,
            router_logits: rows(DType::F32, count)?,
            next: rows(DType::F32, numbers.hidden)?,
            workspace: largest.workspace(tokens)?,
        }))
    }
}

/// Operands of a feed-forward part besides its weights.
pub struct FeedForwardArgs<'a> {
    /// Residual stream, f32: X, and the sum of X and the result.
    pub x: &'a mut Buffer,
    /// Gamma of the norm before the part.
    pub gamma: &'a Buffer,
    /// Norm before experts, which is a step of its own.
    pub norm: Option<&'a NormPlan>,
    /// Products of gate and up, of a dense part.
    pub gated: &'a mut Buffer,
    /// Memory of experts.
    pub experts: Option<&'a mut ExpertMemory>,
    /// Workspace of products.
    pub workspace: &'a mut Workspace,
}

impl FeedForward {
    /// Products of the residual stream, which use the workspace.
    pub fn products(&self) -> Vec<&Projection> {
        match self {
            Self::Dense { gate_up, down } => vec![gate_up, down],
            Self::Experts { router, .. } => vec![router],
        }
    }

    /// Runs the part for `tokens` tokens.
    ///
    /// # Errors
    /// A device error.
    pub fn run(&self, stream: &Stream, tokens: usize, args: FeedForwardArgs<'_>) -> Result<(), Error> {
        let FeedForwardArgs { x, gamma, norm, gated, experts: memory, workspace } = args;
        match (self, norm, memory) {
            (Self::Dense { gate_up, down }, ..) => {
                gate_up.run(stream, tokens, &*x, &mut *gated, Some(gamma), workspace)?;
                down.run(stream, tokens, &*gated, x, None, workspace)
            }
            (Self::Experts { router, experts }, Some(norm), Some(memory)) => {
                let ExpertMemory { normed, router_logits, next, workspace: of_experts } = memory;
                norm.run(stream, NormArgs::new(&*x, &mut *normed).gamma(gamma))?;
                router.run(stream, tokens, &*normed, &mut *router_logits, None, workspace)?;
                let args = MoeArgs::from_logits(&*normed, &*router_logits, &mut *next).residual(&*x);
                experts.run(stream, tokens, args, of_experts)?;
                std::mem::swap(x, next);
                Ok(())
            }
            (Self::Experts { .. }, ..) => unreachable!("a model with experts has a norm and memory for them"),
        }
    }
}

impl Loader<'_> {
    /// The feed-forward part of a layer whose tensors begin with `prefix`. It has experts if it has a router.
    pub fn feed_forward(&mut self, prefix: &str) -> Result<FeedForward, Error> {
        let name = |part: &str| format!("{prefix}{part}");
        let names = self.names;
        match self.numbers.experts {
            Some(experts) if self.tensors.has(&name(names.experts.router)) => self.experts(prefix, experts),
            _ => Ok(FeedForward::Dense {
                gate_up: self.gate_up(&name(names.gate), &name(names.up))?,
                down: self.tensors.residual(&name(names.down), [self.numbers.hidden, self.numbers.intermediate])?,
            }),
        }
    }

    /// Gate and up as a gated pair. If their formats differ, both become f16.
    fn gate_up(&mut self, gate: &str, up: &str) -> Result<Projection, Error> {
        let &Hyperparameters { hidden, intermediate, eps, .. } = self.numbers;
        let weights =
            [self.tensors.matrix(gate, intermediate, hidden)?, self.tensors.matrix(up, intermediate, hidden)?];
        let biases = [self.tensors.bias(gate, intermediate)?, self.tensors.bias(up, intermediate)?];
        let weight = match self.tensors.ctx.load_gated(&weights[0], &weights[1]) {
            Err(qgemm_api::Error::Format(FormatError::PairMismatch { what, .. })) => {
                tracing::warn!(gate, up, what, "gate and up differ: both are loaded in f16");
                let plain = |weight: &HostWeight| {
                    let format = DType::F16.name().parse()?;
                    Ok::<_, Error>(quantize(&weight.dequantize()?, intermediate, hidden, format)?.0)
                };
                self.tensors.ctx.load_gated(&plain(&weights[0])?, &plain(&weights[1])?)?
            }
            loaded => loaded?,
        };
        let has_bias = biases.iter().any(Option::is_some);
        let bias = biases.into_iter().flat_map(|bias| bias.unwrap_or_else(|| vec![0.0; intermediate]));
        let bias: Option<Vec<f32>> = has_bias.then(|| bias.collect());
        let precision = self.tensors.precision;
        let linear = self.tensors.ctx.layer(&weight, |p| {
            let p = normed_problem(p, precision, eps).d_dtype(precision.activations).activation(Activation::Silu);
            if has_bias { p.bias(DType::F32) } else { p }
        })?;
        self.tensors.projection(linear, bias)
    }

    /// A router and its experts.
    fn experts(&mut self, prefix: &str, numbers: ExpertNumbers) -> Result<FeedForward, Error> {
        let ExpertNumbers { count, per_token, intermediate, renormalized } = numbers;
        let (hidden, precision) = (self.numbers.hidden, self.tensors.precision);
        let [router, gate, up, down] = {
            let names = &self.names.experts;
            [names.router, names.gate, names.up, names.down].map(|part| format!("{prefix}{part}"))
        };
        let weight = self.tensors.matrix(&router, count, hidden)?;
        // The choice of experts does not follow from further rounding.
        let linear = self.tensors.ctx.layer(&self.tensors.ctx.load(&weight)?, |p| {
            let p = p.x_dtype(precision.activations).d_dtype(DType::F32).x_precision(XPrecision::Exact);
            p.batch_invariant(precision.batch_invariant)
        })?;
        let router = self.tensors.projection(linear, None)?;
        self.check_experts(&gate, count, [intermediate, hidden])?;
        self.check_experts(&up, count, [intermediate, hidden])?;
        self.check_experts(&down, count, [hidden, intermediate])?;
        let gate_up = self.tensors.ctx.load_experts(&self.tensors.model.gated_experts(&gate, &up)?)?;
        let down = self.tensors.ctx.load_experts(&self.tensors.model.experts(&down)?)?;
        let experts = self.tensors.ctx.moe_layer(&gate_up, &down, per_token, |moe| {
            let moe = moe.x_dtype(precision.activations).residual(DType::F32).x_precision(precision.x_precision);
            moe.batch_invariant(precision.batch_invariant).routed(DType::F32, |routing| match renormalized {
                true => routing.renormalized(),
                false => routing,
            })
        })?;
        Ok(FeedForward::Experts { router, experts })
    }

    /// Checks the shapes of all experts: of one stack, or of a tensor each where the name has `{}`.
    fn check_experts(&mut self, name: &str, count: usize, [n, k]: [usize; 2]) -> Result<(), Error> {
        match name.contains("{}") {
            true => (0..count).try_for_each(|i| self.tensors.check_shape(&name.replace("{}", &i.to_string()), &[n, k])),
            false => self.tensors.check_shape(name, &[count, n, k]),
        }
    }
}
