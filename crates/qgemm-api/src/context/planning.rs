//! What a [`Context`] plans: every operation, layers of them, and each way to run one.

use qgemm_hal::BufferRef;

use super::Context;
use crate::attention::{Attention, AttentionPlan};
use crate::convert::{Conversion, ConversionPlan};
use crate::error::Error;
use crate::experts::{ExpertPlan, ExpertProblem, Experts, Moe, MoeLayer};
use crate::fused::{FusedPlan, FusedProblem};
use crate::gemm::{Candidate, Linear, Plan, Problem};
use crate::gradient::{Gradient, GradientPlan, GradientWeight};
use crate::indexer::{Indexer, IndexerPlan};
use crate::kv_append::{KvAppend, KvAppendPlan};
use crate::matmul::{Matmul, MatmulPlan};
use crate::norm::{Norm, NormPlan};
use crate::optimizer::{Optimizer, OptimizerPlan};
use crate::quantization::{Quantization, QuantizationPlan, QuantizedX};
use crate::routing::{Routing, RoutingPlan};
use crate::weight::Weight;

impl Context {
    /// Chooses a kernel for `problem`, makes it ready (which may compile it) and computes its workspace. A problem that this
    /// context, or a clone of it, planned before takes a lookup; the last 1024 are known.
    ///
    /// # Errors
    /// When the problem is not valid, its weight is on another device, no family serves it, or the kernel
    /// cannot be made ready.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, Error> {
        self.check_weight(problem.weight().device)?;
        Plan::new(self, &self.plans, problem)
    }

    /// A layer for any number of tokens: `describe` states all but M of a problem with `weight`. See [`Linear`].
    ///
    /// # Errors
    /// When the problem is not valid, or is one with another weight.
    pub fn layer(&self, weight: &Weight, describe: impl FnOnce(Problem) -> Problem) -> Result<Linear, Error> {
        self.check_weight(weight.device())?;
        Linear::new(self, weight, describe(Problem::new(weight, 0)))
    }

    /// Chooses kernels for `problem` and makes them ready.
    ///
    /// # Errors
    /// As [`Context::plan`] and [`Context::plan_conversion`], and when a segment is stated that there is not.
    pub fn plan_fused(&self, problem: &FusedProblem) -> Result<FusedPlan, Error> {
        FusedPlan::new(self, problem)
    }

    /// Chooses a kernel for `conversion` and makes it ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, Conversion, ConversionArgs, DType};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // Two rows of three columns, stored column by column.
    /// let plan = ctx.plan_conversion(&Conversion::new(2, 3, DType::F32, DType::BF16).x_transposed())?;
    /// let x = ctx.upload(&DType::F32.encode(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]))?;
    /// let mut d = ctx.allocate(2 * 3 * DType::BF16.bytes())?;
    /// plan.run(&ctx.default_stream(), ConversionArgs::new(&x, &mut d))?;
    /// assert_eq!(DType::BF16.decode(&ctx.download(&d)?), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the conversion is not valid, no family serves it, or the kernel cannot be made ready.
    pub fn plan_conversion(&self, conversion: &Conversion) -> Result<ConversionPlan, Error> {
        ConversionPlan::new(&*self.device, &self.plans, conversion)
    }

    /// Chooses a kernel for `problem` and makes it ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the problem is not valid, its experts are on another device, no family serves it, or the kernel cannot be made
    /// ready.
    pub fn plan_experts(&self, problem: &ExpertProblem) -> Result<ExpertPlan, Error> {
        self.check_weight(problem.shape().each.device)?;
        ExpertPlan::new(&self.device, self.tuned(), &self.plans, problem)
    }

    /// A plan for each way to run `problem` that [`Context::plan_experts`] has the choice of, the fastest by the cost model first; none
    /// where there are no rows. To test them all, and to measure how good the choice is.
    ///
    /// # Errors
    /// As [`Context::plan_experts`].
    pub fn plan_experts_every_way(&self, problem: &ExpertProblem) -> Result<Vec<ExpertPlan>, Error> {
        self.check_weight(problem.shape().each.device)?;
        ExpertPlan::every_way(&self.device, self.tuned(), problem)
    }

    /// A feed-forward layer of experts for any number of tokens, each given to `top_k` experts: `up`, a pair of gate and up or one weight
    /// an expert, and `down`; `describe` states the rest. See [`MoeLayer`].
    ///
    /// # Errors
    /// [`Error::WrongWeight`] when the experts do not fit together, and as [`Context::plan_experts`] and [`Context::plan_routing`].
    pub fn moe_layer(
        &self,
        up: &Experts,
        down: &Experts,
        top_k: usize,
        describe: impl FnOnce(Moe) -> Moe,
    ) -> Result<MoeLayer, Error> {
        MoeLayer::new(self, up, down, top_k, describe)
    }

    /// Chooses kernels for `routing` and makes them ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, Error, Routing, RoutingArgs, RoutingLists};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // Two experts for each of three tokens, of three; the last one is none.
    /// let plan = ctx.plan_routing(&Routing::from_ids(3, 3, 2))?;
    /// let ids = ctx.upload(&[2i32, 0, 0, 1, 2, 7].map(i32::to_le_bytes).concat())?;
    /// let (mut offsets, mut counts, mut rows) = (ctx.allocate(4 * 4)?, ctx.allocate(3 * 4)?, ctx.allocate(6 * 4)?);
    /// let mut status = ctx.allocate(16)?;
    /// let lists =
    ///     RoutingLists { offsets: (&mut offsets).into(), counts: (&mut counts).into(), rows: (&mut rows).into() };
    /// plan.run(&ctx.default_stream(), RoutingArgs::of_ids((&ids).into(), lists, (&mut status).into()))?;
    /// let words = |bytes: Vec<u8>| bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect::<Vec<_>>();
    /// assert_eq!(words(ctx.download(&offsets)?), [0, 2, 3, 5]);
    /// assert_eq!(words(ctx.download(&rows)?), [1, 2, 3, 0, 4, u32::MAX]);
    /// let wrong = plan.check_status(&ctx, &status);
    /// assert!(matches!(wrong, Err(Error::UnknownExpert { token: 2, slot: 1, id: 7, experts: 3 })));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// When the routing is not valid, no family serves it, or a kernel cannot be made ready.
    pub fn plan_routing(&self, routing: &Routing) -> Result<RoutingPlan, Error> {
        RoutingPlan::new(&self.device, &self.plans, routing)
    }

    /// Chooses a kernel for `matmul` and makes it ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Matmul, MatmulArgs};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // Two products of a row and a column; the row is the same.
    /// let matmul = Matmul::new([1, 1, 2], DType::F32, DType::F32, DType::F32).batch(2).a_batch_stride(0);
    /// let plan = ctx.plan_matmul(&matmul)?;
    /// let (a, b) = (ctx.upload(&DType::F32.encode(&[1.0, 2.0]))?, ctx.upload(&DType::F32.encode(&[3.0, 4.0, 5.0, 6.0]))?);
    /// let mut d = ctx.allocate(2 * 4)?;
    /// plan.run(&ctx.default_stream(), MatmulArgs::new(&a, &b, &mut d))?;
    /// assert_eq!(DType::F32.decode(&ctx.download(&d)?), [11.0, 17.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the product is not valid, no family serves it, or the kernel cannot be made ready.
    pub fn plan_matmul(&self, matmul: &Matmul) -> Result<MatmulPlan, Error> {
        MatmulPlan::new(&*self.device, self.tuned(), &self.plans, matmul)
    }

    /// A plan for each way to run `matmul` that [`Context::plan_matmul`] has the choice of, the fastest by the cost model first; none
    /// where there is nothing to write. To test them all, and to measure how good the choice is.
    ///
    /// # Errors
    /// As [`Context::plan_matmul`].
    pub fn plan_matmul_every_way(&self, matmul: &Matmul) -> Result<Vec<MatmulPlan>, Error> {
        MatmulPlan::every_way(&*self.device, self.tuned(), matmul)
    }

    /// Chooses kernels for the gradient of a layer with `weight`, or with experts, by its input, and makes them ready. What was planned
    /// before is known, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the gradient is not valid, no family serves it, or a kernel cannot be made ready.
    pub fn plan_gradient<'a>(
        &self,
        weight: impl Into<GradientWeight<'a>>,
        gradient: &Gradient,
    ) -> Result<GradientPlan, Error> {
        GradientPlan::new(&*self.device, self.tuned(), &self.plans, &weight.into().shape(), gradient)
    }

    /// Chooses a kernel for `quantization` and makes it ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the quantization is not valid, no family serves it, or the kernel cannot be made ready.
    pub fn plan_quantization(&self, quantization: &Quantization) -> Result<QuantizationPlan, Error> {
        QuantizationPlan::new(&*self.device, &self.plans, quantization)
    }

    /// Memory for what a run of `plan` writes: an X in codes and scales, for [`QuantizationPlan::run`].
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn allocate_x(&self, plan: &QuantizationPlan) -> Result<QuantizedX, Error> {
        QuantizedX::allocate(self, plan.op())
    }

    /// Memory for what a run of `plan` writes, whose result is quantized ([`Norm::d_format`]): for [`NormArgs::quantized`].
    ///
    /// # Errors
    /// When the result is of plain numbers, or the device is out of memory.
    ///
    /// [`NormArgs::quantized`]: crate::NormArgs::quantized
    pub fn allocate_normed_x(&self, plan: &NormPlan) -> Result<QuantizedX, Error> {
        let plain = || Error::NotQuantized { got: plan.op().d.dtype.into() };
        QuantizedX::allocate(self, plan.quantization().ok_or_else(plain)?)
    }

    /// Quantizes X as `quantization` says, on the default stream: plans, allocates and runs, for one use.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Quantization, XFormat};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let x = ctx.upload(&[0.5f32, -1.0, 0.25, 2.0])?;
    /// let quantized = ctx.quantize_x(&Quantization::new(1, 4, DType::F32, XFormat::Q8_0), &x)?;
    /// let codes: Vec<u8> = ctx.download(quantized.codes())?;
    /// assert_eq!(codes[..4].iter().map(|&code| code as i8).collect::<Vec<_>>(), [32, -64, 16, 127]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of planning, allocating and running; a format that wants a factor wants a plan's [`run`](QuantizationPlan::run).
    pub fn quantize_x<'a>(
        &self,
        quantization: &Quantization,
        x: impl Into<BufferRef<'a>>,
    ) -> Result<QuantizedX, Error> {
        let plan = self.plan_quantization(quantization)?;
        let mut quantized = self.allocate_x(&plan)?;
        let x: BufferRef<'_> = x.into();
        plan.run(&self.default_stream(), quantized.args(x))?;
        Ok(quantized)
    }

    /// Chooses kernels for `attention` and makes them ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Attention, AttentionArgs, Context, DType, Keys, Queries};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // One query of each of two sequences, with room for four keys each; one head of eight features.
    /// let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(2, 1), Keys::lengths(4)).causal();
    /// let plan = ctx.plan_attention(&attention)?;
    /// let (q, k) = (ctx.upload(&[0.5f32; 2 * 8])?, ctx.upload(&[1.0f32; 2 * 4 * 8])?);
    /// let values: Vec<f32> = (0..2 * 4 * 8).map(|i| (i / 8) as f32).collect();
    /// let (v, lengths) = (ctx.upload(&values)?, ctx.upload(&[3u32, 1])?);
    /// let mut d = ctx.allocate(2 * 8 * 4)?;
    /// let args = AttentionArgs::new(&q, &k, &v, &mut d);
    /// plan.run(&ctx.default_stream(), AttentionArgs { kv_lengths: Some((&lengths).into()), ..args })?;
    /// let means: Vec<f32> = ctx.download(&d)?; // all keys are alike: the means of the values 0, 1, 2, and of 4
    /// assert!(means[..8].iter().all(|v| (v - 1.0).abs() < 1e-6) && means[8..].iter().all(|v| *v == 4.0));
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the attention is not valid, no family serves it, or a kernel cannot be made ready.
    pub fn plan_attention(&self, attention: &Attention) -> Result<AttentionPlan, Error> {
        AttentionPlan::new(&*self.device, &self.plans, attention)
    }

    /// A plan for each way to run `attention` that [`Context::plan_attention`] has the choice of, the fastest by the cost model first; none
    /// where there is no query. To test them all.
    ///
    /// # Errors
    /// As [`Context::plan_attention`].
    pub fn plan_attention_every_way(&self, attention: &Attention) -> Result<Vec<AttentionPlan>, Error> {
        AttentionPlan::every_way(&*self.device, attention)
    }

    /// Chooses a kernel for `norm` and makes it ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Norm, NormArgs, NormFunction};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let plan = ctx.plan_norm(&Norm::new(1, 4, DType::F32, NormFunction::layer(0.0)).d_dtype(DType::F16))?;
    /// let x = ctx.upload(&DType::F32.encode(&[11.0, 9.0, 9.0, 11.0]))?;
    /// let mut d = ctx.allocate(4 * DType::F16.bytes())?;
    /// plan.run(&ctx.default_stream(), NormArgs::new(&x, &mut d))?;
    /// assert_eq!(DType::F16.decode(&ctx.download(&d)?), [1.0, -1.0, -1.0, 1.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the norm is not valid, no family serves it, or the kernel cannot be made ready.
    pub fn plan_norm(&self, norm: &Norm) -> Result<NormPlan, Error> {
        NormPlan::new(&*self.device, &self.plans, norm)
    }

    /// Chooses a kernel for `optimizer` and makes it ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the optimizer is not valid, no family serves it, or the kernel cannot be made ready.
    pub fn plan_optimizer(&self, optimizer: &Optimizer) -> Result<OptimizerPlan, Error> {
        OptimizerPlan::new(&*self.device, &self.plans, optimizer)
    }

    /// Chooses a kernel for `append` and makes it ready. What was planned before is known, as with [`Context::plan`]; frequencies of a
    /// rotary embedding are uploaded.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Keys, KvAppend, KvAppendArgs, Queries, Rotary};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // One new token of a sequence that has room for four: one head of eight features, of which two are turned.
    /// let append = KvAppend::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::lengths(4)).rotary(Rotary::neox(2));
    /// let plan = ctx.plan_kv_append(&append)?;
    /// let ones = ctx.upload(&[1.0f32; 8])?;
    /// let mut q = ctx.upload(&[1.0f32, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])?;
    /// let (mut k, mut v) = (ctx.allocate(4 * 8 * 4)?, ctx.allocate(4 * 8 * 4)?);
    /// let lengths = ctx.upload(&[2u32])?; // the new key is the second: its position is 1
    /// let args = KvAppendArgs::new(&ones, &ones, &mut k, &mut v).q(&mut q).kv_lengths(&lengths);
    /// plan.run(&ctx.default_stream(), args)?;
    /// let turned: Vec<f32> = ctx.download(&q)?;
    /// assert!((turned[0] - 1f32.cos()).abs() < 1e-6 && (turned[1] - 1f32.sin()).abs() < 1e-6 && turned[2] == 3.0);
    /// let values: Vec<f32> = ctx.download(&v)?;
    /// assert!(values[..8] == [0.0; 8] && values[8..16] == [1.0; 8]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When it is not valid, no family serves it, or the kernel cannot be made ready.
    pub fn plan_kv_append(&self, append: &KvAppend) -> Result<KvAppendPlan, Error> {
        KvAppendPlan::new(self, &self.plans, append)
    }

    /// Chooses kernels for `indexer` and makes them ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Indexer, IndexerArgs, KvFormat};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // One query of two heads, of which one counts twice; four keys, each of which one head matches, or none.
    /// let (one, two) = ([1.0f32; 16], [[1.0f32; 16], [-1.0; 16]]);
    /// let f16 = |rows: &[[f32; 16]]| DType::F16.encode(&rows.concat());
    /// let q = ctx.upload(&f16(&two))?;
    /// let k = ctx.upload(&f16(&[one, [0.0; 16], [-1.0; 16], [0.5; 16]]))?;
    /// let weights = ctx.upload(&[1.0f32, 2.0])?;
    /// let indexer = Indexer::new(KvFormat::Plain(DType::F16), 1, 2, 16, 4);
    ///
    /// let mut scores = ctx.allocate(4 * 4)?;
    /// let plan = ctx.plan_indexer(&indexer)?;
    /// plan.run(&ctx.default_stream(), IndexerArgs::new(&q, &k, &weights, &mut scores))?;
    /// assert_eq!(ctx.download::<f32>(&scores)?, [16.0, 0.0, 32.0, 8.0]);
    ///
    /// let mut best = ctx.allocate(3 * 4)?;
    /// let plan = ctx.plan_indexer(&indexer.best(3))?;
    /// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    /// plan.run(&ctx.default_stream(), IndexerArgs::new(&q, &k, &weights, &mut best).workspace(&mut workspace))?;
    /// assert_eq!(ctx.download::<u8>(&best)?, [2i32, 0, 3].map(i32::to_le_bytes).concat());
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the indexer is not valid, no family serves it, or a kernel cannot be made ready.
    pub fn plan_indexer(&self, indexer: &Indexer) -> Result<IndexerPlan, Error> {
        IndexerPlan::new(&*self.device, &self.plans, indexer)
    }

    /// Every way to run `problem` that [`Context::plan`] has the choice of, the fastest by the cost model first; none
    /// for 0 tokens. To measure how good the choice is: [`Context::plan_candidate`] makes one ready.
    ///
    /// # Errors
    /// As [`Context::plan`], but for making the kernel ready.
    pub fn candidates(&self, problem: &Problem) -> Result<Vec<Candidate>, Error> {
        self.check_weight(problem.weight().device)?;
        Candidate::all(&*self.device, self.tuned(), problem)
    }

    /// Makes the kernel of one candidate ready.
    ///
    /// # Errors
    /// When its weight is on another device, or the kernel cannot be made ready.
    pub fn plan_candidate(&self, candidate: &Candidate) -> Result<Plan, Error> {
        self.check_weight(candidate.device())?;
        Plan::of_candidate(self, candidate)
    }
}
