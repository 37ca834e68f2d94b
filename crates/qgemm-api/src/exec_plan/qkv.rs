//! Query, key and value projections of a layer.

use super::build::{Buffer, Builder};
use super::product::Product;
use crate::architecture::{LayerTensors, Matrix};
use crate::error::Error;

/// A projection: its name, weight and output.
type Part<'p> = (&'static str, &'p Matrix, Buffer);

impl Builder<'_> {
    /// Adds the projections of `hidden`, with the norm before them in decoders.
    ///
    /// `normed` has its rows where the norm is an operation of its own.
    ///
    /// In inference, neighbours of one format are one product with segments, whose
    /// prologue is the norm.
    pub(super) fn qkv(
        &mut self,
        i: usize,
        layer: &LayerTensors,
        hidden: &Buffer,
        normed: Option<Buffer>,
    ) -> Result<[Buffer; 3], Error> {
        let id = |role: &str| format!("blk.{i}.{role}");
        let parts = [("q", &layer.q), ("k", &layer.k), ("v", &layer.v)]
            .map(|(role, m)| (role, m, self.activation(&id(role), m.n)));
        let outputs = parts.each_ref().map(|(_, _, d)| d.clone());
        let groups: Vec<&[Part<'_>]> = parts.chunk_by(|(_, a, _), (_, b, _)| b.stacks_on(a)).collect();
        let [norm, _] = &layer.norms;
        if self.network.pre_norm && !self.options.train && groups.len() < parts.len() {
            let x = normed.as_ref().unwrap_or(hidden);
            let norm = normed.is_none().then_some(norm);
            let products: Vec<Product<'_>> =
                groups.iter().map(|group| Product { norm, ..stacked(&id("attn_"), group, x) }).collect();
            let mut served = true;
            for product in &products {
                served = served && self.is_served(product)?;
            }
            if served {
                products.into_iter().try_for_each(|product| self.product(product))?;
                return Ok(outputs);
            }
        }
        let x = match (normed, self.network.pre_norm) {
            (Some(normed), _) => normed,
            (None, true) => {
                let d = self.activation(&id("attn_norm"), hidden.columns);
                self.norm(id("attn_norm"), norm, hidden, d)?
            }
            (None, false) => hidden.clone(),
        };
        for part in &parts {
            self.product(stacked(&id("attn_"), std::slice::from_ref(part), &x))?;
        }
        Ok(outputs)
    }
}

/// The product of neighbours, each a segment.
fn stacked<'p>(prefix: &str, group: &[Part<'p>], x: &Buffer) -> Product<'p> {
    let name: String = std::iter::once(prefix).chain(group.iter().map(|(role, ..)| *role)).collect();
    let mut parts = group.iter().map(|(_, matrix, d)| (*matrix, d.clone()));
    let Some((matrix, d)) = parts.next() else { unreachable!("a group has a member") };
    Product { segments: parts.collect(), ..Product::new(name, matrix, x.clone(), d) }
}
