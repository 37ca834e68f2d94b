//! `quantize`: quantization of activations (INT8, FP8, FP4). Formats
//! with block scales use several CTAs per row; formats with a
//! scale or factor per token use one.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{DType, ScaleType, XCode, XFactor, XFormat, XParts};
use qgemm_hal::abi::{self, QuantizePointers, QuantizeShape, dtype_code};
use qgemm_hal::{
    CheckedQuantize, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence, Operand,
    Operands, Operation, QuantizeConfig, QuantizeOperand, QuantizePlan, QuantizeSpec, Spec, Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "quantize";
/// Columns that a thread quantizes at once.
const GROUP: usize = 8;
/// Groups of each thread in kernels with block scales.
const TURNS: usize = 2;
/// Maximum CTAs along the grid's x axis.
const MOST_CTAS: usize = i32::MAX as usize;
/// Maximum columns: kernels count slightly beyond in 32 bits.
const MOST_COLUMNS: usize = 1 << 31;
/// Block length for formats without blocks: the columns of a warp.
const NO_BLOCK: usize = 256;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 700;

/// Families of `quantize`.
pub(super) const FAMILIES: Families<CheckedQuantize> = &[&Quantize];

/// The kernel family.
#[derive(Debug)]
struct Quantize;

/// A kernel, by the span of a scale.
#[derive(Clone, Copy, Debug)]
struct Template {
    entry: &'static str,
    symbol: &'static str,
    threads: u32,
    shared_bytes: u32,
}

/// Block scales, or no scales.
const BLOCKS: Template =
    Template { entry: "entry/quantize_blocks.cu", symbol: "qg_quantize_blocks", threads: 256, shared_bytes: 0 };
/// Token scales. Shared memory holds a word per warp,
/// and the row if it fits.
const TOKENS: Template =
    Template { entry: "entry/quantize_tokens.cu", symbol: "qg_quantize_tokens", threads: 512, shared_bytes: 64 };

impl Template {
    fn of(parts: &XParts) -> Self {
        let of_token = parts.factor == XFactor::PerToken || (parts.scale.is_some() && parts.block.is_none());
        if of_token { TOKENS } else { BLOCKS }
    }

    fn is_of_tokens(&self) -> bool {
        self.shared_bytes > 0
    }
}

fn id(spec: QuantizeSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Quantize(spec))
}

/// Number of a code type in kernels.
pub(super) fn code_number(parts: &XParts) -> u32 {
    match parts.code {
        XCode::Int8 => 0,
        XCode::E4M3 => 1,
        XCode::E2M1 => 2,
    }
}

/// Number of a scale type in kernels.
pub(super) fn scale_number(parts: &XParts) -> u32 {
    match parts.scale {
        None => 0,
        Some(ScaleType::E8M0) => 2,
        Some(ScaleType::E4M3) => 3,
        Some(_) => 1,
    }
}

/// Number of a factor source in kernels.
pub(super) fn factor_number(parts: &XParts) -> u32 {
    match parts.factor {
        XFactor::None => 0,
        XFactor::Given => 1,
        XFactor::PerToken => 2,
    }
}

/// Constants of `mainloop/quantize_codes.cuh` that describe the format.
pub(super) fn format_constants(variant: Variant, parts: &XParts) -> Prelude<'static> {
    Prelude {
        code: Some(code_number(parts)),
        scale: Some(scale_number(parts)),
        factor: Some(factor_number(parts)),
        block: Some(parts.block.unwrap_or(NO_BLOCK) as u32),
        sum_span: Some(parts.sum_span.unwrap_or(0) as u32),
        ..Prelude::of(variant)
    }
}

fn source(spec: QuantizeSpec, parts: &XParts, variant: Variant) -> KernelSpec {
    let template = Template::of(parts);
    let prelude = Prelude {
        x_dtype: Some(dtype_code(spec.x)),
        threads: Some(template.threads),
        shared_bytes: template.is_of_tokens().then_some(template.shared_bytes),
        ..format_constants(variant, parts)
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
    let of_parts = |(format, parts): (XFormat, XParts)| {
        let given_factor = parts.factor == XFactor::Given;
        let sum_span = parts.sum_span.unwrap_or(0) as u32;
        DType::ALL.map(|x| (parts, QuantizeSpec { x, to: format, given_factor, sum_span }))
    };
    all_parts().flat_map(of_parts).map(move |(parts, spec)| source(spec, &parts, variant))
}

/// All quantized formats with all combinations of planes: block sums of
/// 32 or 16 columns, and factors given or computed.
pub(super) fn all_parts() -> impl Iterator<Item = (XFormat, XParts)> {
    let choices = [(false, None), (false, Some(16)), (true, None)];
    XFormat::ALL.into_iter().flat_map(move |format| {
        let mut all: Vec<(XFormat, XParts)> = Vec::new();
        for parts in choices.into_iter().filter_map(|(given, span)| format.parts(given, span)) {
            if !all.contains(&(format, parts)) {
                all.push((format, parts));
            }
        }
        all
    })
}

/// `QuantizeParams` in `mainloop/quantize.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct QuantizeParams {
    shape: QuantizeShape,
    /// Pads the pointers to multiples of 8.
    reserved: u32,
    at: QuantizePointers,
}

impl Params for QuantizeParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use QuantizeOperand as O;
        let mut params = *self;
        let pointers = [
            (&mut params.at.x, O::X),
            (&mut params.at.factor, O::Factor),
            (&mut params.at.codes, O::Codes),
            (&mut params.at.scales, O::Scales),
            (&mut params.at.token_factors, O::TokenFactors),
            (&mut params.at.sums, O::Sums),
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
fn cut(op: &CheckedQuantize, template: &Template) -> (usize, u32) {
    let groups = op.parts.columns(op.columns) / GROUP;
    let threads = (groups.next_multiple_of(32)).min(template.threads as usize);
    if template.is_of_tokens() { (1, threads as u32) } else { (groups.div_ceil(threads * TURNS), threads as u32) }
}

/// The launch of `op` on a device like `info`.
fn launch(op: &CheckedQuantize, variant: Variant, info: &DeviceInfo) -> KernelLaunch {
    let spec = QuantizeSpec::of(op);
    let template = Template::of(&op.parts);
    let (chunks, threads) = cut(op, &template);
    let stored_columns = op.parts.columns(op.columns);
    let mut flags = if op.x.aligned16 { abi::FLAG_X_ALIGNED16 } else { 0 };
    let mut shared_bytes = template.shared_bytes;
    if template.is_of_tokens() {
        let with_row = stored_columns.saturating_mul(op.x.dtype.bytes()).saturating_add(shared_bytes as usize);
        if let Some(bytes) = u32::try_from(with_row).ok().filter(|&bytes| bytes <= info.shared_bytes) {
            flags |= abi::FLAG_ROW_IN_SHARED;
            shared_bytes = bytes;
        }
    }
    let shape = QuantizeShape {
        rows: op.rows as u32,
        columns: op.columns as u32,
        stored_columns: stored_columns as u32,
        flags,
        chunks: chunks as u32,
    };
    let at = QuantizePointers {
        x_row: op.x.row_stride,
        x_col: op.x.col_stride,
        codes_row: op.codes_row,
        scales_row: op.scales_row,
        sums_row: op.sums_row,
        ..QuantizePointers::default()
    };
    KernelLaunch {
        id: id(spec, variant),
        spec: source(spec, &op.parts, variant),
        geometry: Geometry { grid: [(op.rows * chunks) as u32, 1, 1], threads, shared_bytes },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: QuantizeOperand::ALL,
        updated: None,
        params: Arc::new(QuantizeParams { shape, reserved: 0, at }),
    }
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedQuantize,
    _: &QuantizePlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let step = launch(op, variant, info).step::<QuantizeOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<QuantizeOperand>(format!("quantize_{}_{}", op.x.dtype, op.format), vec![step]))
}

impl Family<CheckedQuantize> for Quantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedQuantize, info: &DeviceInfo) -> Result<Vec<QuantizeConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if op.columns >= MOST_COLUMNS {
            return Err(Unsupported::new(format!("serves rows below {MOST_COLUMNS} columns, not {}", op.columns)));
        }
        let (chunks, _) = cut(op, &Template::of(&op.parts));
        if op.rows.saturating_mul(chunks) > MOST_CTAS {
            return Err(Unsupported::new(format!("serves at most {} rows of so many columns", MOST_CTAS / chunks)));
        }
        Ok(vec![QuantizeConfig { kernel: id(QuantizeSpec::of(op), variant), efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedQuantize,
        plan: &QuantizePlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedQuantize, config: &QuantizeConfig) -> u64 {
        match (config.kernel.spec, config.kernel.variant) {
            (Spec::Quantize(spec), Some(variant)) => source(spec, &op.parts, variant).source_hash().short(),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::Dense;

    use super::*;

    #[test]
    fn every_column_is_some_threads() {
        for format in XFormat::ALL {
            let Some(parts) = format.parts(false, None) else { continue };
            for columns in [1, 31, 257, 4096, 7168, 100_001] {
                let x = Dense::rows_of(DType::F16, columns);
                let op =
                    CheckedQuantize { rows: 3, columns, x, format, parts, codes_row: 0, scales_row: 0, sums_row: 0 };
                let template = Template::of(&parts);
                let (chunks, threads) = cut(&op, &template);
                assert!(threads.is_multiple_of(32) && (32..=template.threads).contains(&threads), "{format}");
                let reach = chunks * threads as usize * GROUP * TURNS;
                assert!(template.is_of_tokens() || reach >= parts.columns(columns), "{format} {columns}");
            }
        }
    }
}
