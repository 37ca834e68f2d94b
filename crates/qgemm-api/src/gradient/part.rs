//! Parts of a gradient: what decodes some input features of the weights, and the products with them.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{
    BufferMut, BufferRef, CheckedMatmul, CheckedUnpack, Device, MatmulOperand, Operands, Operation, Stream,
    UnpackOperand,
};
use qgemm_sched::{Preferences, TunedTable};

use super::through::GradientWeight;
use crate::error::Error;
use crate::plan_cache::{PlanCaches, Ready};
use crate::planned::{chosen_by_traffic, ready};
use crate::record::Recorded;

/// What a plan makes kernels ready for: some input features.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// What decodes them; nothing of weights without output features.
    pub decode: Option<Decode>,
    /// The products, one after the other.
    pub products: Vec<Product>,
    /// The first input feature.
    pub first: usize,
}

/// Launches of one kernel that decode weights of one size.
#[derive(Clone, Debug)]
pub(super) struct Decode {
    pub unpack: CheckedUnpack,
    /// How many there are.
    pub copies: usize,
    /// Bytes from one's columns to the next one's, in rows of scratch memory.
    pub copy_bytes: usize,
}

/// A product with decoded weights.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub matmul: CheckedMatmul,
    /// Where its columns of dY begin, in bytes of a row.
    pub dy_start: usize,
    /// And those of the decoded weights.
    pub weight_start: usize,
    pub sums: Sums,
}

/// What a product does with sums in f32 that are no operand of the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    None,
    /// They are its output.
    Written,
    /// It adds them.
    Read,
}

/// Where parts of a workspace lie.
#[derive(Clone, Debug)]
pub(super) struct Scratch {
    /// Decoded weights, behind what the products need.
    pub decoded: Range<usize>,
    /// Sums of the first of two products.
    pub sums: Range<usize>,
}

/// What a run reads.
pub(crate) struct GradientInputs<'a> {
    pub dy: BufferRef<'a>,
    pub weight: GradientWeight<'a>,
    pub offsets: Option<BufferRef<'a>>,
}

impl Part {
    /// What it must move and decode.
    pub fn traffic(&self) -> f64 {
        let decoded = self.decode.as_ref().map_or(0.0, |decode| decode.copies as f64 * decode.unpack.traffic());
        decoded + self.products.iter().map(|product| product.matmul.traffic()).sum::<f64>()
    }

    /// Bytes of the decoded weights.
    pub fn decoded_bytes(&self) -> usize {
        let extent = |decode: &Decode| {
            let CheckedUnpack { d, features, .. } = decode.unpack;
            // Rows of all copies, without the padding behind the last.
            (features * d.row_stride as usize).saturating_mul(d.dtype.bytes())
        };
        self.decode.as_ref().map_or(0, extent)
    }

    /// Bytes of what the first product leaves for the second.
    pub fn sums_bytes(&self) -> usize {
        let written = self.products.iter().filter(|product| product.sums == Sums::Written);
        written.map(|Product { matmul: op, .. }| op.m * op.n * op.d.dtype.bytes()).max().unwrap_or(0)
    }
}

chosen_by_traffic!(CheckedUnpack);

impl Recorded for CheckedUnpack {}

/// A part with its kernels.
#[derive(Debug)]
pub(super) struct ReadyPart {
    /// What is computed.
    pub of: Part,
    pub unpack: Option<Arc<Ready<CheckedUnpack>>>,
    pub products: Vec<Arc<Ready<CheckedMatmul>>>,
}

impl ReadyPart {
    pub fn new(device: &dyn Device, tuned: &TunedTable, caches: &PlanCaches, part: &Part) -> Result<Self, Error> {
        let make_unpack = |decode: &Decode| ready(device, tuned, caches, &(decode.unpack, Preferences::default()));
        let make_product =
            |product: &Product| ready(device, tuned, caches, &(product.matmul.clone(), Preferences::default()));
        Ok(Self {
            of: part.clone(),
            unpack: part.decode.as_ref().map(make_unpack).transpose()?,
            products: part.products.iter().map(make_product).collect::<Result<_, Error>>()?,
        })
    }

    /// Most bytes that a product needs beside what it multiplies.
    pub fn workspace_bytes(&self) -> usize {
        self.products.iter().map(|ready| ready.plan.workspace.bytes).max().unwrap_or(0)
    }

    /// Submits its launches.
    pub fn run(
        &self,
        stream: &Stream,
        from: &GradientInputs<'_>,
        dx: &mut BufferMut<'_>,
        workspace: &mut BufferMut<'_>,
        scratch: &Scratch,
    ) -> Result<(), Error> {
        if let (Some(decode), Some(ready)) = (&self.of.decode, &self.unpack) {
            let (_, mut decoded) = workspace.reborrow().split_at(scratch.decoded.start)?;
            for copy in 0..decode.copies {
                let mut operands = Operands::new();
                from.weight.give_to_unpack(copy, decode.copies, &mut operands)?;
                let own = copy * decode.copy_bytes..self.of.decoded_bytes();
                operands.write(UnpackOperand::D, decoded.reborrow().slice(own)?);
                ready.sequence.run_for(&decode.unpack, stream, operands)?;
            }
        }
        for (product, ready) in self.of.products.iter().zip(&self.products) {
            let (mut own, rest) = workspace.reborrow().split_at(scratch.decoded.start)?;
            let (decoded, mut sums) = rest.split_at(scratch.sums.start - scratch.decoded.start)?;
            let mut operands = Operands::new();
            operands.read(MatmulOperand::A, from.dy.slice(product.dy_start..from.dy.len())?);
            let of_weight = product.weight_start.min(self.of.decoded_bytes())..self.of.decoded_bytes();
            operands.read(MatmulOperand::B, decoded.view().slice(of_weight)?);
            operands.read_if_any(MatmulOperand::Offsets, from.offsets);
            let len = dx.view().len();
            let columns = self.of.first * self.dx_bytes(product)..len;
            match product.sums {
                Sums::None => operands.write(MatmulOperand::D, dx.reborrow().slice(columns)?),
                Sums::Written => {
                    if product.matmul.c.is_some() {
                        operands.read(MatmulOperand::C, dx.view().slice(columns)?);
                    }
                    operands.write(MatmulOperand::D, sums.reborrow().slice(0..self.of.sums_bytes())?);
                }
                Sums::Read => {
                    operands.read(MatmulOperand::C, sums.view().slice(0..self.of.sums_bytes())?);
                    operands.write(MatmulOperand::D, dx.reborrow().slice(columns)?);
                }
            }
            let bytes = ready.plan.workspace.bytes;
            if bytes > 0 {
                operands.write(MatmulOperand::Workspace, own.reborrow().slice(0..bytes)?);
            }
            ready.sequence.run_for(&product.matmul, stream, operands)?;
        }
        Ok(())
    }

    /// Bytes of an element of dX, which is D of a product or its C.
    fn dx_bytes(&self, product: &Product) -> usize {
        match (product.sums, &product.matmul.c) {
            (Sums::Written, Some(c)) => c.dtype.bytes(),
            _ => product.matmul.d.dtype.bytes(),
        }
    }
}
