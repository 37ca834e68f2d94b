//! [`KvCache`]: rotary embedding, append and attention.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{CpuStorage, CudaStorage, DType, Error, InplaceOp1, InplaceOp3, Layout, Result, Shape, Tensor, bail};
use qgemm_api::{
    Attention, AttentionArgs, AttentionPlan, Buffer, BufferMut, BufferRef, Keys, KvAppend, KvAppendArgs, KvAppendPlan,
    Queries, Rotary,
};

use crate::context::{Context, dtype_of};
use crate::fused::Segments;
use crate::operands::{self, Input};
use crate::operation::{Operation, Run};

/// Bounds of keys are powers of two from here on, so that a growing sequence meets few plans.
const LEAST_KEYS: usize = 256;

/// Heads and room of a [`KvCache`].
#[derive(Clone, Copy, Debug)]
pub struct KvCacheSize {
    /// Layers of the model.
    pub layers: usize,
    /// Sequences of a batch.
    pub sequences: usize,
    /// Keys of a sequence at most.
    pub capacity: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
}

/// Keys and values of all layers of a model, and their attention.
///
/// A step appends tokens at one position of every sequence: [`KvCache::begin`], then
/// [`KvCache::attention`] in each layer. The append rotates queries and keys; attention is
/// causal. Both take one launch, attention over many keys two.
#[derive(Debug)]
pub struct KvCache {
    context: Context,
    size: KvCacheSize,
    dtype: DType,
    rotary: Option<Rotary>,
    /// Keys and values of each layer, `[sequences, capacity, kv_heads, head_dim]`.
    layers: Vec<Mutex<[Buffer; 2]>>,
    /// Number of keys of each sequence.
    lengths: Buffer,
    plans: HashMap<Step, Arc<Plans>>,
    step: Option<(Step, Arc<Plans>)>,
}

/// Step that plans are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Step {
    /// New tokens of a sequence.
    tokens: usize,
    /// Bound of keys.
    most: usize,
}

#[derive(Debug)]
struct Plans {
    append: KvAppendPlan,
    attention: AttentionPlan,
}

impl KvCache {
    /// Empty cache of keys and values in `dtype`, the type of queries, too.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn new(ctx: &Context, size: KvCacheSize, dtype: DType, rotary: Option<Rotary>) -> Result<Self> {
        let row = size.kv_heads.checked_mul(size.head_dim);
        let rows = size.sequences.checked_mul(size.capacity);
        let Some(count) = row.zip(rows).and_then(|(row, rows)| row.checked_mul(rows)) else {
            bail!("a KV cache of {size:?} is too large");
        };
        let qgemm = ctx.qgemm();
        let (of_keys, of_lengths) = (dtype_of(dtype)?, vec![0u32; size.sequences]);
        let layer =
            |_| Ok(Mutex::new([qgemm.allocate_elements(of_keys, count)?, qgemm.allocate_elements(of_keys, count)?]));
        let layers = (0..size.layers).map(layer).collect::<std::result::Result<_, qgemm_api::Error>>();
        let (layers, lengths) = (layers.map_err(Error::wrap)?, qgemm.upload(&of_lengths).map_err(Error::wrap)?);
        Ok(Self { context: ctx.clone(), size, dtype, rotary, layers, lengths, plans: HashMap::new(), step: None })
    }

    /// Begins a step of `tokens` new tokens of each sequence behind `position` earlier ones.
    /// Later keys are forgotten.
    ///
    /// # Errors
    /// When the cache has no room for them.
    pub fn begin(&mut self, position: usize, tokens: usize) -> Result<()> {
        let keys = position.saturating_add(tokens);
        if keys > self.size.capacity {
            bail!("KV cache: expected at most {} keys, got {keys}", self.size.capacity);
        }
        let step = Step { tokens, most: keys.next_power_of_two().max(LEAST_KEYS).min(self.size.capacity) };
        let plans = match self.plans.get(&step) {
            Some(plans) => plans.clone(),
            None => {
                let plans = Arc::new(self.plan(step)?);
                self.plans.insert(step, plans.clone());
                plans
            }
        };
        let lengths = vec![keys as u32; self.size.sequences];
        let qgemm = self.context.qgemm();
        qgemm.enqueue_upload(self.context.stream(), &lengths, &mut self.lengths).map_err(Error::wrap)?;
        self.step = Some((step, plans));
        Ok(())
    }

    fn plan(&self, step: Step) -> Result<Plans> {
        let KvCacheSize { sequences, capacity, heads, kv_heads, head_dim, .. } = self.size;
        let (dtype, queries) = (dtype_of(self.dtype)?, Queries::each(sequences, step.tokens));
        let keys = Keys::lengths(capacity).most(step.most);
        let append = KvAppend::new(dtype, heads, kv_heads, head_dim, queries, keys);
        let append = self.rotary.into_iter().fold(append, KvAppend::rotary);
        let attention = Attention::new(dtype, heads, kv_heads, head_dim, queries, keys).causal();
        let qgemm = self.context.qgemm();
        Ok(Plans {
            append: qgemm.plan_kv_append(&append).map_err(Error::wrap)?,
            attention: qgemm.plan_attention(&attention).map_err(Error::wrap)?,
        })
    }

    /// Attention of a layer to its cache and the new tokens: `[sequences, tokens, heads ·
    /// head_dim]`, of queries, keys and values behind each other. The queries are rotated in
    /// place.
    ///
    /// # Errors
    /// When there is no step or no such layer, or a tensor has another device, type or shape
    /// than expected.
    pub fn attention(&self, layer: usize, qkv: &Segments) -> Result<Tensor> {
        qkv.all().inplace_op1(&Append { cache: self, layer })?;
        qkv.get(0)?.apply_op1_no_bwd(&Run(&Attend { cache: self, layer }))
    }

    /// [`KvCache::attention`] of separate tensors, `[sequences, tokens, heads, head_dim]` or
    /// with both last dimensions as one. The queries are rotated in place; no tensor may share
    /// their storage.
    ///
    /// # Errors
    /// As [`KvCache::attention`].
    pub fn attention_of(&self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let q = q.contiguous()?;
        q.inplace_op3(&k.contiguous()?, &v.contiguous()?, &Append { cache: self, layer })?;
        q.apply_op1_no_bwd(&Run(&Attend { cache: self, layer }))
    }

    fn step(&self) -> Result<&(Step, Arc<Plans>)> {
        match &self.step {
            Some(step) => Ok(step),
            None => bail!("KV cache: a step begins with `KvCache::begin`"),
        }
    }

    fn layer(&self, layer: usize) -> Result<MutexGuard<'_, [Buffer; 2]>> {
        match self.layers.get(layer) {
            Some(layer) => Ok(layer.lock().unwrap_or_else(PoisonError::into_inner)),
            None => bail!("KV cache: expected a layer below {}, got {layer}", self.layers.len()),
        }
    }

    /// Elements of the queries, and of the keys, of a step.
    fn elements(&self) -> Result<[usize; 2]> {
        let rows = self.size.sequences * self.step()?.0.tokens * self.size.head_dim;
        Ok([rows * self.size.heads, rows * self.size.kv_heads])
    }
}

/// Rotates and appends the new tokens of a layer.
struct Append<'c> {
    cache: &'c KvCache,
    layer: usize,
}

impl Append<'_> {
    const NAME: &'static str = "qgemm-kv-append";

    /// Append of queries, keys and values behind each other.
    fn run(&self, qkv: BufferMut<'_>) -> Result<()> {
        let [q, k] = self.cache.elements()?.map(|count| count * self.cache.dtype.size_in_bytes());
        let (expected, got) = (q + 2 * k, qkv.view().len());
        if expected != got {
            bail!("{}: expected {expected} bytes of queries, keys and values, got {got}", Self::NAME);
        }
        let ([new_k, new_v], [q]) = qkv.parts([q..q + k, q + k..q + 2 * k], [0..q]).map_err(Error::wrap)?;
        self.run_of(q, new_k, new_v)
    }

    fn run_of(&self, q: BufferMut<'_>, new_k: BufferRef<'_>, new_v: BufferRef<'_>) -> Result<()> {
        let (_, plans) = self.cache.step()?;
        let mut layer = self.cache.layer(self.layer)?;
        let [k, v] = &mut *layer;
        let args = KvAppendArgs::new(new_k, new_v, k, v).q(q).kv_lengths(&self.cache.lengths);
        plans.append.run(self.cache.context.stream(), args).map_err(Error::wrap)
    }
}

impl InplaceOp1 for Append<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.run((&mut operands::host_mut(Self::NAME, storage, layout)?).into())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.cache.context.cuda()?.update(Self::NAME, storage, layout, |qkv| self.run(qkv))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        bail!("{}: built without the feature cuda", Self::NAME)
    }
}

impl InplaceOp3 for Append<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(
        &self,
        q: &mut CpuStorage,
        of_q: &Layout,
        k: &CpuStorage,
        of_k: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<()> {
        let (k, v) = (operands::host(Self::NAME, k, of_k)?, operands::host(Self::NAME, v, of_v)?);
        self.run_of((&mut operands::host_mut(Self::NAME, q, of_q)?).into(), (&k).into(), (&v).into())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &mut CudaStorage,
        of_q: &Layout,
        k: &CudaStorage,
        of_k: &Layout,
        v: &CudaStorage,
        of_v: &Layout,
    ) -> Result<()> {
        let cuda = self.cache.context.cuda()?;
        let (k, v) = (cuda.read(Self::NAME, k, of_k)?, cuda.read(Self::NAME, v, of_v)?);
        cuda.update(Self::NAME, q, of_q, |q| self.run_of(q, k.view, v.view))
    }
}

/// Attention of rotated queries to a layer's cache.
struct Attend<'c> {
    cache: &'c KvCache,
    layer: usize,
}

impl Operation for Attend<'_> {
    const NAME: &'static str = "qgemm-attention";

    fn context(&self) -> &Context {
        &self.cache.context
    }

    fn result(&self, inputs: &[Input<'_>]) -> Result<(Shape, DType)> {
        let KvCacheSize { sequences, heads, head_dim, .. } = self.cache.size;
        let (step, _) = self.cache.step()?;
        let (expected, got) = (self.cache.elements()?[0], inputs[0].dims.iter().product::<usize>());
        if expected != got || inputs[0].dtype != self.cache.dtype {
            let (expected, got) = (self.cache.dtype, inputs[0]);
            bail!(
                "{}: Q: expected {expected:?} [{sequences}, {}, {}], got {:?} {:?}",
                Self::NAME,
                step.tokens,
                heads * head_dim,
                got.dtype,
                got.dims
            );
        }
        Ok(((sequences, step.tokens, heads * head_dim).into(), self.cache.dtype))
    }

    fn run(&self, inputs: &[Input<'_>], d: BufferMut<'_>) -> Result<()> {
        let (_, plans) = self.cache.step()?;
        let layer = self.cache.layer(self.layer)?;
        let [k, v] = &*layer;
        let args = AttentionArgs::new(inputs[0].view, k, v, d).kv_lengths(&self.cache.lengths);
        let stream = self.context().stream();
        match plans.attention.workspace_bytes() {
            0 => plans.attention.run(stream, args).map_err(Error::wrap),
            bytes => self.context().with_workspace(bytes, |workspace| {
                plans.attention.run(stream, args.workspace(workspace)).map_err(Error::wrap)
            }),
        }
    }
}
