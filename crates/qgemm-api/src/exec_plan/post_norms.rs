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
        hidden: Hidden,
    ) -> Result<Hidden, Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let (Some((before_attention, mixer)), Some((before_feed_forward, part))) = (&layer.mixer, &layer.feed_forward)
        else {
            return Err(Error::IncompleteModel { what: format!("layer {i} has one part and norms of two") });
        };
        let (rows, normed) = match hidden {
            Hidden::Rows(rows) => (rows, None),
            Hidden::Addends(part, rows) => {
                let (sum, x) = (self.hidden(&format!("hidden.{i}"), rows.columns), id("attn_norm"));
                let x = self.activation(&x, rows.columns);
                self.norm_of_sum(id("attn_norm"), before_attention, [&part, &rows], &sum, &x)?;
                (sum, Some(x))
            }
        };
        let input = normed.as_ref().map_or(Input::Rows(&rows, before_attention), Input::Normed);
        let (mixed, o) = (self.mixed(i, mixer, input)?, mixer.output());
        let d = self.hidden(&id("attn_output"), o.n);
        self.product(Product::new(id("attn_output"), o, mixed, d.clone()))?;
        self.all_reduce(id("attn_reduce"), &d)?;
        if let Some([behind_attention, _]) = post_norms {
            self.norm(id("attn_post_norm"), behind_attention, &d, d.clone())?;
        }
        let (sum, x) = (self.hidden(&id("attn_residual"), d.columns), self.activation(&id("ffn_norm"), d.columns));
        self.norm_of_sum(id("ffn_norm"), before_feed_forward, [&d, &rows], &sum, &x)?;
        let part = self.feed_forward(i, part, None, x, None)?;
        self.all_reduce(id("ffn_reduce"), &part)?;
        if let Some([_, behind_feed_forward]) = post_norms {
            self.norm(id("ffn_post_norm"), behind_feed_forward, &part, part.clone())?;
        }
        Ok(Hidden::Addends(part, sum))
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
