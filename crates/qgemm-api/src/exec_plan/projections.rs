//! Projections of one X: queries, keys and values, or what
//! another mixer begins with.

use qgemm_hal::Segment;

use super::build::{Buffer, Builder, Input};
use super::product::Product;
use crate::architecture::Matrix;
use crate::error::Error;

/// A projection: its name, weight and output.
pub(super) type Projection<'p> = (&'static str, &'p Matrix, Buffer);

impl Builder<'_> {
    /// Adds the projections of a part's input, with the norm before
    /// them in decoders.
    ///
    /// In inference, neighbours of one format are one product with
    /// segments, whose prologue is the norm.
    pub(super) fn projections(
        &mut self,
        prefix: &str,
        parts: &[Projection<'_>],
        input: Input<'_>,
    ) -> Result<(), Error> {
        let (x, norm) = match input {
            Input::Rows(rows, norm) => (rows, Some(norm).filter(|_| self.network.pre_norm)),
            Input::Normed(normed) => (normed, None),
        };
        let groups = groups(parts);
        if self.network.pre_norm && !self.options.train && (groups.len() < parts.len() || parts.len() == 1) {
            let products: Vec<Product<'_>> =
                groups.iter().map(|group| Product { norm, ..stacked(prefix, group, x) }).collect();
            let mut served = true;
            for product in &products {
                served = served && self.is_served(product)?;
            }
            if served {
                return products.into_iter().try_for_each(|product| self.product(product));
            }
        }
        let x = match norm {
            Some(norm) => {
                let name = format!("{prefix}norm");
                let d = self.activation(&name, x.columns);
                self.norm(name, norm, x, d)?
            }
            None => x.clone(),
        };
        for part in parts {
            self.product(stacked(prefix, std::slice::from_ref(part), &x))?;
        }
        Ok(())
    }
}

/// Neighbours that can be segments of one product.
fn groups<'a, 'p>(parts: &'a [Projection<'p>]) -> Vec<&'a [Projection<'p>]> {
    let (mut groups, mut first, mut features) = (Vec::new(), 0, 0usize);
    for (at, (_, matrix, d)) in parts.iter().enumerate() {
        let joins = at > first && at - first < Segment::MOST && features.is_multiple_of(Segment::STEP) && {
            let (_, before, of_before) = &parts[at - 1];
            matrix.stacks_on(before) && d.dtype == of_before.dtype
        };
        if at > first && !joins {
            groups.push(&parts[first..at]);
            (first, features) = (at, 0);
        }
        features = features.saturating_add(matrix.n);
    }
    groups.push(&parts[first..]);
    groups
}

/// The product of neighbours, each a segment.
fn stacked<'p>(prefix: &str, group: &[Projection<'p>], x: &Buffer) -> Product<'p> {
    let name: String = std::iter::once(prefix).chain(group.iter().map(|(role, ..)| *role)).collect();
    let mut parts = group.iter().map(|(_, matrix, d)| (*matrix, d.clone()));
    let Some((matrix, d)) = parts.next() else { unreachable!("a group has a member") };
    Product { segments: parts.collect(), ..Product::new(name, matrix, x.clone(), d) }
}
