//! `unpack`: transposed rows of a packed weight, dequantized. One main
//! loop for every format and layout.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format, PAIR_ROWS};
use qgemm_hal::abi::{self, UnpackPointers, UnpackShape, dtype_code};
use qgemm_hal::{
    CheckedUnpack, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence, Name, Operand,
    Operands, Operation, Spec, UnpackConfig, UnpackOperand, UnpackPlan, UnpackSpec, Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::arch;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "unpack";
/// Source file and kernel symbol.
const ENTRY: &str = "entry/unpack.cu";
const SYMBOL: &str = "qg_unpack";
const THREADS: u32 = 128;
/// Values of a k-block over all lanes (`K_BLOCK` in `dequant/k_tile.cuh`):
/// columns of a k-block times rows of a tile.
const K_BLOCK_VALUES: u32 = 1024;
/// Padding words between the columns of a k-block in shared memory.
const PADDING: u32 = 4;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 600;
/// Maximum CTAs of a launch.
const MOST_CTAS: u64 = i32::MAX as u64;

/// Families of `unpack`.
pub(super) const FAMILIES: Families<CheckedUnpack> = &[&Unpack];

/// The kernel family.
#[derive(Debug)]
struct Unpack;

/// Rows of W that a CTA decodes: one tile per warp.
fn cta_rows(layout: &PackedLayout) -> u32 {
    THREADS / 32 * layout.tile_rows as u32
}

/// `sizeof(SharedStorage)`, which the kernel
/// asserts: a k-block of all rows.
fn shared_bytes(layout: &PackedLayout) -> u32 {
    K_BLOCK_VALUES / layout.tile_rows as u32 * (cta_rows(layout) + PADDING) * 4
}

fn id(format: Format, layout: &PackedLayout, variant: Variant) -> KernelId {
    let spec = UnpackSpec { main_loop: Name::new(NAME), w: format, n: cta_rows(layout) };
    KernelId::new(NAME, Some(variant), Spec::Unpack(spec))
}

fn source(format: Format, layout: &PackedLayout, variant: Variant) -> KernelSpec {
    let prelude = Prelude {
        integer_operands: Some(0),
        // Weights become f32.
        x_dtype: Some(dtype_code(DType::F32)),
        threads: Some(THREADS),
        shared_bytes: Some(shared_bytes(layout)),
        rounded: Some(0),
        ..Prelude::of(variant).with_layout(layout).with_format(format)
    };
    KernelSpec {
        name: id(format, layout, variant).to_string(),
        entry: ENTRY,
        text: source::entry(ENTRY),
        symbol: SYMBOL,
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// Packed layout of `format` for `variant`.
fn layout(format: Format, variant: Variant) -> Option<PackedLayout> {
    PackedLayout::new(format, arch::fragment_layout(variant))
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    Format::all().filter_map(move |format| Some(source(format, &layout(format, variant)?, variant)))
}

/// `UnpackParams` in `entry/unpack.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct UnpackParams {
    shape: UnpackShape,
    at: UnpackPointers,
}

const _: () = assert!(size_of::<UnpackShape>().is_multiple_of(8), "pointers follow without a gap");

impl Params for UnpackParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use UnpackOperand as O;
        let mut params = *self;
        params.at.w = at.of(operands, O::W)?;
        params.at.row_scale = at.of(operands, O::RowScale)?;
        params.at.k_order = at.of(operands, O::KOrder)?;
        params.at.d = at.of(operands, O::D)?;
        Ok(LaunchParams::of(&params))
    }
}

/// Row groups, the first k-tile, and the number of
/// k-tiles that hold D's rows.
fn work(op: &CheckedUnpack, layout: &PackedLayout) -> (u32, u32, u32) {
    let columns = op.stored_columns();
    let first = columns.start / layout.k_tile;
    let end = columns.end.div_ceil(layout.k_tile);
    ((op.stored_rows() as u32).div_ceil(cta_rows(layout)), first as u32, (end - first) as u32)
}

/// Launch sequence of `op`. `make` prepares its kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel for the
/// weight, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedUnpack,
    _: &UnpackPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let found = info.variant.and_then(|variant| Some((variant, layout(op.format, variant)?)));
    let (variant, layout) = found.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let (row_groups, first_k_tile, k_tiles) = work(op, &layout);
    // The up weight's rows are stored from its first column on.
    let aligned = op.d.aligned16 && (!op.gated || op.out_features.is_multiple_of(PAIR_ROWS));
    let flags = [
        (abi::FLAG_ROW_SCALE, op.row_scale),
        (abi::FLAG_K_ORDER, op.k_order),
        (abi::FLAG_GATED, op.gated),
        (abi::FLAG_D_ALIGNED16, aligned),
    ];
    let shape = UnpackShape {
        out_features: op.out_features as u32,
        first: op.first as u32,
        features: op.features as u32,
        k_tiles: layout.k_tiles(op.stored_k) as u32,
        first_k_tile,
        row_groups,
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        d_dtype: dtype_code(op.d.dtype),
    };
    let at = UnpackPointers { d_row: op.d.row_stride, ..UnpackPointers::default() };
    let launch = KernelLaunch {
        id: id(op.format, &layout, variant),
        spec: source(op.format, &layout, variant),
        geometry: Geometry {
            grid: [row_groups * k_tiles, 1, 1],
            threads: THREADS,
            shared_bytes: shared_bytes(&layout),
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: UnpackOperand::ALL,
        updated: None,
        params: Arc::new(UnpackParams { shape, at }),
    };
    let step = launch.step::<UnpackOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<UnpackOperand>(op.kernel_name(NAME), vec![step]))
}

impl Family<CheckedUnpack> for Unpack {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedUnpack, info: &DeviceInfo) -> Result<Vec<UnpackConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let expected = arch::fragment_layout(variant);
        if op.class != expected {
            return Err(Unsupported::new(format!("reads weights in layout {expected:?}, not {:?}", op.class)));
        }
        let no_layout = || Unsupported::new(format!("{} has no layout {expected:?}", op.format.name));
        let layout = layout(op.format, variant).ok_or_else(no_layout)?;
        let (row_groups, _, k_tiles) = work(op, &layout);
        if u64::from(row_groups) * u64::from(k_tiles) > MOST_CTAS {
            return Err(Unsupported::new(format!("has at most {MOST_CTAS} k-tiles: unpack fewer features at once")));
        }
        Ok(vec![UnpackConfig { kernel: id(op.format, &layout, variant), efficiency: EFFICIENCY }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedUnpack, plan: &UnpackPlan) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedUnpack, config: &UnpackConfig) -> u64 {
        let variant = config.kernel.variant;
        let found = variant.and_then(|variant| Some((variant, layout(op.format, variant)?)));
        found.map_or(0, |(variant, layout)| source(op.format, &layout, variant).source_hash().short())
    }
}
