//! Parts of an input gradient: dequantization of some input features,
//! and the products with them.

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

/// Part of a plan: some input features.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// Dequantization. `None` for weights without output features.
    pub decode: Option<Decode>,
    /// Products in order.
    pub products: Vec<Product>,
    /// First input feature.
    pub first: usize,
}

/// Launches of one dequantization kernel over weights of equal size.
#[derive(Clone, Debug)]
pub(super) struct Decode {
    pub unpack: CheckedUnpack,
    /// Number of weights.
    pub copies: usize,
    /// Byte distance between weights, in rows of scratch memory.
    pub copy_bytes: usize,
}

/// Product with dequantized weights.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub matmul: CheckedMatmul,
    /// Byte offset of its columns in a row of dY.
    pub dy_start: usize,
    /// Byte offset of its columns in a row of dequantized weights.
    pub weight_start: usize,
    pub sums: Sums,
}

/// Use of the f32 sums, which are no operand of the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    None,
    /// The product writes them.
    Written,
    /// The product adds them.
    Read,
}

/// Regions of the workspace.
#[derive(Clone, Debug)]
pub(super) struct Scratch {
    /// Dequantized weights, after the products' workspace.
    pub decoded: Range<usize>,
    /// Sums of the first of two products.
    pub sums: Range<usize>,
}

/// Inputs of a run.
pub(crate) struct GradientInputs<'a> {
    pub dy: BufferRef<'a>,
    pub weight: GradientWeight<'a>,
    pub offsets: Option<BufferRef<'a>>,
}

impl Part {
    /// Bytes to move and decode.
    pub fn traffic(&self) -> f64 {
        let decoded = self.decode.as_ref().map_or(0.0, |decode| decode.copies as f64 * decode.unpack.traffic());
        decoded + self.products.iter().map(|product| product.matmul.traffic()).sum::<f64>()
    }

    /// Bytes of the dequantized weights.
    pub fn decoded_bytes(&self) -> usize {
        let extent = |decode: &Decode| {
            let CheckedUnpack { d, features, .. } = decode.unpack;
            // Rows of all copies, without padding after the last.
            (features * d.row_stride as usize).saturating_mul(d.dtype.bytes())
        };
        self.decode.as_ref().map_or(0, extent)
    }

    /// Bytes of the sums between two products.
    pub fn sums_bytes(&self) -> usize {
        let written = self.products.iter().filter(|product| product.sums == Sums::Written);
        written.map(|Product { matmul: op, .. }| op.m * op.n * op.d.dtype.bytes()).max().unwrap_or(0)
    }
}

chosen_by_traffic!(CheckedUnpack);

impl Recorded for CheckedUnpack {}

/// Part with its kernels.
#[derive(Debug)]
pub(super) struct ReadyPart {
    /// Description of the part.
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

    /// Maximum workspace of a product, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.products.iter().map(|ready| ready.plan.workspace.bytes).max().unwrap_or(0)
    }

    /// Submits the launches of the part.
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

    /// Element size of dX, which is D or C of the product.
    fn dx_bytes(&self, product: &Product) -> usize {
        match (product.sums, &product.matmul.c) {
            (Sums::Written, Some(c)) => c.dtype.bytes(),
            _ => product.matmul.d.dtype.bytes(),
        }
    }
}
