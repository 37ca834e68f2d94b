//! One pass of an encoder: texts without padding through all layers.

use qgemm_api::{
    Attention, AttentionArgs, AttentionPlan, Buffer, BufferMut, Context, DType, EncoderNumbers, FusedArgs, FusedPlan,
    FusedProblem, GatherRows, GatherRowsArgs, Keys, Norm, NormArgs, NormPlan, Queries, Stream, Workspace,
};

use super::weights::{EncoderLayer, EncoderWeights, LayerNorm};
use crate::error::Error;
use crate::precision::Precision;

/// Bytes of the status of an embedding look-up.
const EMBEDDING_STATUS: usize = 16;

/// Plans and memory of a pass.
pub struct Pass<'a> {
    ctx: &'a Context,
    weights: &'a EncoderWeights,
    tokens: usize,
    /// Borders of texts: `texts + 1` rows, from 0.
    offsets: Buffer,
    /// Position of each token in its text.
    places: Buffer,
    /// Residual stream, f32.
    x: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    attended: Buffer,
    inner: Buffer,
    attention: AttentionPlan,
    norm: NormPlan,
    /// QKV by layer.
    qkv: Vec<FusedPlan>,
    workspace: Workspace,
}

impl<'a> Pass<'a> {
    /// A pass for texts of these numbers of tokens.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn new(
        ctx: &'a Context,
        weights: &'a EncoderWeights,
        numbers: &EncoderNumbers,
        precision: Precision,
        lengths: &[usize],
    ) -> Result<Self, Error> {
        let &EncoderNumbers { hidden, intermediate, heads, eps, .. } = numbers;
        let (tokens, longest) = (lengths.iter().sum(), lengths.iter().copied().max().unwrap_or(0));
        let (queries, keys) = (Queries::offsets(lengths.len(), tokens, longest), Keys::offsets(tokens, longest));
        let dtype = precision.activations;
        let mut attention = Attention::new(dtype, heads, heads, hidden / heads, queries, keys);
        if precision.batch_invariant {
            attention = attention.batch_invariant();
        }
        let attention = ctx.plan_attention(&attention)?;
        let norm = Norm::new(tokens, hidden, DType::F32, LayerNorm::function(eps)).d_in_place();
        let qkv = weights.layers.iter().map(|layer| plan_qkv(ctx, layer, tokens, precision));
        let qkv = qkv.collect::<Result<Vec<_>, Error>>()?;
        let mut bytes = qkv.iter().map(FusedPlan::workspace_bytes).fold(attention.workspace_bytes(), usize::max);
        for EncoderLayer { attention_output, up, down, .. } in &weights.layers {
            for part in [attention_output, up, down] {
                bytes = bytes.max(part.linear.prepare([tokens])?);
            }
        }
        let mut offsets = vec![0u32];
        for length in lengths {
            offsets.push(offsets.last().map_or(0, |end| end + *length as u32));
        }
        let places: Vec<u32> = lengths.iter().flat_map(|&length| 0..length as u32).collect();
        let rows = |dtype, columns: usize| ctx.allocate_elements(dtype, tokens.saturating_mul(columns));
        Ok(Self {
            ctx,
            weights,
            tokens,
            offsets: ctx.upload(&offsets)?,
            places: ctx.upload(&places)?,
            x: rows(DType::F32, hidden)?,
            q: rows(dtype, hidden)?,
            k: rows(dtype, hidden)?,
            v: rows(dtype, hidden)?,
            attended: rows(dtype, hidden)?,
            inner: rows(dtype, intermediate)?,
            attention,
            norm: ctx.plan_norm(&norm)?,
            qkv,
            workspace: ctx.workspace(bytes)?,
        })
    }

    /// Runs the pass. The ids are within the vocabulary. Returns the rows of all tokens, f32.
    ///
    /// # Errors
    /// A device error.
    pub fn run(mut self, ids: &[u32], numbers: &EncoderNumbers) -> Result<Vec<f32>, Error> {
        let stream = self.ctx.default_stream();
        self.embed(&stream, ids, numbers)?;
        for (layer, qkv) in self.weights.layers.iter().zip(std::mem::take(&mut self.qkv)) {
            self.layer(&stream, layer, &qkv)?;
        }
        Ok(self.ctx.download(&self.x)?)
    }

    /// Norm of the sum of word, position and segment embeddings.
    fn embed(&mut self, stream: &Stream, ids: &[u32], numbers: &EncoderNumbers) -> Result<(), Error> {
        let &EncoderNumbers { hidden, eps, .. } = numbers;
        let (ctx, tokens, EncoderWeights { words, positions, norm, .. }) = (self.ctx, self.tokens, self.weights);
        let ids = ctx.upload(ids)?;
        // Nobody reads the status: ids and positions are within their tables.
        let mut status = ctx.allocate(EMBEDDING_STATUS)?;
        let rows = || ctx.allocate_elements(DType::F32, tokens.saturating_mul(hidden));
        let (mut of_words, mut of_places) = (rows()?, rows()?);
        for (table, ids, d) in [(words, &ids, &mut of_words), (positions, &self.places, &mut of_places)] {
            let plan = ctx.plan_gather_rows(&GatherRows::new(table, tokens))?;
            plan.run(stream, GatherRowsArgs::new(table, ids, d, &mut status))?;
        }
        let function = LayerNorm::function(eps);
        let sum = Norm::new(tokens, hidden, DType::F32, function).residual(DType::F32).sum_in_place();
        let args = NormArgs::new(&of_words, &mut self.x).gamma(&norm.gamma).beta(&norm.beta).sum(&mut of_places);
        Ok(ctx.plan_norm(&sum)?.run(stream, args)?)
    }

    fn layer(&mut self, stream: &Stream, layer: &EncoderLayer, qkv: &FusedPlan) -> Result<(), Error> {
        let Self { tokens, offsets, x, q, k, v, attended, inner, attention, norm, workspace, .. } = self;
        let tokens = *tokens;
        let mut outputs: [BufferMut<'_>; 3] = [(&mut *q).into(), (&mut *k).into(), (&mut *v).into()];
        let mut args = FusedArgs::new(&*x, &layer.qkv, &mut outputs, workspace);
        args.bias = Some(layer.qkv_bias.view());
        qkv.run(stream, args)?;
        let mut args = AttentionArgs::new(&*q, &*k, &*v, &mut *attended);
        (args.q_offsets, args.kv_offsets) = (Some(offsets.view()), Some(offsets.view()));
        args.workspace = Some(workspace);
        attention.run(stream, args)?;
        layer.attention_output.run(stream, tokens, &*attended, x, None, workspace)?;
        let LayerNorm { gamma, beta } = &layer.attention_norm;
        norm.run(stream, NormArgs::in_place(&mut *x).gamma(gamma).beta(beta))?;
        layer.up.run(stream, tokens, &*x, inner, None, workspace)?;
        layer.down.run(stream, tokens, &*inner, x, None, workspace)?;
        let LayerNorm { gamma, beta } = &layer.ffn_norm;
        Ok(norm.run(stream, NormArgs::in_place(&mut *x).gamma(gamma).beta(beta))?)
    }
}

fn plan_qkv(ctx: &Context, layer: &EncoderLayer, tokens: usize, precision: Precision) -> Result<FusedPlan, Error> {
    let mut problem = FusedProblem::new(&layer.qkv, tokens, DType::F32);
    for segment in 0..layer.qkv.segments() {
        problem = problem.output_dtype(segment, precision.activations);
    }
    Ok(ctx.plan_fused(&problem.each(|p| precision.of(p).bias(DType::F32)))?)
}
