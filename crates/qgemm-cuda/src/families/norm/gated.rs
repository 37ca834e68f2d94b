//! Norm kernels with a gate or groups of features, for operands of
//! any type and alignment.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{self, NormGatePointers};
use qgemm_hal::{
    CheckedNorm, Dense, DeviceInfo, GateFunction, HalError, KernelId, NormGate, NormGatedSpec, NormOperand, Operand,
    Operands, Spec, Variant,
};

use super::{ACCESS, GROUP, NAME, NormArguments, NormParams, STORAGE_BYTES, WARP, geometry, params, warps};
use crate::families::kernel_launch::{Addresses, KernelLaunch, Params};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// A kernel.
#[derive(Clone, Copy, Debug)]
struct Template {
    /// Groups that a thread keeps in registers; 0 for rows of any
    /// length.
    groups: u32,
    /// Maximum threads of a CTA.
    threads: u32,
    /// Resident CTAs per SM to demand of the compiler.
    least_ctas: u32,
}

/// Kernels, shortest rows first.
const TEMPLATES: [Template; 3] = [
    Template { groups: 1, threads: 128, least_ctas: 6 },
    Template { groups: 4, threads: 512, least_ctas: 1 },
    Template { groups: 0, threads: 512, least_ctas: 1 },
];

impl Template {
    /// The kernel for rows of `columns` columns, and the threads
    /// per row.
    fn of(columns: usize) -> (Self, u32) {
        let [one, four, any] = TEMPLATES;
        let groups = columns.div_ceil(GROUP);
        match groups {
            0..=32 => (one, (groups as u32).next_power_of_two()),
            33..=128 => (four, WARP),
            129..=2048 => (four, warps(groups, 4)),
            _ => (any, any.threads),
        }
    }

    fn id(&self, variant: Variant) -> KernelId {
        KernelId::new(NAME, Some(variant), Spec::NormGated(NormGatedSpec { groups: self.groups }))
    }

    fn source(&self, variant: Variant) -> KernelSpec {
        let (entry, symbol) = match self.groups {
            0 => ("entry/norm_gated_long_rows.cu", "qg_norm_gated_long_rows"),
            _ => ("entry/norm_gated_rows.cu", "qg_norm_gated_rows"),
        };
        let prelude = Prelude {
            threads: Some(self.threads),
            shared_bytes: Some(STORAGE_BYTES),
            groups: Some(self.groups).filter(|&groups| groups > 0),
            least_ctas: Some(self.least_ctas),
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

/// The kernel for `op`.
pub(super) fn id(op: &CheckedNorm, variant: Variant) -> KernelId {
    let of = op.of_groups();
    Template::of(of.columns.max(of.d_columns)).0.id(variant)
}

/// Source of the kernel; `None` if there is no such kernel.
pub(super) fn source(spec: NormGatedSpec, variant: Variant) -> Option<KernelSpec> {
    TEMPLATES.into_iter().find(|template| template.groups == spec.groups).map(|template| template.source(variant))
}

/// All kernels for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    TEMPLATES.into_iter().map(move |template| template.source(variant))
}

/// `NormGatedParams` in `epilogue/norm_gate.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct NormGatedParams {
    norm: NormParams,
    gate: NormGatePointers,
}

/// Kernel parameters, and the operand of each.
#[derive(Debug)]
struct Arguments {
    norm: NormArguments,
    gate: NormGatePointers,
    /// Whether groups of gamma and of beta are aligned, if the first is.
    aligned: [bool; 2],
}

impl Params for Arguments {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let mut norm = self.norm.at(operands, at)?;
        let of_columns = [abi::FLAG_GAMMA_ALIGNED16, abi::FLAG_BETA_ALIGNED16];
        for (flag, _) in of_columns.into_iter().zip(self.aligned).filter(|(_, is_aligned)| !is_aligned) {
            norm.shape.flags &= !flag;
        }
        let gate = NormGatePointers { z: at.of(operands, NormOperand::Gate)?, ..self.gate };
        Ok(LaunchParams::of(&NormGatedParams { norm, gate }))
    }
}

/// The launch of `op` on a device like `info`.
pub(super) fn launch(op: &CheckedNorm, variant: Variant, info: &DeviceInfo) -> KernelLaunch {
    let of = op.of_groups();
    // Groups begin at multiples of their columns.
    let whole = |bytes: usize| op.groups == 1 || (of.columns * bytes).is_multiple_of(ACCESS as usize);
    let rows = |dense: Dense| Dense { aligned16: dense.aligned16 && whole(dense.dtype.bytes()), ..dense };
    let of = CheckedNorm { x: rows(of.x), d: rows(of.d), ..of };
    let (template, row_threads) = Template::of(of.columns.max(of.d_columns));
    let (mut geometry, _) = geometry(&of, template.groups, row_threads, info);
    geometry.shared_bytes = STORAGE_BYTES;
    let mut params = params(&of, row_threads, 0);
    let mut gate = NormGatePointers { groups: op.groups as u64, ..NormGatePointers::default() };
    if let Some(NormGate { z, function, before }) = op.gate {
        gate.z_row = z.row_stride;
        let flags = [
            (abi::FLAG_GATE, true),
            (abi::FLAG_GATE_BEFORE, before),
            (abi::FLAG_GATE_ALIGNED, rows(z).aligned16),
            (abi::FLAG_SIGMOID, function == GateFunction::Sigmoid),
        ];
        params.shape.flags |= flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag);
    }
    let function = &op.function;
    let aligned = [function.gamma, function.beta].map(|dtype| dtype.is_some_and(|dtype| whole(dtype.bytes())));
    KernelLaunch {
        id: template.id(variant),
        spec: template.source(variant),
        geometry,
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: NormOperand::ALL,
        updated: None,
        params: Arc::new(Arguments { norm: NormArguments { op: *op, params }, gate, aligned }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_of_a_row_hold_all_of_it() {
        for columns in (1..20_000).chain([1 << 20, i32::MAX as usize]) {
            let (template, threads) = Template::of(columns);
            let held = (template.groups * threads) as usize * GROUP;
            assert!(template.groups == 0 || held >= columns, "{columns}: {template:?} with {threads}");
            assert!(threads <= template.threads && (threads.is_power_of_two() || threads.is_multiple_of(WARP)));
        }
    }
}
