//! Recurrent operations of a plan file: problems, regions, and
//! what is alike.

use super::file::PlannedOp;
use super::mismatch::wrong;
use super::recurrent::{PlannedConv, PlannedLinear, PlannedState};
use super::sizes::{NamedRegion, WORD};
use crate::error::Error;
use crate::linear_attention::LinearAttention;
use crate::short_conv::ShortConv;

impl PlannedOp {
    /// States that live across steps, of a recurrent mixer.
    pub(super) fn state(&self) -> Option<&PlannedState> {
        let of_conv = self.conv.as_ref().map(|of| &of.state);
        of_conv.or_else(|| self.linear.as_ref().map(|of| &of.state))
    }

    /// Parameters of a `short_conv`.
    pub(super) fn of_conv(&self) -> Result<&PlannedConv, Error> {
        self.part(&self.conv, "kernel of")
    }

    /// Parameters of a `linear_attention`.
    pub(super) fn of_linear(&self) -> Result<&PlannedLinear, Error> {
        self.part(&self.linear, "heads of")
    }

    /// Problem of a `short_conv`, whose columns lie in X.
    pub(super) fn as_short_conv(&self) -> Result<ShortConv, Error> {
        let (of, shape) = (self.of_conv()?, self.shape);
        for first in [Some(of.first), of.input_gate, of.output_gate].into_iter().flatten() {
            within("conv", first, shape.n, shape.k)?;
        }
        Ok(of.describe([shape.m, shape.n, shape.k], self.x_dtype.parse()?))
    }

    /// Problem of a `linear_attention`, whose columns lie in X.
    pub(super) fn as_linear_attention(&self) -> Result<LinearAttention, Error> {
        let (of, shape) = (self.of_linear()?, self.shape);
        let (keys, values) = (of.key_heads.saturating_mul(of.key_dim), of.heads.saturating_mul(of.v_dim));
        for (first, features) in [(of.q, keys), (of.k, keys), (of.v, values)] {
            within("linear", first, features, shape.k)?;
        }
        if shape.n != values {
            return Err(wrong("shape.n", &format!("{values}, the features of values"), &shape.n.to_string()));
        }
        Ok(of.describe([shape.m, shape.k], self.x_dtype.parse()?, self.batch_invariant))
    }

    /// Region operands of recurrent mixers, with their minimum bytes.
    pub(super) fn recurrent_regions(&self) -> Result<Vec<NamedRegion<'_>>, Error> {
        let mut found: Vec<NamedRegion<'_>> = Vec::new();
        let words = |count: Option<usize>| count.and_then(|count| count.checked_mul(WORD));
        if let Some(of) = &self.conv {
            let channels = self.shape.n;
            found.push(("conv.weight", &of.weight, words(channels.checked_mul(of.width))));
            found.extend(of.bias.as_deref().map(|name| ("conv.bias", name, words(Some(channels)))));
            found.push(("conv.state.region", &of.state.region, of.state_bytes(channels, self.x_dtype.parse()?)));
            found.push(("conv.state.indices", &of.state.indices, words(Some(of.sequences))));
        }
        if let Some(of) = &self.linear {
            let (each, all) = (words(Some(of.heads)), words(self.shape.m.checked_mul(of.heads)));
            found.extend([("linear.a_log", of.a_log.as_str(), each), ("linear.dt_bias", of.dt_bias.as_str(), each)]);
            found.extend(of.skip.as_deref().map(|name| ("linear.skip", name, each)));
            found.push(("linear.step", &of.step, all));
            found.extend(of.beta.as_deref().map(|name| ("linear.beta", name, all)));
            found.push(("linear.state.region", &of.state.region, of.state_bytes()));
            found.push(("linear.state.indices", &of.state.indices, words(Some(of.sequences))));
        }
        Ok(found)
    }

    /// Parameters of recurrent mixers, without region names.
    pub(super) fn recurrent_numbers(&self) -> (Option<PlannedConv>, Option<PlannedLinear>) {
        let nowhere = String::new;
        let state = |of: PlannedState| PlannedState { region: nowhere(), indices: nowhere(), ..of };
        let conv = self.conv.clone().map(|of| PlannedConv {
            weight: nowhere(),
            bias: of.bias.map(|_| nowhere()),
            state: state(of.state),
            ..of
        });
        let linear = self.linear.clone().map(|of| PlannedLinear {
            step: nowhere(),
            beta: of.beta.map(|_| nowhere()),
            a_log: nowhere(),
            dt_bias: nowhere(),
            skip: of.skip.map(|_| nowhere()),
            state: state(of.state),
            ..of
        });
        (conv, linear)
    }
}

/// Checks that `features` columns from `first` on lie within `columns`.
fn within(at: &str, first: usize, features: usize, columns: usize) -> Result<(), Error> {
    match first.checked_add(features) {
        Some(end) if end <= columns => Ok(()),
        _ => Err(wrong(at, &format!("columns within {columns}"), &format!("{features} from {first} on"))),
    }
}
