//! [`Plan`]: a kernel made ready for one problem.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    BufferMut, BufferRef, CheckedGemm, Dense, Device, DeviceId, GemmArgs, Kernel, KernelFamily, LaunchPlan, Stream,
};
use qgemm_sched::{TunedTable, candidates, choose};

use crate::error::Error;
use crate::problem::Problem;
use crate::weight::{Weight, WeightShape};
use crate::workspace::Workspace;

/// A kernel chosen and made ready for one [`Problem`]; made by [`Context::plan`](crate::Context::plan).
///
/// A plan belongs to a shape, not to a weight: it runs with every weight that has the format, N, K and device
/// of the one it was made from; where that one's values are fit for f16 ([`Weight::fits_f16`]), theirs must be, too.
#[derive(Debug)]
pub struct Plan {
    op: CheckedGemm,
    weight: WeightShape,
    /// Whether the problem names a C, read or (with `beta` 0) not.
    c_stated: bool,
    x: Extent,
    d: Extent,
    c: Option<Extent>,
    bias: Option<Extent>,
    token_scale: Option<Extent>,
    residual: Option<Extent>,
    /// `None` for 0 tokens.
    kernel: Option<Chosen>,
}

const F32_BYTES: usize = DType::F32.bytes();

#[derive(Debug)]
struct Chosen {
    launch: LaunchPlan,
    kernel: Arc<dyn Kernel>,
}

/// One way to run a [`Problem`]: a kernel family, a configuration of it and a launch geometry. Made by
/// [`Context::candidates`](crate::Context::candidates), to time others than the one that a plan would take.
#[derive(Clone, Debug)]
pub struct Candidate {
    problem: Problem,
    op: CheckedGemm,
    family: &'static dyn KernelFamily,
    launch: LaunchPlan,
}

impl Candidate {
    /// Every way there is, the fastest by the cost model first; none for 0 tokens.
    pub(crate) fn all(device: &dyn Device, problem: &Problem) -> Result<Vec<Self>, Error> {
        let op = problem.check()?;
        if op.m == 0 {
            return Ok(Vec::new());
        }
        let all = candidates(&op, device.info(), device.families(), problem.preferences())?;
        let candidate = |(family, launch)| Self { problem: problem.clone(), op: op.clone(), family, launch };
        Ok(all.into_iter().map(candidate).collect())
    }

    /// The configuration and its launch geometry.
    pub fn launch(&self) -> &LaunchPlan {
        &self.launch
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.problem.weight().device
    }
}

/// What one run reads and writes.
///
/// ```
/// # use qgemm_api::{Args, Context, DType, HostWeight, Problem};
/// # let ctx = Context::open("noop")?;
/// # let weight = ctx.load_dense(&[0; 4 * 64], DType::F32, 2, 32, Default::default())?;
/// # let plan = ctx.plan(&Problem::new(&weight, 1).x_dtype(DType::F16))?;
/// let x = ctx.upload(&DType::F16.encode(&[1.0; 32]))?;
/// let mut d = ctx.allocate(2 * 2)?;
/// plan.run(&ctx.default_stream(), Args::new((&x).into(), &weight, (&mut d).into()))?;
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
pub struct Args<'a> {
    /// Activations.
    pub x: BufferRef<'a>,
    /// The weight.
    pub w: &'a Weight,
    /// Output.
    pub d: BufferMut<'a>,
    /// C, when the problem adds `beta · C`.
    pub c: Option<BufferRef<'a>>,
    /// N values, when the problem adds a bias; of a gated pair 2 N.
    pub bias: Option<BufferRef<'a>>,
    /// M values in f32, when the problem scales tokens.
    pub token_scale: Option<BufferRef<'a>>,
    /// The residual, when the problem adds one.
    pub residual: Option<BufferRef<'a>>,
    /// At least [`Plan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> Args<'a> {
    /// What every run has; the other operands are fields to set.
    pub fn new(x: BufferRef<'a>, w: &'a Weight, d: BufferMut<'a>) -> Self {
        Self { x, w, d, c: None, bias: None, token_scale: None, residual: None, workspace: None }
    }
}

impl Plan {
    pub(crate) fn new(device: &dyn Device, tuned: &TunedTable, problem: &Problem) -> Result<Self, Error> {
        let op = problem.check()?;
        let _span = tracing::info_span!("plan", m = op.m, n = op.n, k = op.k, format = %op.format).entered();
        let kernel = match op.m {
            0 => None,
            _ => {
                let (family, launch) = choose(&op, device.info(), device.families(), problem.preferences(), tuned)?;
                Some(Chosen { kernel: family.prepare(device, &op, &launch)?, launch })
            }
        };
        Ok(Self::of_kernel(problem, op, kernel))
    }

    pub(crate) fn of_candidate(device: &dyn Device, candidate: &Candidate) -> Result<Self, Error> {
        let Candidate { problem, op, family, launch } = candidate;
        let kernel = Chosen { kernel: family.prepare(device, op, launch)?, launch: *launch };
        Ok(Self::of_kernel(problem, op.clone(), Some(kernel)))
    }

    fn of_kernel(problem: &Problem, op: CheckedGemm, kernel: Option<Chosen>) -> Self {
        Self {
            x: Extent::of(&op.x, op.m, op.k),
            d: Extent::of(&op.d, op.m, op.features),
            c: op.c.as_ref().map(|c| Extent::of(c, op.m, op.features)),
            bias: op.bias.map(|dtype| Extent { bytes: op.bias_len() * dtype.bytes(), alignment: dtype.bytes() }),
            token_scale: op.token_scale.then(|| Extent { bytes: op.m * F32_BYTES, alignment: F32_BYTES }),
            residual: op.residual.as_ref().map(|r| Extent::of(r, op.m, op.features)),
            weight: *problem.weight(),
            c_stated: problem.states_c(),
            op,
            kernel,
        }
    }

    /// Bytes of workspace that [`Plan::run`] needs; 0 for most plans.
    pub fn workspace_bytes(&self) -> usize {
        self.kernel.as_ref().map_or(0, |k| k.launch.workspace_bytes)
    }

    /// Name of the chosen kernel, such as `gemm_nt_q4_k_f16`; `none` for 0 tokens.
    pub fn kernel_name(&self) -> &str {
        self.kernel.as_ref().map_or("none", |k| k.kernel.name())
    }

    /// The chosen configuration and its launch geometry; `None` for 0 tokens.
    pub fn launch(&self) -> Option<&LaunchPlan> {
        self.kernel.as_ref().map(|k| &k.launch)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedGemm {
        &self.op
    }

    /// Bytes that a run must move at least: W, X, D, C and the residual once each.
    pub fn bytes(&self) -> f64 {
        self.op.bytes()
    }

    /// Multiply-adds of a run.
    pub fn macs(&self) -> f64 {
        self.op.macs()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.weight.device
    }

    /// Submits the multiplication to `stream`. Allocates nothing, waits for nothing and takes no lock, so it
    /// may be captured in a CUDA graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device, or (C, bias, …) not part of the
    /// problem; when the weight is not like the one planned for; or a device error. Nothing has been written
    /// then.
    pub fn run(&self, stream: &Stream, args: Args<'_>) -> Result<(), Error> {
        let Args { x, w, d, c, bias, token_scale, residual, workspace } = args;
        if !self.weight.serves(w.shape()) {
            return Err(Error::WrongWeight { expected: self.weight.to_string(), got: w.shape().to_string() });
        }
        self.check_device("stream", stream.device())?;
        self.check("X", x, self.x)?;
        self.check("D", d.as_ref(), self.d)?;
        let c = self.check_optional("C", c, self.c, self.c_stated, "the problem adds beta · C")?;
        let bias = self.check_optional("bias", bias, self.bias, false, "the problem adds a bias")?;
        let token_scale =
            self.check_optional("token scales", token_scale, self.token_scale, false, "the problem scales tokens")?;
        let residual =
            self.check_optional("residual", residual, self.residual, false, "the problem adds a residual")?;
        let Some(Chosen { launch, kernel }) = &self.kernel else { return Ok(()) };
        let workspace = match (launch.workspace_bytes, workspace) {
            (0, _) => None,
            (_, None) => {
                return Err(Error::MissingOperand {
                    operand: "workspace",
                    why: "the plan keeps partial sums or staged activations",
                });
            }
            (expected, Some(workspace)) => {
                self.check_device("workspace", workspace.device())?;
                if workspace.bytes() < expected {
                    return Err(Error::BufferTooShort { operand: "workspace", expected, got: workspace.bytes() });
                }
                Some(workspace.view())
            }
        };
        let _span = tracing::trace_span!("launch", kernel = kernel.name()).entered();
        kernel.launch(stream, GemmArgs { x, w: w.args(), c, bias, token_scale, residual, d, workspace })?;
        Ok(())
    }

    fn check_device(&self, operand: &'static str, got: DeviceId) -> Result<(), Error> {
        let expected = self.device();
        if got == expected { Ok(()) } else { Err(Error::WrongDevice { operand, expected, got }) }
    }

    fn check(&self, operand: &'static str, view: BufferRef<'_>, extent: Extent) -> Result<(), Error> {
        self.check_device(operand, view.device())?;
        if view.len() < extent.bytes {
            return Err(Error::BufferTooShort { operand, expected: extent.bytes, got: view.len() });
        }
        let got = view.alignment();
        if got < extent.alignment {
            return Err(Error::Misaligned { operand, expected: extent.alignment, got });
        }
        Ok(())
    }

    /// Checks an operand that the kernel reads when `extent` is some, and returns what to hand down.
    fn check_optional<'a>(
        &self,
        operand: &'static str,
        view: Option<BufferRef<'a>>,
        extent: Option<Extent>,
        may_be_unread: bool,
        why: &'static str,
    ) -> Result<Option<BufferRef<'a>>, Error> {
        match (view, extent) {
            (Some(view), Some(extent)) => {
                self.check(operand, view, extent)?;
                Ok(Some(view))
            }
            (None, Some(_)) => Err(Error::MissingOperand { operand, why }),
            (Some(_), None) if !may_be_unread => Err(Error::UnexpectedOperand { operand }),
            (_, None) => Ok(None),
        }
    }
}

/// What a run asks of a buffer.
#[derive(Clone, Copy, Debug)]
struct Extent {
    bytes: usize,
    alignment: usize,
}

impl Extent {
    /// Of `rows × columns` elements, whose extent [`Problem`] found to fit the address space.
    fn of(dense: &Dense, rows: usize, columns: usize) -> Self {
        let width = dense.dtype.bytes();
        let last = |count: usize, stride: u64| (count - 1) * stride as usize;
        let elements = match rows {
            0 => 0,
            _ => last(rows, dense.row_stride) + last(columns, dense.col_stride) + 1,
        };
        Self { bytes: elements * width, alignment: if dense.aligned16 { 16 } else { width } }
    }
}
