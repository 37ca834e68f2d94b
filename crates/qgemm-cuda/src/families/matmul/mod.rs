//! `matmul`: products of two matrices in device memory. Matrix instructions
//! multiply 16-bit factors of one type; CUDA cores multiply other factors,
//! and all factors on chips without matching matrix instructions.

mod copies;
mod templates;
mod tma;

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{
    self, MatmulPointers, MatmulScales, MatmulShape, MatmulTiles, MatmulTypes, activation_code, dtype_code,
};
use qgemm_hal::{
    CheckedMatmul, Device, DeviceInfo, FactorFormat, Families, Family, Geometry, HalError, KernelId, LaunchSequence,
    MatmulConfig, MatmulLayout, MatmulOperand, MatmulPlan, MatmulSpec, Operand, Operands, Operation, Spec, Unsupported,
    Variant, XPrecision,
};

use crate::families::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use copies::{CopiedFactors, TooLarge};
use templates::{
    BF16X3, BF16X3_SMALL, CP_ASYNC_ROWS, FMA, SIMT, SIMT_ROWS, SIMT_SMALL, TWO_STAGE_ROWS, Template, factor_code,
    has_instructions, of_blocks, of_e4m3, of_instructions, of_tf32,
};
use tma::MappedMatmul;

use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "matmul";
/// Maximum tiles of all products: CTAs along the grid's x axis.
const MOST_TILES: u64 = i32::MAX as u64;
/// Maximum tiles when parts of tiles are numbered consecutively.
const MOST_TILES_OF_WORK: u64 = (u32::MAX / MOST_SPLITS) as u64;
/// Maximum split-K: CTAs along the grid's y
/// axis. Far more than pays.
const MOST_SPLITS: u32 = 64;
/// Families of `matmul`.
pub(super) const FAMILIES: Families<CheckedMatmul> = &[&Matmul];

/// The kernel family.
#[derive(Debug)]
struct Matmul;

/// f32 factors.
const F32: FactorFormat = FactorFormat::Plain(DType::F32);

fn spec_of(template: &Template, a: FactorFormat, b: FactorFormat, layout: MatmulLayout) -> MatmulSpec {
    let layout = match template.math {
        _ if template.takes_any_layout() => MatmulLayout::Any,
        _ if template.is_along_k() => MatmulLayout::Nt,
        _ => layout,
    };
    let Template { m, n, k, .. } = *template;
    MatmulSpec { main_loop: template.name(), a, b, layout, m, n, k }
}

fn id(spec: MatmulSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Matmul(spec))
}

fn source(template: &Template, spec: MatmulSpec, variant: Variant) -> KernelSpec {
    // The CUDA-core kernel takes any types and layout.
    let is_simt = template.takes_any_layout();
    let of_mma = |value: u32| (!is_simt).then_some(value);
    let has_warps = template.warps != [0, 0];
    let prelude = Prelude {
        element_bytes: Some(spec.a.bytes() as u32),
        block_scaled: Some(spec.a.has_scales().into()),
        tile_m: Some(template.m),
        tile_n: Some(template.n),
        tile_k: Some(template.k),
        threads: Some(template.threads),
        ctas_per_sm: Some(template.ctas),
        shared_bytes: Some(template.shared_bytes()),
        may_group_k: Some(template.may_group_k(&spec).into()),
        may_scale: Some([spec.a, spec.b].contains(&FactorFormat::E4M3).into()),
        groups_rows: Some(template.groups_rows.into()),
        a_dtype: is_simt.then(|| factor_code(spec.a)),
        b_dtype: is_simt.then(|| factor_code(spec.b)),
        dtype: of_mma(dtype_code(template.multiplied(spec.a))),
        a_bytes: of_mma(spec.a.bytes() as u32),
        b_bytes: of_mma(spec.b.bytes() as u32),
        a_along_k: of_mma(spec.layout.a_by_rows().into()),
        b_along_k: of_mma((!spec.layout.b_by_rows()).into()),
        stages: of_mma(template.stages),
        warps_m: has_warps.then_some(template.warps[0]),
        warps_n: has_warps.then_some(template.warps[1]),
        ..Prelude::of(variant)
    };
    KernelSpec {
        name: id(spec, variant).to_string(),
        entry: template.entry,
        text: source::entry(template.entry),
        symbol: template.symbol,
        prelude: prelude.text(),
        arch_specific: template.stays(),
    }
}

/// All kernels for `variant`, with their templates.
fn kernels(variant: Variant) -> Vec<(Template, MatmulSpec)> {
    let mut all = Vec::new();
    for template in [SIMT, SIMT_SMALL] {
        let types = FactorFormat::ALL.into_iter().flat_map(|a| FactorFormat::ALL.map(|b| (a, b)));
        let types = types.filter(|(a, b)| !a.has_scales() && !b.has_scales());
        for (a, b) in types {
            all.push((template, spec_of(&template, a, b, MatmulLayout::Any)));
        }
    }
    let of_f32 = of_tf32(variant, true).iter().chain([&BF16X3, &BF16X3_SMALL, &FMA]);
    for &template in of_f32.filter(|_| variant >= Variant::Sm80) {
        let of = |layout| (template.on(variant), spec_of(&template, F32, F32, layout));
        let layouts = if template.is_along_k() { &[MatmulLayout::Nt][..] } else { &MatmulLayout::ALL };
        all.extend(layouts.iter().map(|&layout| of(layout)));
    }
    for layout in MatmulLayout::ALL {
        let templates = of_e4m3(variant).iter().filter(|template| layout == MatmulLayout::Nt || !template.is_along_k());
        let of = |template| (template, spec_of(&template, FactorFormat::E4M3, FactorFormat::E4M3, layout));
        all.extend(templates.map(|template| of(template.on(variant))));
    }
    // FP8 codes are contiguous along K.
    for template in of_blocks(variant, true).iter().map(|template| template.on(variant)) {
        all.push((template, spec_of(&template, FactorFormat::E4M3Block, FactorFormat::E4M3Block, MatmulLayout::Nt)));
    }
    for dtype in DType::ALL.into_iter().filter(|&dtype| has_instructions(dtype, variant)) {
        let aligned = if variant >= Variant::Sm80 { &[true, false][..] } else { &[true] };
        let templates = aligned.iter().flat_map(|&aligned| of_instructions(variant, aligned));
        for template in templates.map(|template| template.on(variant)) {
            let format = dtype.into();
            all.extend(MatmulLayout::ALL.map(|layout| (template, spec_of(&template, format, format, layout))));
        }
    }
    all.extend(GROUPED_TYPES.map(|[a, b]| (SIMT_ROWS, spec_of(&SIMT_ROWS, a, b, MatmulLayout::Any))));
    for dtype in DType::ALL.into_iter().filter(|&dtype| has_instructions(dtype, variant)) {
        let aligned = if variant >= Variant::Sm80 { &[true, false][..] } else { &[false] };
        let templates = aligned.iter().map(|&aligned| rows_of_instructions(variant, aligned).on(variant));
        all.extend(
            templates.map(|template| (template, spec_of(&template, dtype.into(), dtype.into(), MatmulLayout::Nt))),
        );
    }
    all
}

/// Types of A and B with row groups: those that
/// occur with gradients.
const GROUPED_TYPES: [[FactorFormat; 2]; 4] = {
    const fn plain(dtype: DType) -> FactorFormat {
        FactorFormat::Plain(dtype)
    }
    [
        [plain(DType::F32), plain(DType::F32)],
        [plain(DType::F16), plain(DType::F16)],
        [plain(DType::BF16), plain(DType::BF16)],
        [plain(DType::F16), plain(DType::F32)],
    ]
};

/// The matrix-instruction kernel for row groups.
fn rows_of_instructions(variant: Variant, aligned: bool) -> Template {
    if aligned && variant >= Variant::Sm80 { CP_ASYNC_ROWS } else { TWO_STAGE_ROWS }
}

/// Kernels for products with row groups.
fn of_rows(op: &CheckedMatmul, variant: Variant) -> Result<Vec<Template>, Unsupported> {
    let (a, b) = (op.a.dtype, op.b.dtype);
    if !GROUPED_TYPES.contains(&[a, b]) {
        let why = format!("multiplies groups of rows of plain numbers of one type, or f16 by f32, not {a} by {b}");
        return Err(Unsupported::new(why));
    }
    let has = a == b && a.plain().is_some_and(|dtype| has_instructions(dtype, variant));
    let aligned = op.a.aligned16 && op.b.aligned16;
    let of_instructions = (has && op.layout() == MatmulLayout::Nt).then(|| rows_of_instructions(variant, aligned));
    Ok(of_instructions.into_iter().chain([SIMT_ROWS]).collect())
}

/// Kernels of the family for `variant` in bundles.
/// Rare kernels are compiled on first use.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let copies = copies::sources(variant);
    let common = kernels(variant).into_iter().filter(|(_, spec)| !is_rare(spec));
    common.map(move |(template, spec)| source(&template, spec, variant)).chain(copies)
}

/// Whether a kernel is rare: a large tile of two
/// different types.
fn is_rare(spec: &MatmulSpec) -> bool {
    /// Rows of the smallest tile.
    const LEAST_ROWS: u32 = 64;
    spec.a != spec.b && spec.m > LEAST_ROWS
}

/// The kernel of an identity.
fn find(kernel: &KernelId) -> Option<(Template, MatmulSpec, Variant)> {
    let (Spec::Matmul(spec), Some(variant)) = (kernel.spec, kernel.variant) else { return None };
    let (template, _) = kernels(variant).into_iter().find(|(_, known)| *known == spec)?;
    Some((template, spec, variant))
}

/// `MatmulParams` in `sched/matmul_tile.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MatmulParams {
    shape: MatmulShape,
    types: MatmulTypes,
    tiles: MatmulTiles,
    at: MatmulPointers,
}

const _: () = assert!(size_of::<MatmulShape>().is_multiple_of(8), "pointers follow without a gap");

impl MatmulParams {
    /// Fills in the operands' addresses.
    fn at(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<Self, HalError> {
        use MatmulOperand as O;
        let mut params = *self;
        let pointers = [
            (&mut params.at.a, O::A),
            (&mut params.at.b, O::B),
            (&mut params.at.c, O::C),
            (&mut params.at.bias, O::Bias),
            (&mut params.at.d, O::D),
            (&mut params.at.workspace, O::Workspace),
            (&mut params.at.offsets, O::Offsets),
            (&mut params.at.a_scale, O::AScale),
            (&mut params.at.b_scale, O::BScale),
        ];
        at.fill(operands, pointers)?;
        Ok(params)
    }
}

impl Params for MatmulParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&self.at(operands, at)?))
    }
}

/// `MatmulParams` with block scales (`QG_BLOCK_SCALED`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct BlockScaledParams {
    of_all: MatmulParams,
    scales: MatmulScales,
}

/// Strides of the block scales of `op`.
fn scales(op: &CheckedMatmul) -> MatmulScales {
    MatmulScales { a_row: op.a_scale_row, b_row: op.b_scale_row }
}

impl Params for BlockScaledParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&Self { of_all: self.of_all.at(operands, at)?, ..*self }))
    }
}

/// M tiles, N tiles, and tiles of all products.
fn tiles(op: &CheckedMatmul, template: &Template) -> (u32, u32, u64) {
    let (along_m, along_n) = ((op.m as u32).div_ceil(template.m), (op.n as u32).div_ceil(template.n));
    (along_m, along_n, op.tiles(template.m, template.n))
}

fn params(op: &CheckedMatmul, template: &Template, plan: &MatmulPlan) -> MatmulParams {
    let flags = [
        (abi::FLAG_C, op.c.is_some()),
        (abi::FLAG_BIAS, op.bias.is_some()),
        (abi::FLAG_ACCUMULATES, op.accumulates),
        (abi::FLAG_SLOPE, op.slope),
        (abi::FLAG_K_GROUPED, op.k_grouped),
        (abi::FLAG_A_SCALE, op.a_scaled),
        (abi::FLAG_B_SCALE, op.b_scaled),
        (abi::FLAG_D_ALIGNED16, op.d.aligned16),
        (abi::FLAG_C_ALIGNED16, op.c.is_some_and(|c| c.aligned16)),
    ];
    let shape = MatmulShape {
        m: op.m as u32,
        n: op.n as u32,
        k: op.k as u32,
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        alpha: op.alpha,
        beta: op.beta,
    };
    let types = MatmulTypes {
        activation: activation_code(op.activation),
        d_dtype: dtype_code(op.d.dtype),
        c_dtype: op.c.map_or(0, |c| dtype_code(c.dtype)),
        bias_dtype: op.bias.map_or(0, dtype_code),
    };
    let (m_tiles, n_tiles, _) = tiles(op, template);
    // With row groups, the number of tiles is computed on the
    // device from the number of groups (`sched/matmul_rows.cuh`).
    let m_tiles = if op.rows_grouped { op.batch as u32 } else { m_tiles };
    let tiles = MatmulTiles {
        m_tiles,
        n_tiles,
        splits: plan.splits,
        k_tiles: (op.k as u32).div_ceil(template.k),
        a_aligned16: op.a.aligned16.into(),
        b_aligned16: op.b.aligned16.into(),
    };
    let at = MatmulPointers {
        partials: plan.workspace.partials as u64,
        a_row: op.a.row_stride,
        a_col: op.a.col_stride,
        a_batch: op.a.batch_stride,
        b_row: op.b.row_stride,
        b_col: op.b.col_stride,
        b_batch: op.b.batch_stride,
        c_row: op.c.map_or(0, |c| c.row_stride),
        c_batch: op.c.map_or(0, |c| c.batch_stride),
        d_row: op.d.row_stride,
        d_batch: op.d.batch_stride,
        ..MatmulPointers::default()
    };
    MatmulParams { shape, types, tiles, at }
}

/// Launch sequence of a plan. `make` prepares its kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the plan is of another
/// family, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedMatmul,
    plan: &MatmulPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    use MatmulOperand as O;
    let found = find(&plan.config.kernel);
    let (template, spec, variant) = found.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let (_, _, all_tiles) = tiles(op, &template);
    let work = all_tiles as u32 * plan.splits;
    let grid = if template.stays() {
        [work.min(info.units * template.ctas), 1, 1]
    } else {
        [all_tiles as u32, plan.splits, 1]
    };
    let geometry = Geometry { grid, threads: template.threads, shared_bytes: template.shared_bytes() };
    // Plans whose copies are too large do not exist.
    let copied = CopiedFactors::new(op, &template).ok().flatten();
    let multiplied = copied.map_or_else(|| op.clone(), |copied| copied.product(op));
    let params = params(&multiplied, &template, plan);
    let params: Arc<dyn Params> = match template.stays() {
        false if op.has_block_scales() => Arc::new(BlockScaledParams { of_all: params, scales: scales(op) }),
        true => Arc::new(MappedMatmul::new(params, &multiplied, &template, [all_tiles as u32, work])),
        false => Arc::new(params),
    };
    let launch = KernelLaunch {
        id: plan.config.kernel,
        spec: source(&template, spec, variant),
        geometry,
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: O::ALL,
        updated: None,
        params,
    };
    let copying = copied.map(|copied| copied.step(plan, variant, make)).transpose()?;
    let given = op.operands().into_iter().fold(launch.step::<O>(make)?, |step, operand| step.bind(operand, operand));
    let copies = copied.iter().flat_map(|copied| copied.places(plan));
    let given = copies.fold(given, |step, (factor, place)| step.bind_part(factor, O::Workspace, place));
    let step = match plan.workspace.partial_bytes {
        0 => given,
        bytes => given.bind_part(O::Workspace, O::Workspace, 0..plan.workspace.partials + bytes),
    };
    Ok(LaunchSequence::new::<O>(op.kernel_name(NAME), copying.into_iter().chain([step]).collect()))
}

impl Family<CheckedMatmul> for Matmul {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedMatmul, info: &DeviceInfo) -> Result<Vec<MatmulConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let (a, b) = (op.a.dtype, op.b.dtype);
        let aligned = op.a.aligned16 && op.b.aligned16;
        let of_f32: &[Template] = match op.operand_precision {
            XPrecision::Tf32 => of_tf32(variant, aligned),
            XPrecision::Bf16x3 => &[BF16X3, BF16X3_SMALL],
            _ => &[],
        };
        let of_instructions = match a {
            _ if a != b => &[],
            F32 if variant >= Variant::Sm80 => of_f32,
            FactorFormat::Plain(dtype) if has_instructions(dtype, variant) => of_instructions(variant, aligned),
            FactorFormat::E4M3 => of_e4m3(variant),
            FactorFormat::E4M3Block => of_blocks(variant, aligned),
            _ => &[],
        };
        let simt = match (a == b, a.has_scales()) {
            (_, true) => &[],
            (true, false) if a == F32 && aligned && variant >= Variant::Sm80 => &[FMA, SIMT, SIMT_SMALL][..],
            (_, false) => &[SIMT, SIMT_SMALL],
        };
        let templates: Vec<Template> = match op.rows_grouped {
            true => of_rows(op, variant)?,
            false => of_instructions.iter().chain(simt).copied().collect(),
        };
        let templates = templates.into_iter().map(|template| template.on(variant));
        let copied = |template: &Template| CopiedFactors::new(op, template);
        let takes = |template: &Template| match copied(template) {
            Ok(_) if !template.stays() => true,
            Ok(None) => tma::takes(op),
            Ok(Some(copied)) => tma::takes(&copied.product(op)),
            Err(TooLarge) => false,
        };
        let fitting = templates
            .filter(|template| template.shared_bytes() <= info.shared_bytes && tiles(op, template).2 <= MOST_TILES)
            .filter(|template| !op.k_grouped || template.may_group_k(&spec_of(template, a, b, op.layout())))
            .filter(|template| !template.stays() || tiles(op, template).2 <= MOST_TILES_OF_WORK)
            .filter(takes);
        let config = |template: Template| MatmulConfig {
            kernel: id(spec_of(&template, a, b, op.layout()), variant),
            math: template.math,
            tile_m: template.m,
            tile_n: template.n,
            tile_k: template.k,
            ctas_per_unit: template.ctas,
            max_splits: if template.groups_rows { 1 } else { MOST_SPLITS },
            efficiency: template.efficiency,
            factor_bytes: copied(&template).ok().flatten().map_or(0, |copied| copied.bytes()),
        };
        let configs: Vec<_> = fitting.map(config).collect();
        if configs.is_empty() {
            return Err(Unsupported::new(format!(
                "has at most {MOST_TILES} tiles of 128 x 128: make the batch smaller"
            )));
        }
        Ok(configs)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedMatmul, plan: &MatmulPlan) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedMatmul, config: &MatmulConfig) -> u64 {
        find(&config.kernel)
            .map_or(0, |(template, spec, variant)| source(&template, spec, variant).source_hash().short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_their_identities_and_fit_their_chips() {
        for variant in Variant::ALL {
            for (template, spec) in kernels(variant) {
                assert_eq!(find(&id(spec, variant)), Some((template, spec, variant)));
                // Turing's maximum, and half of the shared memory of newer chips.
                let most = match variant {
                    _ if template.stays() => 227 << 10,
                    Variant::Sm70 | Variant::Sm75 => 64 << 10,
                    _ => 80 << 10,
                };
                assert!(template.shared_bytes() <= most, "{variant}: {template:?}");
            }
        }
    }
}
