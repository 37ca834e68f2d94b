//! `gather_rows`: rows of a packed weight by index, dequantized. One
//! main loop for every format and layout.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, Format};
use qgemm_hal::abi::{self, GatherRowsPointers, GatherRowsShape, dtype_code};
use qgemm_hal::{
    CheckedGatherRows, Device, DeviceInfo, Families, Family, GatherRowsConfig, GatherRowsOperand, GatherRowsPlan,
    GatherRowsSpec, Geometry, HalError, KernelId, LaunchSequence, Name, Operand, Operands, Operation, Spec,
    Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::arch;
use crate::source;
use crate::spec::KernelSpec;

/// Families of `gather_rows`.
pub(super) const FAMILIES: Families<CheckedGatherRows> = &[&GatherRows];

/// Family name.
const NAME: &str = "gather_rows";
/// Source file and kernel symbol.
const ENTRY: &str = "entry/gather_rows.cu";
const SYMBOL: &str = "qg_gather_rows";
const THREADS: u32 = 128;
/// `sizeof(SharedStorage)`, which the kernel asserts: a word a thread.
const SHARED_BYTES: u32 = THREADS * 4;
/// Expected share of the bandwidth, per mille: half of each sector
/// holds another row.
const EFFICIENCY: u32 = 300;
/// Maximum CTAs of a launch.
const MOST_CTAS: u64 = i32::MAX as u64;

/// The kernel family.
#[derive(Debug)]
struct GatherRows;

fn id(format: Format, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::GatherRows(GatherRowsSpec { main_loop: Name::new(NAME), w: format }))
}

fn source(format: Format, layout: &PackedLayout, variant: Variant) -> KernelSpec {
    let prelude = Prelude {
        integer_operands: Some(0),
        // Weights become f32.
        x_dtype: Some(dtype_code(DType::F32)),
        threads: Some(THREADS),
        shared_bytes: Some(SHARED_BYTES),
        rounded: Some(0),
        ..Prelude::of(variant).with_layout(layout).with_format(format)
    };
    KernelSpec {
        name: id(format, variant).to_string(),
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

/// `GatherRowsParams` in `entry/gather_rows.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct GatherRowsParams {
    shape: GatherRowsShape,
    at: GatherRowsPointers,
}

const _: () = assert!(size_of::<GatherRowsShape>().is_multiple_of(8), "pointers follow without a gap");

impl Params for GatherRowsParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use GatherRowsOperand as O;
        let mut params = *self;
        params.at.w = at.of(operands, O::W)?;
        params.at.row_scale = at.of(operands, O::RowScale)?;
        params.at.k_order = at.of(operands, O::KOrder)?;
        params.at.ids = at.of(operands, O::Ids)?;
        params.at.d = at.of(operands, O::D)?;
        params.at.status = at.of(operands, O::Status)?;
        Ok(LaunchParams::of(&params))
    }
}

/// CTAs of a row: each has a k-tile for the lanes that hold a row.
fn row_ctas(op: &CheckedGatherRows, layout: &PackedLayout) -> u32 {
    let lanes = if layout.class == FragmentLayout::MmaM8N8K4 { 1 } else { 4 };
    (layout.k_tiles(op.stored_k) as u32).div_ceil(THREADS / lanes)
}

/// Launch sequence of a plan. `make` prepares its kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel for the
/// weight, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedGatherRows,
    _: &GatherRowsPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let found = info.variant.and_then(|variant| Some((variant, layout(op.format, variant)?)));
    let (variant, layout) = found.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let row_ctas = row_ctas(op, &layout);
    let flags = [(abi::FLAG_ROW_SCALE, op.row_scale), (abi::FLAG_K_ORDER, op.k_order)];
    let shape = GatherRowsShape {
        rows: op.rows as u32,
        table_rows: op.table_rows as u32,
        k: op.k as u32,
        k_tiles: layout.k_tiles(op.stored_k) as u32,
        row_ctas,
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        d_dtype: dtype_code(op.d.dtype),
        scale: op.scale,
    };
    let at = GatherRowsPointers { d_row: op.d.row_stride, ..GatherRowsPointers::default() };
    let launch = KernelLaunch {
        id: id(op.format, variant),
        spec: source(op.format, &layout, variant),
        // One more CTA checks the ids.
        geometry: Geometry {
            grid: [op.rows as u32 * row_ctas + 1, 1, 1],
            threads: THREADS,
            shared_bytes: SHARED_BYTES,
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: GatherRowsOperand::ALL,
        updated: None,
        params: Arc::new(GatherRowsParams { shape, at }),
    };
    let step = launch.step::<GatherRowsOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<GatherRowsOperand>(op.kernel_name(), vec![step]))
}

impl Family<CheckedGatherRows> for GatherRows {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedGatherRows, info: &DeviceInfo) -> Result<Vec<GatherRowsConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let expected = arch::fragment_layout(variant);
        if op.class != expected {
            return Err(Unsupported::new(format!("reads weights in layout {expected:?}, not {:?}", op.class)));
        }
        let no_layout = || Unsupported::new(format!("{} has no layout {expected:?}", op.format.name));
        let layout = layout(op.format, variant).ok_or_else(no_layout)?;
        if op.rows as u64 * u64::from(row_ctas(op, &layout)) >= MOST_CTAS {
            return Err(Unsupported::new(format!("has at most {MOST_CTAS} CTAs: gather fewer rows at once")));
        }
        Ok(vec![GatherRowsConfig { kernel: id(op.format, variant), launches: 1, efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedGatherRows,
        plan: &GatherRowsPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedGatherRows, config: &GatherRowsConfig) -> u64 {
        let variant = config.kernel.variant;
        let found = variant.and_then(|variant| Some((variant, layout(op.format, variant)?)));
        found.map_or(0, |(variant, layout)| source(op.format, &layout, variant).source_hash().short())
    }
}
