//! `norm`: RMSNorm and LayerNorm in one launch. Rows that fit in
//! the registers of a CTA are read once; of longer rows
//! the first columns are cached in shared memory. Products with a
//! norm launch these kernels first.

mod gated;
mod quantized;

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{self, NormPointers, NormShape, dtype_code};
use qgemm_hal::{
    CheckedNorm, Dense, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence, NormConfig,
    NormKind, NormLaunch, NormOperand, NormSpec, Operand, Operands, Spec, Unsupported, Variant,
};

use crate::families::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "norm";
/// Columns that a thread loads and stores at once.
const GROUP: usize = 8;
/// Threads of a CTA that several short rows share.
const SHARED_CTA: u32 = 128;
/// Threads of a warp.
const WARP: u32 = 32;
/// Maximum rows and columns: CTAs along the grid's x axis, and
/// the range of the kernels' counters.
const MOST: usize = i32::MAX as usize;
/// `sizeof(NormStorage)`, which the kernels assert: lines of 32 words for
/// two means, two pairs of moments and a magnitude.
const STORAGE_BYTES: u32 = 7 * 32 * 4;
/// Bytes of a vector access, and the alignment of
/// rows that it requires.
const ACCESS: u64 = 16;
/// Maximum columns of aligned rows that kernels keep in registers.
const ALIGNED_COLUMNS: usize = 16384;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 800;

/// Families of `norm`.
pub(super) const FAMILIES: Families<CheckedNorm> = &[&Norm];

/// The kernel family.
#[derive(Debug)]
struct Norm;

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Template {
    /// Element type of all matrices in kernels for whole aligned
    /// rows; `None` for run-time types.
    x: Option<DType>,
    /// Groups that a thread keeps in registers; 0
    /// for rows of any length.
    groups: u32,
    /// Maximum threads of a CTA.
    threads: u32,
    /// Resident CTAs per SM to demand of the compiler,
    /// which limits registers.
    least_ctas: u32,
}

/// Kernels for run-time types, shortest rows first.
const TEMPLATES: [Template; 4] = [
    Template { x: None, groups: 1, threads: 128, least_ctas: 8 },
    Template { x: None, groups: 2, threads: 128, least_ctas: 6 },
    Template { x: None, groups: 4, threads: 512, least_ctas: 1 },
    Template { x: None, groups: 0, threads: 1024, least_ctas: 1 },
];
/// Kernels for aligned 16-bit rows. With four groups per thread,
/// a row and its residual take 32 registers. With two groups
/// and 4096 columns, four CTAs share an SM, so that 512
/// rows are one wave on an H200.
const HALF_TEMPLATES: [Template; 3] = [
    Template { x: None, groups: 1, threads: 128, least_ctas: 12 },
    Template { x: None, groups: 2, threads: 512, least_ctas: 2 },
    Template { x: None, groups: 4, threads: 512, least_ctas: 2 },
];
/// Resident threads per SM of such kernels.
const RESIDENT_THREADS: u32 = 1024;
/// Kernels for aligned f32 rows.
const F32_TEMPLATES: [Template; 2] = [
    Template { x: Some(DType::F32), groups: 1, threads: 128, least_ctas: 10 },
    Template { x: Some(DType::F32), groups: 2, threads: 1024, least_ctas: 1 },
];

impl Template {
    /// All kernels.
    fn all() -> impl Iterator<Item = Self> {
        let of_type = |x| HALF_TEMPLATES.map(|template| Self { x: Some(x), ..template });
        TEMPLATES.into_iter().chain(of_type(DType::F16)).chain(of_type(DType::BF16)).chain(F32_TEMPLATES)
    }

    /// The kernel for `op` on a device like `info`,
    /// and the threads per row.
    fn of(op: &CheckedNorm, info: &DeviceInfo) -> (Self, u32) {
        let columns = op.columns.max(op.d_columns);
        match op.aligned_dtype().filter(|_| columns <= ALIGNED_COLUMNS) {
            Some(x) => Self::aligned(x, columns, op.rows, info.units),
            None => Self::any(columns),
        }
    }

    /// For rows of `columns` columns of any types.
    fn any(columns: usize) -> (Self, u32) {
        let [one, two, four, any] = TEMPLATES;
        let groups = columns.div_ceil(GROUP);
        match groups {
            // Rows that share a warp have a power
            // of two of threads.
            0..=32 => (one, (groups as u32).next_power_of_two()),
            33..=64 => (two, WARP),
            65..=128 => (four, WARP),
            129..=2048 => (four, warps(groups, 4)),
            _ => (any, any.threads),
        }
    }

    /// For `rows` aligned rows of `columns` columns of type `x`
    /// on a device with `units` SMs.
    ///
    /// Beyond one wave of rows, a row gets half the threads.
    /// They use the same reduction tree as twice as many
    /// (`PARTS` in the kernel), so that the bits do not
    /// depend on the number of rows.
    fn aligned(x: DType, columns: usize, rows: usize, units: u32) -> (Self, u32) {
        let groups = columns.div_ceil(GROUP);
        let [one, two, four] = match x {
            DType::F32 => {
                let [one, two] = F32_TEMPLATES;
                return match groups {
                    0..=32 => (one, (groups as u32).next_power_of_two()),
                    _ => (two, warps(groups, 2)),
                };
            }
            DType::F16 | DType::BF16 => HALF_TEMPLATES.map(|template| Self { x: Some(x), ..template }),
        };
        // Half of the threads must be whole warps, too.
        let threads = warps(groups, 2).next_multiple_of(2 * WARP);
        let few = rows <= (units * (RESIDENT_THREADS / threads)) as usize;
        match groups {
            0..=32 => (one, (groups as u32).next_power_of_two()),
            33..=64 => (two, WARP),
            _ if few && threads <= two.threads => (two, threads),
            _ => (four, threads / 2),
        }
    }

    /// Shared memory of a CTA with `threads` threads. `copied` of the
    /// operands gamma and beta are staged in it.
    fn shared_bytes(&self, threads: u32, copied: u32) -> u32 {
        // `AlignedStorage` in the kernel: a line for each
        // sum, with one word per warp.
        let parts = if self.groups > 2 { 2 } else { 1 };
        let lines = if self.x.is_some() { 3 * 4 * parts * self.threads / WARP } else { 0 };
        STORAGE_BYTES + lines.next_multiple_of(ACCESS as u32) + copied * self.groups * ACCESS as u32 * threads
    }

    fn spec(&self) -> NormSpec {
        match self.x {
            Some(x) => NormSpec::of_type(self.groups, x),
            None => NormSpec::any(self.groups),
        }
    }

    fn id(&self, variant: Variant) -> KernelId {
        KernelId::new(NAME, Some(variant), Spec::Norm(self.spec()))
    }

    /// [`Template::least_ctas`] on `variant`. On consumer
    /// Blackwell two groups of run-time types need up to 96
    /// registers, and six CTAs leave only 80.
    fn least_ctas(&self, variant: Variant) -> u32 {
        match (variant, self.x, self.groups) {
            (Variant::Sm120, None, 2) => self.least_ctas - 1,
            _ => self.least_ctas,
        }
    }

    fn source(&self, variant: Variant) -> KernelSpec {
        let (entry, symbol) = match (self.x, self.groups) {
            (Some(_), _) => ("entry/norm_aligned_rows.cu", "qg_norm_aligned_rows"),
            (None, 0) => ("entry/norm_long_rows.cu", "qg_norm_long_rows"),
            (None, _) => ("entry/norm_rows.cu", "qg_norm_rows"),
        };
        let has_groups = self.groups > 0;
        let prelude = Prelude {
            threads: Some(self.threads),
            shared_bytes: Some(STORAGE_BYTES),
            groups: has_groups.then_some(self.groups),
            least_ctas: has_groups.then(|| self.least_ctas(variant)),
            x_dtype: self.x.map(dtype_code),
            ..Prelude::of(variant)
        };
        KernelSpec {
            name: self.id(variant).to_string(),
            entry,
            text: source::entry(entry),
            symbol,
            prelude: prelude.text(),
            arch_specific: false,
        }
    }
}

/// Threads (whole warps) for `groups` groups with `each` groups per thread.
fn warps(groups: usize, each: usize) -> u32 {
    (groups.div_ceil(each) as u32).next_multiple_of(WARP)
}

/// All kernels of the family for `variant`.
pub(in crate::families) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    Template::all()
        .map(move |template| template.source(variant))
        .chain(quantized::specs(variant))
        .chain(gated::specs(variant))
}

/// `NormParams` in `mainloop/norm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct NormParams {
    shape: NormShape,
    at: NormPointers,
}

/// Norm parameters, and the operand of each.
#[derive(Debug)]
struct NormArguments {
    op: CheckedNorm,
    params: NormParams,
}

impl NormArguments {
    /// The parameters with all addresses except those of a quantized result.
    fn at(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<NormParams, HalError> {
        let (op, mut params) = (&self.op, self.params);
        let optional = |operand: Option<NormOperand>| operand.map_or(Ok(0), |operand| at.of(operands, operand));
        params.at.x = at.of(operands, op.x_operand())?;
        params.at.residual = optional(op.residual_operand())?;
        params.at.gamma = at.of(operands, NormOperand::Gamma)?;
        params.at.beta = at.of(operands, NormOperand::Beta)?;
        params.at.order = at.of(operands, NormOperand::Order)?;
        params.at.sum = optional(op.sum_operand())?;
        params.at.d = if op.quantized.is_some() { 0 } else { at.of(operands, op.d_operand())? };
        let of_columns = [(params.at.gamma, abi::FLAG_GAMMA_ALIGNED16), (params.at.beta, abi::FLAG_BETA_ALIGNED16)];
        for (_, flag) in of_columns.into_iter().filter(|(address, _)| address.is_multiple_of(ACCESS)) {
            params.shape.flags |= flag;
        }
        Ok(params)
    }
}

impl Params for NormArguments {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&self.at(operands, at)?))
    }
}

/// The launch of `op` on a device like `info`.
fn launch(op: &CheckedNorm, variant: Variant, info: &DeviceInfo) -> KernelLaunch {
    let (template, row_threads) = Template::of(op, info);
    let (mut geometry, kept_columns) = geometry(op, template.groups, row_threads, info);
    if template.x.is_some() {
        geometry.shared_bytes = template.shared_bytes(geometry.threads, copied_operands(op, variant));
    }
    KernelLaunch {
        id: template.id(variant),
        spec: template.source(variant),
        geometry,
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: NormOperand::ALL,
        updated: None,
        params: Arc::new(NormArguments { op: *op, params: params(op, row_threads, kept_columns) }),
    }
}

/// How many of gamma and beta the kernels for aligned rows
/// stage in shared memory (`COPIES_COLUMNS` in
/// `mainloop/norm_packed_row.cuh`).
fn copied_operands(op: &CheckedNorm, variant: Variant) -> u32 {
    let is_half = |dtype: &DType| dtype.bytes() == 2;
    let given = [op.function.gamma, op.function.beta].into_iter().flatten();
    if variant >= Variant::Sm80 && is_half(&op.x.dtype) { given.filter(is_half).count() as u32 } else { 0 }
}

/// Launch geometry for `groups` groups per thread and `row_threads` threads
/// per row, and the columns cached in shared memory.
fn geometry(op: &CheckedNorm, groups: u32, row_threads: u32, info: &DeviceInfo) -> (Geometry, u32) {
    let rows = op.rows as u32;
    let geometry = |rows_of_cta: u32, threads, shared_bytes| Geometry {
        grid: [rows.div_ceil(rows_of_cta), 1, 1],
        threads,
        shared_bytes,
    };
    if groups == 0 {
        let room = info.shared_bytes.saturating_sub(STORAGE_BYTES) as usize / (GROUP * size_of::<f32>()) * GROUP;
        let kept_columns = room.min(op.columns.next_multiple_of(GROUP)) as u32;
        (geometry(1, row_threads, STORAGE_BYTES + kept_columns * size_of::<f32>() as u32), kept_columns)
    } else if row_threads <= WARP {
        (geometry(SHARED_CTA / row_threads, SHARED_CTA, STORAGE_BYTES), 0)
    } else {
        (geometry(1, row_threads, STORAGE_BYTES), 0)
    }
}

/// Kernel parameters without addresses and address-derived fields.
fn params(op: &CheckedNorm, row_threads: u32, kept_columns: u32) -> NormParams {
    let function = &op.function;
    let (residual, sum) = (op.added.map(|added| added.residual), op.added.map(|added| added.sum));
    let is_aligned = |dense: Option<Dense>| dense.is_some_and(|dense| dense.aligned16);
    let flags = [
        (abi::FLAG_K_ORDER, op.gathers),
        (abi::FLAG_RESIDUAL, op.added.is_some()),
        (abi::FLAG_CENTERED, function.kind == NormKind::Layer),
        (abi::FLAG_GAMMA, function.gamma.is_some()),
        (abi::FLAG_BETA, function.beta.is_some()),
        (abi::FLAG_X_ALIGNED16, op.x.aligned16),
        (abi::FLAG_D_ALIGNED16, op.d.aligned16),
        (abi::FLAG_RESIDUAL_ALIGNED16, is_aligned(residual)),
        (abi::FLAG_SUM_ALIGNED16, is_aligned(sum)),
    ];
    let dtype = |dense: Option<Dense>| dense.map(|dense| dense.dtype);
    let types = [Some(op.x.dtype), dtype(residual), dtype(sum), Some(op.d.dtype), function.gamma, function.beta];
    let shape = NormShape {
        rows: op.rows as u32,
        columns: op.columns as u32,
        d_columns: op.d_columns as u32,
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        types: types.iter().rev().fold(0, |types, dtype: &Option<DType>| types << 4 | dtype.map_or(0, dtype_code)),
        row_threads,
        kept_columns,
        eps: function.eps,
    };
    let stride = |dense: Option<Dense>| dense.map_or(0, |dense| dense.row_stride);
    let at = NormPointers {
        x_row: op.x.row_stride,
        residual_row: stride(residual),
        sum_row: stride(sum),
        d_row: op.d.row_stride,
        ..NormPointers::default()
    };
    NormParams { shape, at }
}

/// Whether the kernels support `op`.
///
/// # Errors
/// The refusal.
fn check(op: &CheckedNorm) -> Result<(), Unsupported> {
    for (name, size) in
        [("groups of rows", op.rows.saturating_mul(op.groups)), ("columns", op.columns.max(op.d_columns))]
    {
        if size > MOST {
            return Err(Unsupported::new(format!("serves at most {MOST} {name}, not {size}")));
        }
    }
    if op.x.col_stride != 1 || op.d.col_stride != 1 {
        return Err(Unsupported::new("reads and writes row-major matrices"));
    }
    if op.is_gated() && (op.added.is_some() || op.quantized.is_some() || op.gathers) {
        return Err(Unsupported::new("gates rows and groups of features without residual and quantization"));
    }
    if op.gathers && op.quantized.is_some() {
        return Err(Unsupported::new("quantizes columns in the order of X's"));
    }
    Ok(())
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedNorm,
    _: &NormLaunch,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    use qgemm_hal::Operation;
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let launch = match &op.quantized {
        None if op.is_gated() => gated::launch(op, variant, info),
        None => launch(op, variant, info),
        Some(quantized) => quantized::launch(op, quantized, variant, info),
    };
    let step = launch.step::<NormOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<NormOperand>(op.kernel_name(), vec![step]))
}

impl Family<CheckedNorm> for Norm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedNorm, info: &DeviceInfo) -> Result<Vec<NormConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        check(op)?;
        let kernel = match &op.quantized {
            None if op.is_gated() => gated::id(op, variant),
            None => Template::of(op, info).0.id(variant),
            Some(quantized) => quantized::id(op, quantized, variant),
        };
        Ok(vec![NormConfig { kernel, efficiency: EFFICIENCY }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedNorm, plan: &NormLaunch) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedNorm, config: &NormConfig) -> u64 {
        let Some(variant) = config.kernel.variant else { return 0 };
        let source = match config.kernel.spec {
            Spec::Norm(spec) => {
                Template::all().find(|template| template.spec() == spec).map(|template| template.source(variant))
            }
            Spec::NormQuantize(spec) => quantized::source(spec, variant),
            Spec::NormGated(spec) => gated::source(spec, variant),
            _ => None,
        };
        source.map_or(0, |source| source.source_hash().short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_have_half_the_threads_of_few() {
        let of = |columns, rows| {
            let (template, threads) = Template::aligned(DType::F16, columns, rows, 132);
            (template.groups, threads)
        };
        assert_eq!([of(4096, 1), of(4096, 528), of(4096, 529)], [(2, 256), (2, 256), (4, 128)]);
        assert_eq!([of(8192, 264), of(8192, 265), of(16_384, 1)], [(2, 512), (4, 256), (4, 512)]);
        assert_eq!([of(512, 100_000), of(520, 1), of(520, 100_000)], [(2, 32), (2, 64), (4, 32)]);
    }

    #[test]
    fn the_threads_of_a_row_hold_all_of_it() {
        let check = |columns: usize, (template, row_threads): (Template, u32)| {
            let held = (template.groups * row_threads) as usize * GROUP;
            assert!(template.groups == 0 || held >= columns, "{columns}: {template:?} with {row_threads}");
            assert!(row_threads <= template.threads, "{columns}: {template:?} with {row_threads}");
            match row_threads {
                0..=WARP => assert!(row_threads.is_power_of_two() && template.threads >= SHARED_CTA),
                _ => assert!(row_threads.is_multiple_of(WARP)),
            }
        };
        for columns in (1..20_000).chain([1 << 20, i32::MAX as usize]) {
            check(columns, Template::any(columns));
            for x in DType::ALL.into_iter().filter(|_| columns <= ALIGNED_COLUMNS) {
                for rows in [1, 132, 1000, 100_000] {
                    check(columns, Template::aligned(x, columns, rows, 132));
                }
            }
        }
    }
}
