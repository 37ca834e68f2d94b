//! Tensor maps of the factors: `TmaMatmulParams` in
//! `mainloop/sm90/matmul_items.cuh`.

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::MatmulScales;
use qgemm_hal::{BatchedDense, CheckedMatmul, FactorFormat, HalError, Operands};

use super::templates::Template;
use super::{MatmulParams, scales};
use crate::families::kernel_launch::{Addresses, Params};
use crate::families::launch_params::LaunchParams;
use crate::tensor_map::{EncodedMap, MapElement, TileMap};

/// Bytes along the contiguous dimension of a box: one swizzle row.
const BOX_BYTES: u32 = 128;
/// Maximum row or matrix stride in bytes (`cuTensorMapEncodeTiled`).
const MOST_STRIDE_BYTES: u64 = (1 << 40) - 16;

/// Whether TMA can read the factors of `op`: coordinates have
/// 31 bits, and sizes are not 0.
pub(super) fn takes(op: &CheckedMatmul) -> bool {
    let sizes = [op.m, op.n, op.k, op.batch];
    op.k > 0 && sizes.iter().all(|&size| i32::try_from(size).is_ok()) && takes_factor(&op.a) && takes_factor(&op.b)
}

/// Whether TMA can read matrices with the layout of `dense`.
pub(super) fn takes_factor(dense: &BatchedDense<FactorFormat>) -> bool {
    let strides = [dense.row_stride.max(dense.col_stride), dense.batch_stride];
    let fits = |stride: &u64| stride.saturating_mul(dense.dtype.bytes().max(2) as u64) <= MOST_STRIDE_BYTES;
    dense.aligned16 && strides.iter().all(fits)
}

/// A factor: matrices of `outer` by `k`, and boxes of
/// `tile` by [`BOX_BYTES`].
#[derive(Clone, Copy, Debug)]
struct Factor {
    dense: BatchedDense<FactorFormat>,
    element: MapElement,
    along_k: bool,
    outer: u64,
    k: u64,
    batch: u64,
    tile: u32,
}

impl Factor {
    /// Tensor map at `address`.
    fn map(&self, address: u64) -> TileMap {
        let Self { dense, element, along_k, outer, k, batch, tile } = *self;
        let bytes = |elements: u64| elements * element.bytes() as u64;
        let edge = BOX_BYTES / element.bytes() as u32;
        let (size, tile) = if along_k { ([k, outer], [edge, tile]) } else { ([outer, k], [edge, edge]) };
        // A stride over a single row or matrix is
        // unused; choose a valid one.
        let stride =
            |count: u64, stride: u64| if count > 1 { bytes(stride) } else { bytes(size[0]).next_multiple_of(16) };
        let row_bytes = stride(size[1], dense.row_stride.max(dense.col_stride));
        let [count, matrix_bytes] = match self.per_product() {
            true => [batch, bytes(dense.batch_stride)],
            false => [1, stride(1, 0)],
        };
        let one = TileMap::matrix(address, element, size, row_bytes, tile);
        let [columns, rows, ..] = one.size;
        TileMap { dimensions: 3, size: [columns, rows, count, 1, 1], strides: [row_bytes, matrix_bytes, 0, 0], ..one }
    }

    /// Whether each product has a separate matrix.
    fn per_product(&self) -> bool {
        self.batch > 1 && self.dense.batch_stride > 0
    }
}

/// Kernel parameter without maps.
#[derive(Debug)]
pub(super) struct MappedMatmul {
    matmul: MatmulParams,
    /// Tiles of all products, and tiles times split-K.
    work: [u32; 2],
    a: Factor,
    b: Factor,
    /// Strides of the block scales, if any.
    scales: Option<MatmulScales>,
}

/// `TmaMatmulParams` in `mainloop/sm90/matmul_items.cuh`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TmaMatmulParams {
    matmul: MatmulParams,
    work: [u32; 2],
    per_product: [u32; 2],
    padding: [u64; 2],
    maps: [EncodedMap; 2],
}

/// `TmaMatmulParams` with block scales (`QG_BLOCK_SCALED`).
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BlockScaledTmaParams {
    matmul: MatmulParams,
    scales: MatmulScales,
    work: [u32; 2],
    per_product: [u32; 2],
    maps: [EncodedMap; 2],
}

impl MappedMatmul {
    pub(super) fn new(matmul: MatmulParams, op: &CheckedMatmul, template: &Template, work: [u32; 2]) -> Self {
        let (k, batch) = (op.k as u64, op.batch as u64);
        let factor = |dense: BatchedDense<FactorFormat>, along_k: bool, outer: usize, tile: u32| {
            let element = dense.dtype.plain().map_or(MapElement::Byte, MapElement::Number);
            Factor { dense, element, along_k, outer: outer as u64, k, batch, tile }
        };
        let a = factor(op.a, op.a.is_row_major(), op.m, template.m);
        let b = factor(op.b, op.has_block_scales() || !op.b.is_row_major(), op.n, template.n);
        Self { matmul, work, a, b, scales: op.has_block_scales().then(|| scales(op)) }
    }
}

impl Params for MappedMatmul {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let Self { matmul, work, a, b, scales } = self;
        let (matmul, work) = (matmul.at(operands, at)?, *work);
        let per_product = [a.per_product().into(), b.per_product().into()];
        let maps = [(at.encode)(&a.map(matmul.at.a))?, (at.encode)(&b.map(matmul.at.b))?];
        Ok(match *scales {
            Some(scales) => LaunchParams::of(&BlockScaledTmaParams { matmul, scales, work, per_product, maps }),
            None => LaunchParams::of(&TmaMatmulParams { matmul, work, per_product, padding: [0; 2], maps }),
        })
    }
}
