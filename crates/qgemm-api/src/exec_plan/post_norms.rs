//! Layers whose norms add the results of parts: those
//! with a second norm in each part (Gemma 3), and all
//! layers on several ranks.

use super::build::{Buffer, Builder, Hidden, Input};
use super::file::PlannedOp;
use super::layers::PLAIN;
use super::operands::PlannedNorm;
use super::product::{Product, known, op};
use crate::architecture::{LayerTensors, NormTensors};
use crate::error::Error;

impl Builder<'_> {
    /// Adds a layer whose parts leave their result to the
    /// next norm, behind the sum over ranks and the part's
    /// second norm.
    pub(super) fn addends_layer(
        &mut self,
        i: usize,
        layer: &LayerTensors,
        post_norms: Option<&[NormTensors; 2]>,
        mut hidden: Hidden,
    ) -> Result<Hidden, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let mut sum = format!("hidden.{i}");
        if let Some((norm, mixer)) = &layer.mixer {
            let (rows, normed) = self.normed_sum(id("attn_norm"), norm, hidden, &sum)?;
            let input = normed.as_ref().map_or(Input::Rows(&rows, norm), Input::Normed);
            let (mixed, o) = (self.mixed(i, mixer, input)?, mixer.output());
            let d = self.hidden(&id("attn_output"), o.n);
            self.product(Product::new(id("attn_output"), o, mixed, d.clone()))?;
            self.all_reduce(id("attn_reduce"), &d)?;
            if let Some([behind, _]) = post_norms {
                self.norm(id("attn_post_norm"), behind, &d, d.clone())?;
            }
            (hidden, sum) = (Hidden::Addends(d, rows), id("attn_residual"));
        }
        if let Some((norm, part)) = &layer.feed_forward {
            let (rows, normed) = self.normed_sum(id("ffn_norm"), norm, hidden, &sum)?;
            let (norm, x) = normed.map_or((Some(norm), rows.clone()), |normed| (None, normed));
            let d = self.feed_forward(i, part, norm, x, None)?;
            self.all_reduce(id("ffn_reduce"), &d)?;
            if let Some([_, behind]) = post_norms {
                self.norm(id("ffn_post_norm"), behind, &d, d.clone())?;
            }
            hidden = Hidden::Addends(d, rows);
        }
        Ok(hidden)
    }

    /// The residual stream as rows, and its norm. A stream that is
    /// rows has no norm yet; a sum is written to the region `sum`.
    fn normed_sum(
        &mut self,
        op_id: String,
        norm: &NormTensors,
        hidden: Hidden,
        sum: &str,
    ) -> Result<(Buffer, Option<Buffer>), Error> {
        let (part, rows) = match hidden {
            Hidden::Rows(rows) => return Ok((rows, None)),
            Hidden::Addends(part, rows) => (part, rows),
        };
        let (sum, x) = (self.hidden(sum, rows.columns), self.activation(&op_id, rows.columns));
        self.norm_of_sum(op_id, norm, [&part, &rows], &sum, &x)?;
        Ok((sum, Some(x)))
    }

    /// Adds the norm of `x + residual` into `d`.
    ///
    /// It also writes the sum. Where `d` has fewer rows, they
    /// are the last rows of equal shares.
    pub(super) fn norm_of_sum(
        &mut self,
        op_id: String,
        of: &NormTensors,
        [x, residual]: [&Buffer; 2],
        sum: &Buffer,
        d: &Buffer,
    ) -> Result<(), Error> {
        let every = x.rows.checked_div(d.rows).filter(|every| *every > 1);
        let norm = PlannedNorm { every, sum: Some(sum.name.clone()), ..self.planned_norm(of) };
        [x, residual, sum].into_iter().try_for_each(|buffer| self.reads(buffer))?;
        self.uses_norm(&norm, x.columns);
        let described = norm.describe([d.rows, x.columns], x.dtype, Some(d.dtype))?;
        let ctx = self.ctx;
        let record = known(&mut self.planned, format!("{described:?}"), || ctx.explain_norm(&described))?;
        let residual_of = Some(residual.name.clone());
        let op = PlannedOp { norm: Some(norm), residual: residual_of, ..op(op_id.clone(), [x, d], PLAIN, &record)? };
        self.push(op, d, &[x.name.clone(), residual.name.clone()])?;
        self.out.writers.insert(sum.name.clone(), op_id);
        Ok(())
    }
}
