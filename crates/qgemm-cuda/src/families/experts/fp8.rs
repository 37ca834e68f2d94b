//! Products with experts that multiply 8-bit floating-point codes of W with those of X as they are: of rows that follow one another.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, Format, XFactor, XFormat};
use qgemm_hal::abi::TileSchedule;
use qgemm_hal::{
    CheckedExperts, Dense, DeviceInfo, ExpertForm, ExpertOperand, ExpertsConfig, Geometry, HalError, Operand, Operands,
    Unsupported, Variant, XPlanes,
};

use super::super::gemm::{Cut, Fp8Kernel, Fp8Matrix, fp8_kernels, params};
use super::super::kernel_launch::{KernelLaunch, Params, Places};
use super::super::launch_params::LaunchParams;
use super::params::{ProductParams, groups, places};
use crate::spec::KernelSpec;
use crate::tensor_map::EncodedMap;

/// The kernels for weights of `format` and activations of `x`.
fn kernels(format: Format, x: XFormat, variant: Variant) -> impl Iterator<Item = Fp8Kernel> {
    fp8_kernels(format, x, variant).into_iter().filter_map(Fp8Kernel::for_experts)
}

/// Every kernel on devices of `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let types = Format::all().flat_map(|format| XFormat::ALL.into_iter().map(move |x| (format, x)));
    types.flat_map(move |(format, x)| kernels(format, x, variant)).map(|kernel| kernel.spec())
}

/// What there is for X in `planes`.
///
/// # Errors
/// Why there is nothing.
pub(super) fn configs(
    op: &CheckedExperts,
    planes: &XPlanes,
    info: &DeviceInfo,
    variant: Variant,
) -> Result<Vec<ExpertsConfig>, Unsupported> {
    let each = &op.each;
    if each.k_order {
        return Err(Unsupported::new("multiplies codes of X in the order of its columns"));
    }
    if matches!(op.form, ExpertForm::Indexed { .. }) {
        return Err(Unsupported::new("multiplies codes of rows that follow one another, not of slots"));
    }
    let all: Vec<_> = kernels(each.format, each.x.format, variant).collect();
    if all.is_empty() {
        let (w, x) = (each.format, each.x.format);
        return Err(Unsupported::new(format!("has no kernel that multiplies codes of {w} and {x} with experts")));
    }
    // TMA numbers rows of all experts in 31 bits.
    let rows = weight_rows(op).max(op.x_rows());
    if rows > i32::MAX as usize || planes.codes_row >= 1 << 40 {
        return Err(Unsupported::new("TMA reaches 2^31 rows, and 2^40 bytes from a row to the next"));
    }
    all.iter().try_for_each(|kernel| kernel.serves(each))?;
    let config = |kernel: &Fp8Kernel| ExpertsConfig { tile: kernel.config(), grouped: true, scratch_bytes: 0 };
    let fits = |config: &ExpertsConfig| config.tile.shared_bytes <= info.shared_bytes;
    Ok(all.iter().map(config).filter(fits).collect())
}

/// Rows of the weights of all experts, or of the one that they share.
fn weight_rows(op: &CheckedExperts) -> usize {
    if op.row_pitch == 0 { op.each.stored_rows } else { op.experts.saturating_mul(op.row_pitch) }
}

/// Of the sources of the configuration's kernel.
pub(super) fn source_hash(op: &CheckedExperts, config: &ExpertsConfig, variant: Variant) -> u64 {
    find(op, config, variant).map_or(0, |kernel| kernel.spec().source_hash().short())
}

fn find(op: &CheckedExperts, config: &ExpertsConfig, variant: Variant) -> Option<Fp8Kernel> {
    kernels(op.each.format, op.each.x.format, variant).find(|kernel| kernel.id() == config.kernel_id(op))
}

/// The launch of a configuration; `None` where its kernel is none of the variant's.
pub(super) fn launch(
    op: &CheckedExperts,
    planes: &XPlanes,
    config: &ExpertsConfig,
    info: &DeviceInfo,
    variant: Variant,
) -> Option<KernelLaunch> {
    let (kernel, each) = (find(op, config, variant)?, &op.each);
    let tile = kernel.config();
    let n_tiles = (each.stored_rows as u32).div_ceil(tile.tile_n);
    let tiles = TileSchedule { n_tiles, m_tiles: 1, swizzle_group: 1, cut_tiles: 0, cut_ctas: 0, cut_k_tiles: 1 };
    let k_tiles = each.stored_k.div_ceil(tile.tile_k as usize) as u32;
    let cut = Cut { k_tiles, splits: 1, has_factors: false, tiles };
    let clusters = ((info.units / tile.cluster) as usize).saturating_mul(tile.ctas_per_unit as usize);
    let most = places(op, tile.tile_m as usize, true).saturating_mul(n_tiles as usize);
    // The kernel reads no element type of X.
    let x = Dense { dtype: DType::F16, row_stride: planes.codes_row, col_stride: 1, aligned16: true };
    Some(KernelLaunch {
        id: kernel.id(),
        spec: kernel.spec(),
        geometry: Geometry {
            grid: [clusters.min(most).max(1) as u32 * tile.cluster, 1, 1],
            threads: tile.threads,
            shared_bytes: tile.shared_bytes,
        },
        starts_early: true,
        operands: ExpertOperand::ALL,
        updated: None,
        params: Arc::new(Launch {
            params: ProductParams { gemm: params(each, &x, &cut), groups: groups(op, kernel.layout()) },
            planes: *planes,
            rows: op.x_rows(),
            columns: each.k,
            w: [weight_rows(op), each.stored_k],
            kernel,
        }),
    })
}

/// `Fp8GemmParams` in `mainloop/fp8_codes.cuh`, of products with experts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Fp8Params {
    product: ProductParams,
    x_scales: u64,
    x_scale_row: u64,
}

/// Bytes behind the parameters of the products up to the next multiple of 64, where tensor maps lie.
const PADDING: usize = size_of::<Fp8Params>().next_multiple_of(64) - size_of::<Fp8Params>();

/// `TmaFp8GemmParams` in `mainloop/sm90/fp8_pipeline.cuh`, of products with experts. The second map is not read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedParams {
    fp8: Fp8Params,
    padding: [u64; PADDING / 8],
    maps: [EncodedMap; 3],
}

/// Everything but the addresses.
#[derive(Debug)]
struct Launch {
    params: ProductParams,
    planes: XPlanes,
    /// Of X.
    rows: usize,
    columns: usize,
    /// Rows of all experts, and columns.
    w: [usize; 2],
    kernel: Fp8Kernel,
}

impl Params for Launch {
    fn with(&self, operands: &Operands<'_>, at: &Places<'_>) -> Result<LaunchParams, HalError> {
        let mut product = self.params;
        product.find(operands, at, 0)?;
        let (scales, x_scale_row) = match self.planes.parts.factor {
            XFactor::None => (ExpertOperand::XScales, self.planes.scales_row),
            XFactor::Given | XFactor::PerToken => (ExpertOperand::XPlaneFactors, 0),
        };
        let x_scales = at.of(operands, scales)?;
        let x = Fp8Matrix {
            address: product.gemm.at.x,
            rows: operands.rows(self.rows) as u64,
            columns: self.columns as u64,
            row_bytes: self.planes.codes_row,
        };
        let mut maps = [EncodedMap::default(); 3];
        if let Some([x, w]) = self.kernel.maps(&x, self.w, product.gemm.at.w) {
            (maps[0], maps[2]) = ((at.encode)(&x)?, (at.encode)(&w)?);
        }
        let fp8 = Fp8Params { product, x_scales, x_scale_row };
        Ok(LaunchParams::of(&MappedParams { fp8, maps, ..MappedParams::zeroed() }))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}
