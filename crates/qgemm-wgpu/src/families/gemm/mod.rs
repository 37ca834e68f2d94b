//! wgpu families of `gemm`, and shared code.

pub(crate) mod gemv;
pub(crate) mod gemv_int8;
pub(crate) mod int8;
mod kernel;
mod launches;
pub(crate) mod matrix;
mod parts;
pub(crate) mod simt;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, Format, XFormat};
use qgemm_hal::abi::GemmShape;
use qgemm_hal::{
    CheckedConvert, CheckedGemm, ConvertOperand, Dense, Device, DeviceInfo, Families, GemmOperand, HalError,
    LaunchPlan, LaunchSequence, LaunchStep, Math, Name, Schedule, TileConfig, Unsupported, XPrologue, XRegion,
};

use crate::device::shared_of;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{self, Part};
use crate::shared::Shared;
use crate::source_hash::hash_of;
use crate::weight_code::{CLASS, WeightCode};
use kernel::GemmKernel;
use launches::{Launch, Product};
pub(crate) use launches::{TILE_ROWS, x_matrix, x_scale_bytes};
use parts::{Phase, SUM_THREADS, most_splits, sums};

/// wgpu families of `gemm`.
pub(super) const FAMILIES: Families<CheckedGemm> =
    &[&gemv::Gemv, &simt::Gemm, &gemv_int8::GemvInt8, &int8::GemmInt8, &matrix::GemmMatrix];

/// Kernel interface: the operands of `shaders/params.wgsl`; D is the last.
pub(crate) const INTERFACE: Interface =
    Interface { name: "gemm", bindings: "rrrrrrrrw", params_bytes: size_of::<Params>() as u32 };

/// `Params` of `shaders/params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Params {
    pub shape: GemmShape,
    pub modes: u32,
    pub x_row: u32,
    pub x_col: u32,
    pub c_row: u32,
    pub d_row: u32,
    pub residual_row: u32,
    pub n_first: u32,
    pub x_base: u32,
    pub w_base: u32,
    pub row_scale_base: u32,
    pub k_order_base: u32,
    pub c_base: u32,
    pub bias_base: u32,
    pub token_scale_base: u32,
    pub residual_base: u32,
    pub d_base: u32,
}

/// Common parts of configs: tiles in a plain grid,
/// unrounded weights and f32 X.
const CONFIG: TileConfig = TileConfig {
    family: "",
    main_loop: Name::new(""),
    variant: None,
    math: Math::FmaF32,
    tile_n: 0,
    tile_m: 0,
    tile_k: 0,
    threads: 0,
    ctas_per_unit: 1,
    cluster: 1,
    schedule: Schedule::Grid,
    max_splits: 1,
    warps_n: 1,
    k_groups: 1,
    stages: 1,
    shared_bytes: 0,
    x_format: XFormat::Plain(DType::F32),
    x_prologue: None,
    rounded_weights: None,
    normalizes_x: false,
    efficiency: (0, 0),
};

/// The `configs` for an unquantized X, which kernels multiply unchanged.
pub(super) fn of_plain_x(
    op: &CheckedGemm,
    configs: impl Iterator<Item = TileConfig>,
) -> Result<impl Iterator<Item = TileConfig>, Unsupported> {
    let x_format = XFormat::Plain(op.plain_x()?.dtype);
    Ok(configs.map(move |config| TileConfig { x_format, ..config }))
}

/// The `configs`, unless there are none or their
/// kernels do not support `op`. The last one is the
/// smallest that fits the adapter.
fn served(
    op: &CheckedGemm,
    info: &DeviceInfo,
    configs: impl Iterator<Item = TileConfig>,
) -> Result<Vec<TileConfig>, Unsupported> {
    let configs: Vec<_> = configs.collect();
    let Some(config) = configs.last() else {
        return Err(Unsupported::new(format!("{} bytes of workgroup memory are too few", info.shared_bytes)));
    };
    if op.class != CLASS {
        return Err(Unsupported::new(format!("reads weights packed as {CLASS:?}, and these are {:?}", op.class)));
    }
    let mut row_major = op.outputs().map(|(_, _, d)| d).chain([op.c, op.residual].into_iter().flatten());
    if row_major.any(|dense| dense.col_stride != 1) {
        return Err(Unsupported::new("stores row-major D and reads row-major C and residuals"));
    }
    // The configs only differ in their tiles.
    let convert = converted(op, config)?;
    if let Some(convert) = &convert {
        super::convert::check(convert, info)?;
    }
    let multiplied = convert.map(|convert| op.after(&convert));
    let code = weight_code(op)?;
    let product = Product::new(multiplied.as_ref().unwrap_or(op), &code)?;
    Launch::of(&product, config, info.max_buffer_bytes)?;
    Ok(configs)
}

/// As [`served`], for kernels that also support split-K.
fn served_in_parts(
    op: &CheckedGemm,
    info: &DeviceInfo,
    configs: impl Iterator<Item = TileConfig>,
) -> Result<Vec<TileConfig>, Unsupported> {
    let mut configs = served(op, info, configs)?;
    let code = weight_code(op)?;
    let product = Product::new(op, &code)?;
    for config in &mut configs {
        let launches = Launch::of(&product, config, info.max_buffer_bytes)?;
        config.max_splits = most_splits(&product, config, &launches, info);
    }
    Ok(configs)
}

pub(super) fn weight_code(op: &CheckedGemm) -> Result<WeightCode, Unsupported> {
    weight_code_of(op.format)
}

/// Shader constants for decoding weights of `format`.
pub(super) fn weight_code_of(format: Format) -> Result<WeightCode, Unsupported> {
    if shader::dequant(format).is_none() {
        return Err(Unsupported::new(format!("there is no dequant/{}.wgsl", format.dequant)));
    }
    WeightCode::new(format).ok_or_else(|| Unsupported::new("reads codes of one or two planes"))
}

/// Compiles the family's `part` for `op` and computes all launch data.
/// `part` is `None` when the device lacks the plan's kernel.
fn prepare(
    device: &dyn Device,
    op: &CheckedGemm,
    plan: &LaunchPlan,
    part: impl FnOnce(&WeightCode, &Shared) -> Option<Part>,
) -> Result<LaunchSequence, HalError> {
    let info = device.info();
    let name = op.kernel_name(plan.config.family);
    let shared = shared_of(device, "a plan of the wgpu backend")?;
    let unsupported = |why| HalError::Unsupported { device: info.id, what: name.clone(), why };
    let typed = |reason: Unsupported| unsupported(reason.why);
    let code = weight_code(op).map_err(typed)?;
    let convert = op.x_prologue(plan).zip(plan.workspace.x);
    let multiplied = convert.map(|(convert, _)| op.after(&convert));
    let product = Product::new(multiplied.as_ref().unwrap_or(op), &code).map_err(typed)?;
    let launches = Launch::of(&product, &plan.config, info.max_buffer_bytes).map_err(typed)?;
    let part = part(&code, shared).ok_or_else(|| unsupported("the plan is another device's".to_owned()))?;
    let threads = part.threads;
    let x_factor = convert.is_some_and(|(convert, _)| convert.row_factors);
    let kernel = |phase: Phase| {
        let shader = match phase {
            Phase::Whole => shader::compose(op.format, &code, &part),
            Phase::Parts(_) => shader::compose_part_of_k(op.format, &code, &part),
            Phase::Sum(_) => shader::compose_gemm_sum(SUM_THREADS),
        };
        let compiled = Compiled::new(shared, &INTERFACE, name.clone(), shader)?;
        Ok::<_, HalError>(GemmKernel::new(compiled, shared.clone(), &product, plan, x_factor, &launches, phase))
    };
    let mut steps = Vec::new();
    if let Some((convert, x)) = convert {
        steps.push(prologue(super::convert::step(device, &convert)?, op, x));
    }
    match plan.splits {
        0 | 1 => steps.push(kernel(Phase::Whole)?.step(plan, threads, convert.map(|(_, x)| x))),
        splits => {
            if launches.len() != 1 || splits > most_splits(&product, &plan.config, &launches, info) {
                return Err(unsupported(format!("K is not cut into {splits} parts here")));
            }
            let sums = sums(op, plan);
            steps.push(kernel(Phase::Parts(splits))?.step_of_parts(plan, threads, sums.clone()));
            steps.push(kernel(Phase::Sum(splits))?.step_of_sums(plan, sums));
        }
    }
    Ok(LaunchSequence::new::<GemmOperand>(name, steps))
}

/// The X prologue of plans with `config`, if any.
fn converted(op: &CheckedGemm, config: &TileConfig) -> Result<Option<CheckedConvert>, Unsupported> {
    let Some(XPrologue::Convert { row_factors }) = config.x_prologue else { return Ok(None) };
    let x = op.plain_x()?;
    let d_columns = op.stored_k.next_multiple_of(config.tile_k as usize);
    let d = Dense::rows_of(config.x_format.plain().unwrap_or(x.dtype), d_columns);
    Ok(Some(CheckedConvert { rows: op.m, columns: op.k, d_columns, x, d, gathers: op.k_order, row_factors }))
}

/// Binds the conversion `step` to X of `op`, and to the
/// region `x` of the workspace.
fn prologue(step: LaunchStep, op: &CheckedGemm, x: XRegion) -> LaunchStep {
    use ConvertOperand as C;
    let step = step.bind(C::X, GemmOperand::X).bind_part(C::D, GemmOperand::Workspace, x.x_of(op.m));
    let step = if op.k_order { step.bind(C::Order, GemmOperand::KOrder) } else { step };
    match x.factors_of(op.m) {
        Some(factors) => step.bind_part(C::RowFactors, GemmOperand::Workspace, factors),
        None => step,
    }
}

/// Hash of the sources that a family composes with `own`.
pub(super) fn source_hash(own: &[&'static str]) -> u64 {
    hash_of(shader::common_texts().chain(own.iter().copied()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use qgemm_hal::{Operands, WorkspaceLayout};

    use super::*;
    use crate::adapter::open_for_test;

    #[test]
    fn configurations_have_identities_of_their_own() {
        let all = [gemv::CONFIGS, simt::CONFIGS, gemv_int8::CONFIGS, int8::CONFIGS, matrix::CONFIGS];
        let mut seen = HashSet::new();
        for config in all.into_iter().flatten() {
            let id = config.kernel_id("q4_0".parse().expect("a format"));
            assert_eq!(id.to_string().parse(), Ok(id));
            assert!(seen.insert(id), "{id} twice");
        }
    }

    #[test]
    fn hashes_tell_families_apart() {
        let op = launches::tests::op(1, 64, 64);
        let hashes: HashSet<u64> = FAMILIES.iter().map(|family| family.source_hash(&op, &CONFIG)).collect();
        assert_eq!(hashes.len(), FAMILIES.len());
    }

    #[test]
    fn the_prologue_writes_x_and_factors_into_the_workspace() {
        let Some(device) = open_for_test() else { return };
        let (m, k) = (3, 40);
        let x = Dense { row_stride: 1, col_stride: m as u64, aligned16: false, ..Dense::rows_of(DType::F32, k) };
        let op = CheckedGemm { x: x.into(), ..launches::tests::op(m, 64, k) };
        let x_prologue = Some(XPrologue::Convert { row_factors: true });
        let config = TileConfig { x_prologue, ..matrix::CONFIGS[4] };
        let layout = WorkspaceLayout::split(1, 0, 0).and_then(|layout| layout.with_x(&config, 1, 1)).expect("small");
        let region = layout.x.expect("asked for");
        let convert = converted(&op, &config).expect("plain").expect("asked for");
        assert_eq!((convert.d_columns, convert.d.row_stride as usize), (region.columns, region.columns));

        let step = prologue(super::super::convert::step(&*device, &convert).expect("served"), &op, region);
        let sequence = LaunchSequence::new::<GemmOperand>("test", vec![step]);
        let values: Vec<f32> = (0..m * k).map(|i| i as f32).collect();
        let stream = device.default_stream();
        let mut x = device.allocate(values.len() * 4, "x").expect("small");
        device.upload(&stream, &DType::F32.encode(&values), (&mut x).into()).expect("fits");
        let mut workspace = device.allocate(layout.bytes, "workspace").expect("small");
        device.fill(&stream, (&mut workspace).into(), 0xff).expect("fits");
        let mut operands = Operands::new();
        operands.read(GemmOperand::X, (&x).into());
        operands.write(GemmOperand::Workspace, (&mut workspace).into());
        sequence.run(&stream, operands).expect("launches");

        let mut bytes = vec![0; layout.bytes];
        device.download(&stream, (&workspace).into(), &mut bytes).expect("fits");
        let factors = region.factors_of(m).expect("asked for");
        let inverse = DType::F32.decode(&bytes[factors.clone()]);
        let got = DType::F16.decode(&bytes[region.x_of(m)]);
        for (i, got) in got.iter().enumerate() {
            let (row, column) = (i / region.columns, i % region.columns);
            let expected = if column < k { values[column * m + row] } else { 0.0 };
            assert_eq!(got * inverse[row], expected, "X[{row}, {column}]");
        }
        assert!(bytes[..region.x].iter().chain(&bytes[factors.end..]).all(|&byte| byte == 0xff), "wrote elsewhere");
        assert!(bytes[region.x_of(m).end..factors.start].iter().all(|&byte| byte == 0xff), "wrote behind X");
    }
}
