//! `convert`: type and layout conversion. Also the X prologue of
//! products that cannot read X in place.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{self, ConvertPointers, ConvertShape, dtype_code};
use qgemm_hal::{
    CheckedConvert, ConvertConfig, ConvertOperand, ConvertPlan, ConvertSpec, Device, DeviceInfo, Families, Family,
    Geometry, HalError, KernelId, LaunchSequence, Operand, Operands, Spec, Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "convert";
/// Columns of D that a thread writes at once.
const GROUP: u32 = 8;
/// Bytes of a vector access.
const ACCESS: u32 = 16;
/// Maximum rows: CTAs along the grid's x axis.
const MOST_ROWS: usize = i32::MAX as usize;
/// Reached share of the bandwidth for contiguous rows and
/// contiguous columns, per mille (H200).
const EFFICIENCY: [u32; 2] = [700, 500];

/// Families of `convert`.
pub(super) const FAMILIES: Families<CheckedConvert> = &[&Convert];

/// The kernel family.
#[derive(Debug)]
struct Convert;

/// A kernel for one storage order of X.
#[derive(Clone, Copy, Debug)]
struct Template {
    entry: &'static str,
    symbol: &'static str,
    threads: u32,
    /// Rows of a CTA.
    rows: u32,
}

/// Contiguous rows: one row per CTA, 16
/// KiB of f32 in flight.
const ROWS: Template = Template { entry: "entry/convert.cu", symbol: "qg_convert", threads: 512, rows: 1 };
/// Contiguous columns: eight rows per CTA, 32
/// columns of X per step.
const COLUMNS: Template =
    Template { entry: "entry/convert_transposed.cu", symbol: "qg_convert_transposed", threads: 256, rows: 8 };

impl Template {
    fn of(transposed: bool) -> Self {
        if transposed { COLUMNS } else { ROWS }
    }

    /// `sizeof(SharedStorage)`, which the kernel asserts: one word
    /// per warp and, for contiguous columns, per row; plus a tile
    /// with rows padded by 16 bytes.
    fn shared_bytes(&self, d: DType) -> u32 {
        let words = self.threads / 32 * self.rows * 4;
        let row = self.threads / self.rows * GROUP * d.bytes() as u32 + ACCESS;
        let tile = if self.rows > 1 { self.rows * row } else { 0 };
        tile + words
    }
}

/// Kernel for these types.
fn id(spec: ConvertSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Convert(spec))
}

fn source(spec: ConvertSpec, variant: Variant) -> KernelSpec {
    let template = Template::of(spec.transposed);
    let prelude = Prelude {
        x_dtype: Some(dtype_code(spec.x)),
        d_dtype: Some(dtype_code(spec.d)),
        row_factors: Some(spec.row_factors.into()),
        whole_groups: Some(spec.whole_groups.into()),
        threads: Some(template.threads),
        shared_bytes: Some(template.shared_bytes(spec.d)),
        ..Prelude::of(variant)
    };
    KernelSpec {
        name: id(spec, variant).to_string(),
        entry: template.entry,
        text: source::entry(template.entry),
        symbol: template.symbol,
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let types = DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d)));
    let specs = types.flat_map(move |(x, d)| {
        let spec = move |bits: u32| {
            let [transposed, row_factors, whole_groups] = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
            ConvertSpec { x, d, transposed, row_factors, whole_groups }
        };
        (0..8).map(spec).filter(|spec| !spec.row_factors || spec.d == DType::F16)
    });
    specs.map(move |spec| source(spec, variant))
}

/// `ConvertParams` in `mainloop/convert.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct ConvertParams {
    shape: ConvertShape,
    at: ConvertPointers,
}

impl Params for ConvertParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut params = *self;
        params.at.x = at.of(operands, ConvertOperand::X)?;
        params.at.order = at.of(operands, ConvertOperand::Order)?;
        params.at.d = at.of(operands, ConvertOperand::D)?;
        params.at.row_factors = at.of(operands, ConvertOperand::RowFactors)?;
        Ok(LaunchParams::of(&params))
    }
}

/// The launch of `op` on a device like `info`.
pub(super) fn launch(op: &CheckedConvert, variant: Variant, info: &DeviceInfo) -> KernelLaunch {
    let spec = ConvertSpec::of(op);
    let template = Template::of(spec.transposed);
    let base_bytes = template.shared_bytes(op.d.dtype);
    let mut flags = 0;
    let mut set = |on: bool, flag| flags |= if on { flag } else { 0 };
    set(op.gathers, abi::FLAG_K_ORDER);
    set(op.x.aligned16, abi::FLAG_X_ALIGNED16);
    let geometry = if spec.transposed {
        let grid = [(op.rows as u32).div_ceil(template.rows), 1, 1];
        Geometry { grid, threads: template.threads, shared_bytes: base_bytes }
    } else {
        // X is read twice or out of order: keep the
        // row in shared memory.
        let row_bytes = op.columns.next_multiple_of(GROUP as usize).saturating_mul(op.x.dtype.bytes());
        let with_row = u32::try_from(row_bytes).ok().and_then(|row| row.checked_add(base_bytes));
        let cached = with_row.filter(|&bytes| bytes <= info.shared_bytes && (op.row_factors || op.gathers));
        set(cached.is_some(), abi::FLAG_ROW_IN_SHARED);
        let threads = (op.d_columns as u32).div_ceil(GROUP).next_multiple_of(32).min(template.threads);
        Geometry { grid: [op.rows as u32, 1, 1], threads, shared_bytes: cached.unwrap_or(base_bytes) }
    };
    let shape =
        ConvertShape { rows: op.rows as u32, columns: op.columns as u32, d_columns: op.d_columns as u32, flags };
    let at = ConvertPointers {
        x_row: op.x.row_stride,
        x_col: op.x.col_stride,
        d_row: op.d.row_stride,
        ..ConvertPointers::default()
    };
    KernelLaunch {
        id: id(spec, variant),
        spec: source(spec, variant),
        geometry,
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: ConvertOperand::ALL,
        updated: None,
        params: Arc::new(ConvertParams { shape, at }),
    }
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedConvert,
    _: &ConvertPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let step = launch(op, variant, info).step::<ConvertOperand>(make)?.of_operation();
    let step = if op.gathers { step } else { step.unbind(ConvertOperand::Order) };
    let step = if op.row_factors { step } else { step.unbind(ConvertOperand::RowFactors) };
    Ok(LaunchSequence::new::<ConvertOperand>(format!("convert_{}_{}", op.x.dtype, op.d.dtype), vec![step]))
}

impl Family<CheckedConvert> for Convert {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedConvert, info: &DeviceInfo) -> Result<Vec<ConvertConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if op.rows > MOST_ROWS {
            return Err(Unsupported::new(format!("serves at most {MOST_ROWS} rows, not {}", op.rows)));
        }
        if op.d.col_stride != 1 {
            return Err(Unsupported::new("writes row-major matrices"));
        }
        if op.row_factors && op.d.dtype != DType::F16 {
            return Err(Unsupported::new(format!("has row factors for f16 results, not {}", op.d.dtype)));
        }
        let spec = ConvertSpec::of(op);
        Ok(vec![ConvertConfig { kernel: id(spec, variant), efficiency: EFFICIENCY[usize::from(spec.transposed)] }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedConvert,
        plan: &ConvertPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedConvert, config: &ConvertConfig) -> u64 {
        match (config.kernel.spec, config.kernel.variant) {
            (Spec::Convert(spec), Some(variant)) => source(spec, variant).source_hash().short(),
            _ => 0,
        }
    }
}
