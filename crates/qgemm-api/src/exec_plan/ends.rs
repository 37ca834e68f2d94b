//! First and last operations of a model: embedding, head and sampling.

use qgemm_formats::DType;
use qgemm_hal::op::sampling::SamplingParameters;
use qgemm_hal::{Activation, XPrecision};

use super::build::{Buffer, Builder, Hidden};
use super::file::{PlannedOp, PlannedWeight, RegionKind};
use super::layers::LENGTHS;
use super::product::{Product, describe, known, op, planned_weight};
use crate::architecture::Matrix;
use crate::error::Error;
use crate::gather_rows::GatherRows;
use crate::record::Sizes;
use crate::sampling::Sampling;

/// Region of the tokens of a step.
const TOKENS: &str = "tokens";
/// Region of the embedding, unless it is the head's weight.
const TABLE: &str = "token_embd.weight";
/// Operation of the head.
const HEAD: &str = "output";
/// Bytes of the status of a gather.
const GATHER_STATUS_BYTES: usize = 16;
/// Bytes of the status of a sampled row.
const SAMPLING_STATUS_BYTES: usize = 16;

impl Builder<'_> {
    /// Adds the input of the first layer, `columns` features a token.
    pub(super) fn embedding(&mut self, columns: usize) -> Result<Buffer, Error> {
        let network = self.network;
        let hidden = self.hidden("hidden.0", columns);
        match &network.embedding {
            Some(table) => {
                let tokens = self.input(TOKENS, self.options.batch);
                let lengths = (!self.options.train).then(|| self.input(LENGTHS, self.sequences));
                let parameters = self.samples().then(|| self.sampling_parameters());
                let others = [lengths, self.block_table(), self.state_slots(), parameters].into_iter().flatten();
                let inputs: Vec<Buffer> = std::iter::once(tokens.clone()).chain(others).collect();
                self.step("inputs", TOKENS, &[], &inputs)?;
                self.gather(table, &tokens, &hidden)?;
                Ok(hidden)
            }
            None => {
                let embedded = self.activation("embeddings", columns);
                self.step("embedding lookup", &embedded.name, &[], std::slice::from_ref(&embedded))?;
                self.norm("embedding_norm".into(), &network.outer_norm, &embedded, hidden)
            }
        }
    }

    /// Adds norm and head: logits of each sequence's last token, or of all tokens.
    pub(super) fn head(&mut self, hidden: &Hidden) -> Result<(), Error> {
        let network = self.network;
        let Some(head) = &network.head else { return Ok(()) };
        let all = self.options.all_logits || self.options.train;
        let rows = if all { self.options.batch } else { self.sequences };
        let normed = Buffer { rows, ..self.activation("output_norm", head.k) };
        let (op_id, norm) = ("output_norm".to_owned(), &network.outer_norm);
        let x = match hidden {
            Hidden::Rows(hidden) => self.norm(op_id, norm, hidden, normed)?,
            Hidden::Addends(part, residual) => {
                let sum = Buffer { rows, ..self.hidden("output_residual", head.k) };
                self.norm_of_sum(op_id, norm, [part, residual], &sum, &normed)?;
                normed
            }
        };
        let d = Buffer { dtype: DType::F32, rows, ..self.activation("logits", head.n) };
        let d = self.vocabulary(d, |builder, d| builder.product(Product::new(HEAD, head, x, d)))?;
        match (self.options.train, self.samples()) {
            (true, _) => Ok(()),
            (false, true) => self.sampling(&d),
            (false, false) => self.step("sampling", &d.name, std::slice::from_ref(&d), &[]),
        }
    }

    /// Whether the step samples.
    fn samples(&self) -> bool {
        self.options.sampling && !self.options.all_logits && !self.options.train
    }

    /// Adds the sampling of a token for each row of logits.
    fn sampling(&mut self, logits: &Buffer) -> Result<(), Error> {
        let described = Sampling::new(logits.rows, logits.columns);
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_sampling(&described))?;
        let decodes = self.sequences == self.options.batch;
        let d = self.input(if decodes { TOKENS } else { "sampled" }, logits.rows);
        let parameters = self.sampling_parameters();
        let status = "sampling.status".to_owned();
        self.out.uses(&logits.name, logits.kind, logits.bytes()?);
        self.out.uses(&parameters.name, parameters.kind, parameters.bytes()?);
        self.out.uses(&status, RegionKind::Input, logits.rows.saturating_mul(SAMPLING_STATUS_BYTES));
        let op = PlannedOp {
            shape: Sizes { m: logits.rows, n: logits.columns, k: 1 },
            d_dtype: "i32".into(),
            parameters: Some(parameters.name),
            status: Some(status),
            ..op("sampling".into(), [logits, &d], (Activation::Identity, XPrecision::Exact), &record)?
        };
        self.push(op, &d, std::slice::from_ref(&logits.name))
    }

    /// Parameters of a sampling, an input of the caller.
    fn sampling_parameters(&self) -> Buffer {
        let columns = SamplingParameters::WORDS;
        Buffer { columns, ..self.input("sampling_parameters", self.sequences) }
    }

    /// Adds the rows of `table` that the tokens name.
    fn gather(&mut self, table: &Matrix, tokens: &Buffer, d: &Buffer) -> Result<(), Error> {
        let described = describe(self.ctx, table, false)?;
        let scale = Some(self.network.embedding_scale).filter(|&scale| scale != 1.0);
        let gather = GatherRows::of_described(&described, tokens.rows).d_dtype(d.dtype);
        let gather = scale.into_iter().fold(gather, GatherRows::scale);
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{gather:?}"), || ctx.explain_gather_rows(&gather))?;
        let is_tied = self.network.head.as_ref().is_some_and(|head| head.tensor == table.tensor)
            && !self.part.cuts(&table.tensor);
        let region = if is_tied { format!("{HEAD}.weight") } else { TABLE.to_owned() };
        let weight = PlannedWeight { region, ..planned_weight(table, &described, described.bytes()) };
        let status = format!("{TOKENS}.status");
        self.out.uses(&weight.region, RegionKind::Weight, weight.bytes);
        self.out.uses(&tokens.name, tokens.kind, tokens.bytes()?);
        self.out.uses(&status, RegionKind::Temporary, GATHER_STATUS_BYTES);
        let op = PlannedOp {
            shape: Sizes { m: tokens.rows, n: table.k, k: table.n },
            x_dtype: "i32".into(),
            scale,
            weight: Some(weight),
            status: Some(status),
            ..op("token_embd".into(), [tokens, d], (Activation::Identity, XPrecision::Exact), &record)?
        };
        self.push(op, d, std::slice::from_ref(&tokens.name))
    }

    /// Input of the caller: `rows` words.
    fn input(&self, name: &str, rows: usize) -> Buffer {
        Buffer { name: name.to_owned(), kind: RegionKind::Input, rows, columns: 1, dtype: DType::F32, kv: None }
    }
}
