//! One step of a decoder: new tokens of several sessions through all layers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use qgemm_api::{
    Attention, AttentionPlan, Buffer, BufferMut, BufferRef, Context, Conversion, ConversionArgs, DType, FusedArgs,
    FusedPlan, FusedProblem, GatherRows, GatherRowsArgs, GatherRowsPlan, KvAppend, KvAppendPlan, Norm, NormArgs,
    NormFunction, NormPlan, Queries, Stream, Workspace,
};

use crate::decoder::{Decoder, Qkv};
use crate::error::Error;
use crate::feed_forward::{ExpertMemory, FeedForwardArgs};
use crate::hyperparameters::Hyperparameters;
use crate::kv_cache::{CacheSize, KvCache};
use crate::loader::normed_problem;
use crate::projection::Projection;
use crate::sampler::{Draw, Sampled, Sampler};

/// Most shapes whose plans are kept.
const KEPT_SHAPES: usize = 64;
/// Bounds of keys are powers of two from here on, so that a growing session meets few plans.
const LEAST_KEYS: usize = 256;
/// Bytes of the status of an embedding look-up.
const EMBEDDING_STATUS: usize = 16;

/// New tokens of one session.
pub struct Sequence<'a> {
    /// The new tokens.
    pub ids: &'a [u32],
    /// Tokens in the cache after the step.
    pub length: usize,
    /// Pages of the session.
    pub pages: &'a [u32],
    /// The token to sample after the last one, if it is wanted.
    pub draw: Option<Draw<'a>>,
}

/// A decoder with its cache and memory for a step.
pub struct Forward {
    ctx: Context,
    decoder: Arc<Decoder>,
    cache: KvCache,
    inputs: Inputs,
    activations: Activations,
    experts: Option<ExpertMemory>,
    sampler: Sampler,
    workspace: Workspace,
    plans: HashMap<Shape, Plans>,
}

/// Device inputs of a step.
struct Inputs {
    ids: Buffer,
    q_offsets: Buffer,
    kv_lengths: Buffer,
    block_table: Buffer,
}

/// Activations of a step.
struct Activations {
    /// Residual stream, f32.
    x: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    attended: Buffer,
    gated: Buffer,
    /// Rows of the residual stream whose logits are needed.
    last: Buffer,
    logits: Buffer,
    /// Status of the embedding look-up. Nobody reads it: ids are checked before they come here.
    embedding_status: Buffer,
}

/// Key of a step's plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    tokens: usize,
    sequences: usize,
    /// New tokens of the longest sequence.
    longest: usize,
    /// Bound for the keys of a sequence.
    keys: usize,
}

/// Plans of a shape.
struct Plans {
    embedding: GatherRowsPlan,
    append: KvAppendPlan,
    /// Attention by window.
    attention: HashMap<Option<usize>, AttentionPlan>,
    /// Norm before experts.
    ffn_norm: Option<NormPlan>,
    /// Norms of the heads of queries and keys.
    head_norms: Option<[NormPlan; 2]>,
    /// Query, key and value projections by layer.
    qkv: Vec<FusedPlan>,
    workspace_bytes: usize,
}

impl Forward {
    /// Allocates memory for steps of up to `tokens` tokens of `sequences` sequences.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn new(
        ctx: &Context,
        decoder: Arc<Decoder>,
        size: CacheSize,
        tokens: usize,
        sequences: usize,
    ) -> Result<Self, Error> {
        let Hyperparameters { hidden, intermediate, heads, kv_heads, head_dim, .. } = decoder.numbers;
        let rows = |dtype, rows: usize, columns: usize| ctx.allocate_elements(dtype, rows.saturating_mul(columns));
        let dtype = decoder.precision.activations;
        let activations = Activations {
            x: rows(DType::F32, tokens, hidden)?,
            q: rows(dtype, tokens, heads * head_dim)?,
            k: rows(dtype, tokens, kv_heads * head_dim)?,
            v: rows(dtype, tokens, kv_heads * head_dim)?,
            attended: rows(dtype, tokens, heads * head_dim)?,
            gated: rows(dtype, tokens, intermediate)?,
            last: rows(DType::F32, sequences, hidden)?,
            logits: rows(DType::F32, sequences, decoder.vocabulary())?,
            embedding_status: ctx.allocate(EMBEDDING_STATUS)?,
        };
        let inputs = Inputs {
            ids: ctx.upload(&vec![0u32; tokens])?,
            q_offsets: ctx.upload(&vec![0u32; sequences + 1])?,
            kv_lengths: ctx.upload(&vec![0u32; sequences])?,
            block_table: ctx.upload(&vec![0u32; sequences * size.width])?,
        };
        let cache = KvCache::new(ctx, &decoder.numbers, size)?;
        let parts = decoder.layers.iter().map(|layer| &layer.feed_forward);
        let experts = ExpertMemory::new(ctx, parts, (&decoder.numbers, dtype), tokens)?;
        let sampler = Sampler::new(ctx, sequences, decoder.vocabulary())?;
        let (workspace, plans) = (ctx.workspace(0)?, HashMap::new());
        Ok(Self { ctx: ctx.clone(), decoder, cache, inputs, activations, experts, sampler, workspace, plans })
    }

    /// Runs a step. Returns the token of each sequence that draws one, in order.
    ///
    /// # Errors
    /// A device error, after which the cache's new tokens are undefined; a step may be repeated.
    pub fn run(&mut self, sequences: &[Sequence<'_>]) -> Result<Vec<Result<Sampled, Error>>, Error> {
        let shape = self.upload(sequences)?;
        if !self.plans.contains_key(&shape) {
            let plans = self.plan(shape)?;
            if self.plans.len() >= KEPT_SHAPES {
                self.plans.clear();
            }
            self.plans.insert(shape, plans);
        }
        let wanted = wanted_rows(sequences);
        self.grow_workspace(shape, wanted.len())?;
        let stream = self.ctx.default_stream();
        self.embed(&stream, shape)?;
        for layer in 0..self.decoder.layers.len() {
            self.layer(&stream, shape, layer)?;
        }
        self.logits(&stream, &wanted)?;
        let draws: Vec<Draw<'_>> = sequences.iter().filter_map(|sequence| sequence.draw).collect();
        if draws.is_empty() { Ok(Vec::new()) } else { self.sampler.sample(&stream, &self.activations.logits, &draws) }
    }

    /// Uploads ids, offsets, lengths and the block table.
    fn upload(&mut self, sequences: &[Sequence<'_>]) -> Result<Shape, Error> {
        let width = self.cache.size().width;
        let (mut ids, mut offsets, mut lengths) = (Vec::new(), vec![0u32], Vec::new());
        let mut table = vec![0u32; sequences.len() * width];
        for (sequence, row) in sequences.iter().zip(table.chunks_exact_mut(width)) {
            ids.extend_from_slice(sequence.ids);
            offsets.push(ids.len() as u32);
            lengths.push(sequence.length as u32);
            row[..sequence.pages.len()].copy_from_slice(sequence.pages);
        }
        let Inputs { ids: device_ids, q_offsets, kv_lengths, block_table } = &mut self.inputs;
        self.ctx.upload_into(&ids, device_ids)?;
        self.ctx.upload_into(&offsets, q_offsets)?;
        self.ctx.upload_into(&lengths, kv_lengths)?;
        self.ctx.upload_into(&table, block_table)?;
        let longest = sequences.iter().map(|sequence| sequence.ids.len()).max().unwrap_or(0);
        let keys = sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0);
        let keys = keys.next_power_of_two().max(LEAST_KEYS).min(width * self.cache.size().page_size);
        Ok(Shape { tokens: ids.len(), sequences: sequences.len(), longest, keys })
    }

    fn plan(&self, shape: Shape) -> Result<Plans, Error> {
        let Shape { tokens, sequences, longest, keys } = shape;
        let (ctx, decoder) = (&self.ctx, &self.decoder);
        let Hyperparameters { hidden, heads, kv_heads, head_dim, eps, .. } = decoder.numbers;
        let dtype = decoder.precision.activations;
        let queries = match longest == 1 {
            true => Queries::each(sequences, 1),
            false => Queries::offsets(sequences, tokens, longest),
        };
        let keys = self.cache.keys(keys);
        let append = KvAppend::new(dtype, heads, kv_heads, head_dim, queries, keys).rotary(decoder.rotary.rotary);
        let attend = |window: Option<usize>| {
            let mut attention = Attention::new(dtype, heads, kv_heads, head_dim, queries, keys).causal();
            if let Some(window) = window {
                attention = attention.window(window);
            }
            if decoder.precision.batch_invariant {
                attention = attention.batch_invariant();
            }
            ctx.plan_attention(&self.cache.describe_attention(attention))
        };
        let mut attention = HashMap::new();
        for layer in &decoder.layers {
            if let Entry::Vacant(entry) = attention.entry(layer.window) {
                entry.insert(attend(layer.window)?);
            }
        }
        let head_norm = |heads: usize| {
            let function = NormFunction::rms(eps).gamma(DType::F32);
            ctx.plan_norm(&Norm::new(tokens * heads, head_dim, dtype, function).d_in_place())
        };
        let has_head_norms = decoder.layers.iter().any(|layer| layer.head_norms.is_some());
        let qkv =
            decoder.layers.iter().map(|layer| self.plan_qkv(&layer.qkv, tokens)).collect::<Result<Vec<_>, _>>()?;
        let function = NormFunction::rms(eps).gamma(DType::F32);
        let ffn_norm = Norm::new(tokens, hidden, DType::F32, function).d_dtype(dtype);
        let fused = qkv.iter().map(FusedPlan::workspace_bytes).max().unwrap_or(0);
        Ok(Plans {
            embedding: ctx.plan_gather_rows(&GatherRows::new(&decoder.embedding, tokens))?,
            append: ctx.plan_kv_append(&self.cache.describe_append(append))?,
            head_norms: if has_head_norms { Some([head_norm(heads)?, head_norm(kv_heads)?]) } else { None },
            ffn_norm: self.experts.is_some().then(|| ctx.plan_norm(&ffn_norm)).transpose()?,
            workspace_bytes: attention.values().map(|plan| plan.workspace_bytes()).fold(fused, usize::max),
            attention,
            qkv,
        })
    }

    fn plan_qkv(&self, Qkv { weight, bias }: &Qkv, tokens: usize) -> Result<FusedPlan, Error> {
        let Decoder { precision, numbers, .. } = &*self.decoder;
        let mut problem = FusedProblem::new(weight, tokens, DType::F32);
        for segment in 0..weight.segments() {
            problem = problem.output_dtype(segment, precision.activations);
        }
        let problem = problem.each(|p| {
            let p = normed_problem(p, *precision, numbers.eps);
            if bias.is_some() { p.bias(DType::F32) } else { p }
        });
        Ok(self.ctx.plan_fused(&problem)?)
    }

    /// Makes the workspace large enough for all plans of the step.
    fn grow_workspace(&mut self, shape: Shape, wanted: usize) -> Result<(), Error> {
        let mut bytes = self.plans[&shape].workspace_bytes;
        let mut needs = |projection: &Projection, m: usize| {
            bytes = bytes.max(projection.linear.prepare([m])?);
            Ok::<_, Error>(())
        };
        for layer in &self.decoder.layers {
            needs(&layer.attention_output, shape.tokens)?;
            layer.feed_forward.products().into_iter().try_for_each(|p| needs(p, shape.tokens))?;
        }
        needs(&self.decoder.head, wanted)?;
        if bytes > self.workspace.len() {
            self.workspace = self.ctx.workspace(bytes)?;
        }
        Ok(())
    }

    /// Embedding rows of the ids: the residual stream before the first layer.
    fn embed(&mut self, stream: &Stream, shape: Shape) -> Result<(), Error> {
        let Activations { x, embedding_status, .. } = &mut self.activations;
        let args = GatherRowsArgs::new(&self.decoder.embedding, &self.inputs.ids, x, embedding_status);
        Ok(self.plans[&shape].embedding.run(stream, args)?)
    }

    /// One layer: the residual stream in `x` becomes that of the next.
    fn layer(&mut self, stream: &Stream, shape: Shape, index: usize) -> Result<(), Error> {
        let decoder = self.decoder.clone();
        let layer = &decoder.layers[index];
        self.qkv(stream, shape, index)?;
        let plans = &self.plans[&shape];
        let Inputs { q_offsets, kv_lengths, block_table, .. } = &self.inputs;
        let Activations { x, q, k, v, attended, gated, .. } = &mut self.activations;
        if let (Some([q_norm, k_norm]), Some([q_gamma, k_gamma])) = (&plans.head_norms, &layer.head_norms) {
            q_norm.run(stream, NormArgs::in_place(&mut *q).gamma(q_gamma))?;
            k_norm.run(stream, NormArgs::in_place(&mut *k).gamma(k_gamma))?;
        }
        let q_offsets = (shape.longest != 1).then(|| q_offsets.view());
        let mut args = self.cache.append_args(index, k, v).q(&mut *q).kv_lengths(kv_lengths);
        (args.q_offsets, args.block_table) = (q_offsets, Some(block_table.view()));
        if let Some([cos, sin]) = &decoder.rotary.tables {
            (args.cos, args.sin) = (Some(cos.view()), Some(sin.view()));
        }
        plans.append.run(stream, args)?;
        let mut args = self.cache.attention_args(index, q, attended);
        (args.q_offsets, args.kv_lengths) = (q_offsets, Some(kv_lengths.view()));
        (args.block_table, args.workspace) = (Some(block_table.view()), Some(&mut self.workspace));
        plans.attention[&layer.window].run(stream, args)?;
        let m = shape.tokens;
        layer.attention_output.run(stream, m, &*attended, &mut *x, None, &mut self.workspace)?;
        let args = FeedForwardArgs {
            x,
            gamma: &layer.ffn_norm,
            norm: plans.ffn_norm.as_ref(),
            gated,
            experts: self.experts.as_mut(),
            workspace: &mut self.workspace,
        };
        layer.feed_forward.run(stream, m, args)
    }

    /// Query, key and value of a layer.
    fn qkv(&mut self, stream: &Stream, shape: Shape, index: usize) -> Result<(), Error> {
        let layer = &self.decoder.layers[index];
        let Qkv { weight, bias } = &layer.qkv;
        let Activations { x, q, k, v, .. } = &mut self.activations;
        let mut outputs: [BufferMut<'_>; 3] = [q.into(), k.into(), v.into()];
        let mut args = FusedArgs::new(&*x, weight, &mut outputs, &mut self.workspace);
        (args.bias, args.gamma) = (bias.as_ref().map(Buffer::view), Some(layer.attention_norm.view()));
        Ok(self.plans[&shape].qkv[index].run(stream, args)?)
    }

    /// Logits of rows of the residual stream.
    fn logits(&mut self, stream: &Stream, wanted: &[usize]) -> Result<(), Error> {
        let (Some(&first), count) = (wanted.first(), wanted.len()) else { return Ok(()) };
        let row = self.decoder.numbers.hidden * DType::F32.bytes();
        let Activations { x, last, logits, .. } = &mut self.activations;
        let is_contiguous = wanted.iter().enumerate().all(|(i, &at)| at == first + i);
        let rows: BufferRef<'_> = if is_contiguous {
            x.slice(first * row..(first + count) * row)?
        } else {
            let columns = self.decoder.numbers.hidden;
            let copy = self.ctx.plan_conversion(&Conversion::new(1, columns, DType::F32, DType::F32))?;
            for (i, &at) in wanted.iter().enumerate() {
                let from = x.slice(at * row..(at + 1) * row)?;
                copy.run(stream, ConversionArgs::new(from, last.slice_mut(i * row..(i + 1) * row)?))?;
            }
            last.view()
        };
        let gamma = Some(&self.decoder.output_norm);
        self.decoder.head.run(stream, count, rows, logits, gamma, &mut self.workspace)
    }
}

/// Rows of the last tokens of sequences that draw a token.
fn wanted_rows(sequences: &[Sequence<'_>]) -> Vec<usize> {
    let mut end = 0;
    let last = |sequence: &Sequence<'_>| {
        end += sequence.ids.len();
        sequence.draw.map(|_| end - 1)
    };
    sequences.iter().filter_map(last).collect()
}
