//! `dequantize`: dequantization of X for products that
//! do not support its format.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{XFactor, XFormat, XParts};
use qgemm_hal::abi::{DequantizePointers, DequantizeShape};
use qgemm_hal::{
    CheckedDequantize, DequantizeConfig, DequantizeOperand, DequantizePlan, DequantizeSpec, Device, DeviceInfo,
    Families, Family, Geometry, HalError, KernelId, LaunchSequence, Operand, Operands, Operation, Spec, Unsupported,
    Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use super::quantize::{code_number, factor_number, scale_number};
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "dequantize";
const ENTRY: &str = "entry/dequantize.cu";
const THREADS: usize = 256;
/// Columns per thread access, and accesses per thread.
const GROUP: usize = 4;
const TURNS: usize = 4;
/// Maximum CTAs along the grid's x axis, and maximum columns: kernels
/// count slightly beyond in 32 bits.
const MOST: usize = i32::MAX as usize;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 700;

/// Families of `dequantize`.
pub(super) const FAMILIES: Families<CheckedDequantize> = &[&Dequantize];

/// The kernel family.
#[derive(Debug)]
struct Dequantize;

fn id(spec: DequantizeSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Dequantize(spec))
}

/// Prelude constants that describe the format.
fn source(spec: DequantizeSpec, parts: &XParts, variant: Variant) -> KernelSpec {
    let prelude = Prelude {
        code: Some(code_number(parts)),
        scale: Some(scale_number(parts)),
        factor: Some(factor_number(parts)),
        block: Some(parts.block.unwrap_or(0) as u32),
        threads: Some(THREADS as u32),
        ..Prelude::of(variant)
    };
    KernelSpec {
        name: id(spec, variant).to_string(),
        entry: ENTRY,
        text: source::entry(ENTRY),
        symbol: "qg_dequantize",
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let of_format = move |from: XFormat| {
        let mut all: Vec<(XParts, DequantizeSpec)> = Vec::new();
        for parts in [false, true].into_iter().filter_map(|given| from.parts(given, None)) {
            let spec = DequantizeSpec { from, given_factor: parts.factor == XFactor::Given };
            if !all.iter().any(|(_, known)| *known == spec) {
                all.push((parts, spec));
            }
        }
        all
    };
    XFormat::ALL.into_iter().flat_map(of_format).map(move |(parts, spec)| source(spec, &parts, variant))
}

/// `DequantizeParams` of the entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct DequantizeParams {
    shape: DequantizeShape,
    at: DequantizePointers,
}

impl Params for DequantizeParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use DequantizeOperand as O;
        let mut params = *self;
        let pointers = [
            (&mut params.at.codes, O::Codes),
            (&mut params.at.scales, O::Scales),
            (&mut params.at.factors, O::Factors),
            (&mut params.at.d, O::D),
        ];
        at.fill(operands, pointers)?;
        params.shape.rows = operands.rows(self.shape.rows as usize) as u32;
        Ok(LaunchParams::of(&params))
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

/// CTAs of a row, and threads of each.
fn cut(op: &CheckedDequantize) -> (usize, usize) {
    let groups = op.d_columns() / GROUP;
    let threads = groups.next_multiple_of(32).min(THREADS);
    (groups.div_ceil(threads * TURNS), threads)
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedDequantize,
    _: &DequantizePlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let (spec, planes) = (DequantizeSpec::of(op), &op.planes);
    let (chunks, threads) = cut(op);
    let shape = DequantizeShape {
        rows: op.rows as u32,
        columns: op.d_columns() as u32,
        chunks: chunks as u32,
        ..DequantizeShape::default()
    };
    let at = DequantizePointers {
        codes_row: planes.codes_row,
        scales_row: planes.scales_row,
        ..DequantizePointers::default()
    };
    let launch = KernelLaunch {
        id: id(spec, variant),
        spec: source(spec, &planes.parts, variant),
        geometry: Geometry { grid: [(op.rows * chunks) as u32, 1, 1], threads: threads as u32, shared_bytes: 0 },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: DequantizeOperand::ALL,
        updated: None,
        params: Arc::new(DequantizeParams { shape, at }),
    };
    let step = launch.step::<DequantizeOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<DequantizeOperand>(format!("{NAME}_{}", op.format), vec![step]))
}

impl Family<CheckedDequantize> for Dequantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedDequantize, info: &DeviceInfo) -> Result<Vec<DequantizeConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if op.columns > MOST || op.rows.saturating_mul(cut(op).0) > MOST {
            return Err(Unsupported::new(format!("serves at most {MOST} columns, and as many rows times their CTAs")));
        }
        Ok(vec![DequantizeConfig { kernel: id(DequantizeSpec::of(op), variant), efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedDequantize,
        plan: &DequantizePlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedDequantize, config: &DequantizeConfig) -> u64 {
        match (config.kernel.spec, config.kernel.variant) {
            (Spec::Dequantize(spec), Some(variant)) => source(spec, &op.planes.parts, variant).source_hash().short(),
            _ => 0,
        }
    }
}
