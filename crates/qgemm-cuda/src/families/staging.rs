//! Activations that matrix instructions cannot read as they lie: which kernels want a copy of them, and the launch that
//! makes it in the workspace before the product's.

use qgemm_formats::DType;
use qgemm_hal::abi::{self, StageX, dtype_code};
use qgemm_hal::{
    BufferRef, CheckedGemm, Dense, DeviceInfo, GemmArgs, HalError, StagedLayout, StagedX, Variant, XRounding,
};

use super::gemm::Engine;
use super::prelude::{constant_line, macro_line};
use crate::launch::Geometry;
use crate::source;
use crate::spec::KernelSpec;

/// Most threads of a block that copies one token: 16 KiB of f32 in flight.
const ROW_THREADS: u32 = 512;
/// One word a warp (`SharedStorage` of `entry/stage_x.cu`).
const ROW_SHARED_BYTES: u32 = ROW_THREADS / 32 * 4;
/// Columns that a thread writes at once.
const GROUP: u32 = 8;
/// Threads and tokens of a block that turns columns into rows: 32 columns a step.
const TURN_THREADS: u32 = 256;
const TURN_TOKENS: u32 = 8;
/// The tile, whose tokens are padded by 16 bytes, and a word for every token a warp (`SharedStorage` of
/// `entry/stage_x_transposed.cu`).
const TURN_SHARED_BYTES: u32 =
    TURN_TOKENS * (TURN_THREADS / TURN_TOKENS * GROUP + 8) * 2 + TURN_THREADS / 32 * TURN_TOKENS * 4;

/// The copy of X that matrix instructions of `variant` take where X itself will not do: its type is another, its columns
/// are not neighbours, W's are permuted, or it is to be copied asynchronously and its rows do not begin at multiples of 16
/// bytes. `None` where X can be read as it lies, or no matrix instruction helps.
pub(super) fn staged_x(op: &CheckedGemm, variant: Variant) -> Option<StagedX> {
    let takes = |dtype| Engine::of(op.format, dtype, variant).is_mma();
    let dtype = match (op.x.dtype, op.x_rounding) {
        (own, _) if takes(own) => own,
        (DType::F16, _) | (_, XRounding::Exact) => return None,
        (DType::F32, XRounding::BF16) => DType::BF16,
        (DType::F32 | DType::BF16, _) => DType::F16,
    };
    let as_it_lies = dtype == op.x.dtype && !gathers(op) && (op.x.aligned16 || variant < Variant::Sm80);
    let scaled = dtype == DType::F16 && op.x.dtype != DType::F16;
    (takes(dtype) && !as_it_lies).then_some(StagedX { dtype, scaled })
}

/// Whether neighbouring columns of W multiply elements of X that are not neighbours.
pub(super) fn gathers(op: &CheckedGemm) -> bool {
    op.k_order || op.x.col_stride != 1
}

/// The operation as the kernel after the copy sees it.
pub(super) fn staged_op(op: &CheckedGemm, staged: StagedX, layout: &StagedLayout) -> CheckedGemm {
    let columns = layout.columns;
    let x = Dense { dtype: staged.dtype, row_stride: columns as u64, col_stride: 1, aligned16: true };
    CheckedGemm { k: columns, stored_k: columns, k_order: false, x, ..op.clone() }
}

/// Every kernel that makes copies on devices of `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let pairs = [
        (DType::F32, DType::F16),
        (DType::F16, DType::F16),
        (DType::BF16, DType::F16),
        (DType::F32, DType::BF16),
        (DType::BF16, DType::BF16),
    ];
    let known = move |to: &DType| *to == DType::F16 || variant >= Variant::Sm80;
    let kernels = |(from, to)| [Layout::Rows, Layout::Transposed].map(|layout| (from, to, layout));
    let served = pairs.into_iter().filter(move |(_, to)| known(to));
    served.flat_map(kernels).map(move |(from, to, layout)| spec(from, to, layout, variant))
}

/// How X lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// A token's elements are neighbours.
    Rows,
    /// A column's elements are.
    Transposed,
}

fn spec(from: DType, to: DType, layout: Layout, variant: Variant) -> KernelSpec {
    let (name, entry, symbol, threads, shared_bytes) = match layout {
        Layout::Rows => ("stage_x", "entry/stage_x.cu", "qg_stage_x", ROW_THREADS, ROW_SHARED_BYTES),
        Layout::Transposed => (
            "stage_x_transposed",
            "entry/stage_x_transposed.cu",
            "qg_stage_x_transposed",
            TURN_THREADS,
            TURN_SHARED_BYTES,
        ),
    };
    let mut prelude = String::new();
    macro_line(&mut prelude, "QG_VARIANT", &variant.number().to_string());
    constant_line(&mut prelude, "QG_X_DTYPE", dtype_code(from));
    constant_line(&mut prelude, "QG_STAGED_DTYPE", dtype_code(to));
    constant_line(&mut prelude, "QG_THREADS", threads);
    constant_line(&mut prelude, "QG_SHARED_BYTES", shared_bytes);
    KernelSpec {
        name: format!("{name}_{from}_{to}"),
        entry,
        text: source::entry(entry),
        symbol,
        prelude,
        arch_specific: false,
    }
}

/// The launch that makes the copy, with all parameters but the addresses.
#[derive(Clone, Debug)]
pub struct StageLaunch {
    /// The kernel.
    pub spec: KernelSpec,
    /// Grid, threads, shared memory.
    pub geometry: Geometry,
    /// Where copy and factors lie in the workspace.
    pub layout: StagedLayout,
    /// What the copy holds.
    pub staged: StagedX,
    /// Tokens that are copied: no more rows are written.
    pub tokens: usize,
    params: StageX,
}

impl StageLaunch {
    /// The launch for `op` on a device like `info`.
    pub(super) fn new(
        op: &CheckedGemm,
        staged: StagedX,
        layout: StagedLayout,
        variant: Variant,
        info: &DeviceInfo,
    ) -> Self {
        let (m, columns) = (op.m as u32, layout.columns as u32);
        let lies = if op.x.col_stride == 1 { Layout::Rows } else { Layout::Transposed };
        let mut flags = 0;
        let mut set = |on: bool, flag| flags |= if on { flag } else { 0 };
        set(op.k_order, abi::FLAG_K_ORDER);
        set(op.x.aligned16, abi::FLAG_X_ALIGNED16);
        let geometry = match lies {
            Layout::Rows => {
                // Read twice, or in another order: better from shared memory.
                let row_bytes = op.k.next_multiple_of(GROUP as usize) * op.x.dtype.bytes();
                let with_row = u32::try_from(row_bytes).ok().and_then(|row| row.checked_add(ROW_SHARED_BYTES));
                let kept = with_row.filter(|&bytes| bytes <= info.shared_bytes && (staged.scaled || op.k_order));
                set(kept.is_some(), abi::FLAG_ROW_IN_SHARED);
                let threads = columns.div_ceil(GROUP).next_multiple_of(32).min(ROW_THREADS);
                Geometry { grid: [m, 1, 1], threads, shared_bytes: kept.unwrap_or(ROW_SHARED_BYTES) }
            }
            Layout::Transposed => Geometry {
                grid: [m.div_ceil(TURN_TOKENS), 1, 1],
                threads: TURN_THREADS,
                shared_bytes: TURN_SHARED_BYTES,
            },
        };
        let params = StageX {
            m,
            k: op.k as u32,
            columns,
            flags,
            x_row: op.x.row_stride,
            x_col: op.x.col_stride,
            ..StageX::default()
        };
        Self { spec: spec(op.x.dtype, staged.dtype, lies, variant), geometry, layout, staged, tokens: op.m, params }
    }

    /// The kernel's parameter, with the addresses that `address` gives of the arguments.
    ///
    /// # Errors
    /// Those of `address`.
    pub fn params(
        &self,
        args: &GemmArgs<'_>,
        address: impl Fn(BufferRef<'_>, &'static str) -> Result<u64, HalError>,
    ) -> Result<StageX, HalError> {
        let mut params = self.params;
        params.x = address(args.x, "x")?;
        if let Some(order) = args.w.k_order {
            params.k_order = address(order, "the column order")?;
        }
        if let Some(workspace) = &args.workspace {
            let base = address(workspace.as_ref(), "the workspace")?;
            params.staged = base + self.layout.x as u64;
            params.factors = base + self.layout.factors as u64;
        }
        Ok(params)
    }
}
