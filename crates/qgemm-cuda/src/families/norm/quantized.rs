//! Norm kernels with a quantized result. Each format has one kernel
//! for rows in registers and one for rows of any length.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::XParts;
use qgemm_hal::abi::QuantizePointers;
use qgemm_hal::{
    CheckedNorm, DeviceInfo, HalError, KernelId, NormOperand, NormQuantizeSpec, Operand, Operands, QuantizedD, Spec,
    Variant, XPlanes,
};

use super::{GROUP, NAME, NormArguments, NormParams, SHARED_CTA, STORAGE_BYTES, WARP, geometry, params, warps};
use crate::families::kernel_launch::{Addresses, KernelLaunch, Params};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::families::quantize::{all_parts, format_constants};
use crate::source;
use crate::spec::KernelSpec;

/// Groups per thread in the kernel for rows in registers.
const GROUPS: u32 = 2;
/// Maximum threads of a CTA, with 64 registers each.
const THREADS: u32 = 1024;
/// Maximum groups of a row in registers.
const MOST_GROUPS: usize = (GROUPS * THREADS) as usize;

/// Groups per thread for a row of `stored_columns` columns (0 for
/// long rows), and threads per row: whole warps, because lanes
/// that share a scale use shuffles.
fn cut(stored_columns: usize) -> (u32, u32) {
    let groups = stored_columns.div_ceil(GROUP);
    match groups {
        0..=MOST_GROUPS => (GROUPS, warps(groups, GROUPS as usize).max(WARP)),
        _ => (0, THREADS),
    }
}

/// The kernel for `op`.
pub(super) fn id(op: &CheckedNorm, quantized: &QuantizedD, variant: Variant) -> KernelId {
    let (groups, _) = cut(op.d_columns);
    KernelId::new(NAME, Some(variant), Spec::NormQuantize(NormQuantizeSpec::new(groups, quantized)))
}

/// Source of the kernel; `None` for an unquantized format.
pub(super) fn source(spec: NormQuantizeSpec, variant: Variant) -> Option<KernelSpec> {
    spec.parts().map(|parts| source_of(spec, &parts, variant))
}

fn source_of(spec: NormQuantizeSpec, parts: &XParts, variant: Variant) -> KernelSpec {
    let (entry, symbol) = match spec.groups {
        0 => ("entry/norm_quantize_long_rows.cu", "qg_norm_quantize_long_rows"),
        _ => ("entry/norm_quantize_rows.cu", "qg_norm_quantize_rows"),
    };
    let of_token = parts.scale.is_some() && parts.block.is_none();
    let prelude = Prelude {
        threads: Some(THREADS),
        shared_bytes: Some(STORAGE_BYTES),
        groups: (spec.groups > 0).then_some(spec.groups),
        scale_of_token: Some(of_token.into()),
        ..format_constants(variant, parts)
    };
    KernelSpec {
        name: KernelId::new(NAME, Some(variant), Spec::NormQuantize(spec)).to_string(),
        entry,
        text: source::entry(entry),
        symbol,
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    all_parts().flat_map(move |(format, parts)| {
        let planes = XPlanes { parts, codes_row: 0, scales_row: 0, sums_row: 0 };
        let spec = move |groups| NormQuantizeSpec::new(groups, &QuantizedD { format, planes });
        [GROUPS, 0].map(|groups| source_of(spec(groups), &parts, variant))
    })
}

/// `NormQuantizeParams` in `mainloop/norm_quantize.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct NormQuantizeParams {
    norm: NormParams,
    to: QuantizePointers,
}

/// Kernel parameters, and the operand of each.
#[derive(Debug)]
struct Arguments {
    norm: NormArguments,
    to: QuantizePointers,
}

impl Params for Arguments {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use NormOperand as O;
        let mut to = self.to;
        let pointers = [
            (&mut to.factor, O::Factor),
            (&mut to.codes, O::Codes),
            (&mut to.scales, O::Scales),
            (&mut to.token_factors, O::TokenFactors),
            (&mut to.sums, O::Sums),
        ];
        at.fill(operands, pointers)?;
        Ok(LaunchParams::of(&NormQuantizeParams { norm: self.norm.at(operands, at)?, to }))
    }
}

/// The launch of `op` on a device like `info`.
pub(super) fn launch(op: &CheckedNorm, quantized: &QuantizedD, variant: Variant, info: &DeviceInfo) -> KernelLaunch {
    let (groups, row_threads) = cut(op.d_columns);
    let (geometry, kept_columns) = geometry(op, groups, row_threads, info);
    let XPlanes { parts, codes_row, scales_row, sums_row } = quantized.planes;
    let spec = NormQuantizeSpec::new(groups, quantized);
    KernelLaunch {
        id: id(op, quantized, variant),
        spec: source_of(spec, &parts, variant),
        geometry,
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: NormOperand::ALL,
        updated: None,
        params: Arc::new(Arguments {
            norm: NormArguments { op: *op, params: params(op, row_threads, kept_columns) },
            to: QuantizePointers { codes_row, scales_row, sums_row, ..QuantizePointers::default() },
        }),
    }
}

const _: () = assert!(SHARED_CTA.is_multiple_of(WARP) && SHARED_CTA <= THREADS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_warps_hold_all_of_a_row() {
        for columns in (1..20_000).chain([1 << 20]) {
            let (groups, threads) = cut(columns);
            assert!(threads.is_multiple_of(WARP) && (WARP..=THREADS).contains(&threads), "{columns}");
            assert!(groups == 0 || (groups * threads) as usize * GROUP >= columns, "{columns}");
        }
        assert_eq!([32, 512, 513, 16_384, 16_385].map(cut), [(2, 32), (2, 32), (2, 64), (2, 1024), (0, 1024)]);
    }
}
