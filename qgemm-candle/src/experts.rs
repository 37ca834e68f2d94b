//! [`Experts`]: the feed-forward layer of a mixture of experts.

use std::sync::Arc;

use candle_core::{DType, Error, Result, Shape, Tensor, bail};
use qgemm_api::{BufferMut, HostExperts, Moe, MoeArgs, MoeLayer, MoeWorkspace};

use crate::context::{Context, dtype_of};
use crate::operands::Input;
use crate::operation::{Operation, Run};
use crate::per_thread::PerThread;

/// Experts of a layer with their routing from logits, at most four launches for any number of
/// tokens. The host reads nothing back.
#[derive(Clone, Debug)]
pub struct Experts {
    context: Context,
    layer: Arc<MoeLayer>,
    /// Features of X and of the result, and experts.
    columns: [usize; 3],
    types: [DType; 2],
    /// Memory of up to so many tokens.
    workspaces: Arc<PerThread<(usize, MoeWorkspace)>>,
}

impl Experts {
    /// Layer of a gated pair (or one weight) and a down projection of each expert, with
    /// `top_k` experts a token. X and the result have these types; logits are f32.
    ///
    /// `describe` states the rest, such as the routing:
    /// `|moe| moe.routed(qgemm_api::DType::F32, |routing| routing.renormalized())`.
    ///
    /// # Errors
    /// When the weights do not fit together, or the device is out of memory.
    pub fn new(
        ctx: &Context,
        up: &HostExperts,
        down: &HostExperts,
        top_k: usize,
        types: [DType; 2],
        describe: impl FnOnce(Moe) -> Moe,
    ) -> Result<Self> {
        let [x, d] = [dtype_of(types[0])?, dtype_of(types[1])?];
        let load = |experts| ctx.qgemm().load_experts(experts).map_err(Error::wrap);
        let columns = [up.k(), down.n(), up.experts()];
        let layer = ctx.qgemm().moe_layer(&load(up)?, &load(down)?, top_k, |moe| {
            describe(moe.x_dtype(x).d_dtype(d).x_precision(ctx.x_precision()))
        });
        let layer = Arc::new(layer.map_err(Error::wrap)?);
        Ok(Self { context: ctx.clone(), layer, columns, types, workspaces: Arc::default() })
    }

    /// The layer of X `[…, K]` by router logits `[…, experts]`: `[…, N]`.
    ///
    /// # Errors
    /// When a tensor has another device, type or shape than expected.
    pub fn forward(&self, x: &Tensor, logits: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op2_no_bwd(&logits.contiguous()?, &Run(self))
    }

    /// [`Experts::forward`] plus a residual, for a layer that [states one](Moe::residual).
    ///
    /// # Errors
    /// As [`Experts::forward`].
    pub fn forward_add(&self, x: &Tensor, logits: &Tensor, residual: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op3_no_bwd(&logits.contiguous()?, &residual.contiguous()?, &Run(self))
    }
}

impl Operation for Experts {
    const NAME: &'static str = "qgemm-experts";

    fn context(&self) -> &Context {
        &self.context
    }

    fn result(&self, inputs: &[Input<'_>]) -> Result<(Shape, DType)> {
        let (x, logits) = (inputs[0], inputs[1]);
        let ([columns, features, experts], [of_x, of_d]) = (self.columns, self.types);
        let (got, rows) = x.matrix(Self::NAME)?;
        if got != columns || x.dtype != of_x {
            bail!("{}: X: expected {of_x:?} rows of {columns}, got {:?} {:?}", Self::NAME, x.dtype, x.dims);
        }
        if logits.matrix(Self::NAME)? != (experts, rows) || logits.dtype != DType::F32 {
            let (got, dims) = (logits.dtype, logits.dims);
            bail!("{}: logits: expected F32 {rows} rows of {experts}, got {got:?} {dims:?}", Self::NAME);
        }
        let mut dims = x.dims.to_vec();
        dims.pop();
        dims.push(features);
        Ok((dims.into(), of_d))
    }

    fn run(&self, inputs: &[Input<'_>], d: BufferMut<'_>) -> Result<()> {
        let (_, tokens) = inputs[0].matrix(Self::NAME)?;
        let mut args = MoeArgs::from_logits(inputs[0].view, inputs[1].view, d);
        args.residual = inputs.get(2).map(|residual| residual.view);
        let (most, mut workspace) = match self.workspaces.take() {
            Some((most, workspace)) if most >= tokens => (most, workspace),
            _ => {
                let most = tokens.next_power_of_two();
                (most, self.layer.workspace(most).map_err(Error::wrap)?)
            }
        };
        let result = self.layer.run(self.context.stream(), tokens, args, &mut workspace);
        self.workspaces.put((most, workspace));
        result.map_err(Error::wrap)
    }
}
