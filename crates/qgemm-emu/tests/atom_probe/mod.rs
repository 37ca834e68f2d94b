//! Probes: each runs one atom on the registers of a warp or warpgroup, from the same
//! source on a GPU and in the emulator.

mod inputs;
mod run;

use std::fmt::Write;

use bytemuck::{Pod, Zeroable};
use qgemm_cuda::{Geometry, KernelSpec, Target};
use qgemm_hal::Variant;

pub use inputs::{Kind, fill, sums_are_exact};
pub use run::{on_emulator, on_gpu};

/// Lanes of a warp, and of a warpgroup.
pub const LANES: usize = 32;
const WARPGROUP_LANES: usize = 128;
/// Shared memory in bytes: 16 per lane of a warp. A warpgroup has two tiles of
/// 64 rows, aligned to 1024.
const WARP_BYTES: usize = LANES * 16;
const WARPGROUP_BYTES: usize = 2 * 64 * 128 + 1024;

/// Atom with the inputs and outputs of its probe.
#[derive(Debug)]
pub struct Probe {
    /// Atom name. Its probe is `probe_<name>` in `kernels/atom_probe.cu`.
    pub name: &'static str,
    /// First variant that has the atom.
    pub variant: Variant,
    /// Kinds of input words per lane, with counts.
    pub inputs: &'static [(Kind, usize)],
    /// Output words per lane.
    pub words_out: usize,
}

impl Probe {
    /// Input words per lane.
    pub fn words_in(&self) -> usize {
        self.inputs.iter().map(|&(_, words)| words).sum()
    }

    /// Lanes that execute the atom together: a warpgroup for Hopper's.
    pub fn lanes(&self) -> usize {
        lanes(self.variant)
    }

    /// Index in the kernel of its variant.
    pub fn number(&self) -> usize {
        let mut of_variant = PROBES.iter().filter(|p| p.variant == self.variant);
        of_variant.position(|p| p.name == self.name).expect("it is one of the list")
    }

    /// Kernel parameter for these addresses.
    pub fn params(&self, inputs: u64, outputs: u64) -> Params {
        Params { inputs, outputs, probe: self.number() as u32, reserved: 0 }
    }
}

/// Kernel parameter (`AtomProbe` in `kernels/atom_probe.cu`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Params {
    inputs: u64,
    outputs: u64,
    probe: u32,
    reserved: u32,
}

/// Launch geometry for `cases` of `probe`.
pub fn geometry(probe: &Probe, cases: usize) -> Geometry {
    let shared_bytes = if probe.lanes() == LANES { WARP_BYTES } else { WARPGROUP_BYTES };
    Geometry { grid: [cases as u32, 1, 1], threads: probe.lanes() as u32, shared_bytes: shared_bytes as u32 }
}

fn lanes(variant: Variant) -> usize {
    if variant == Variant::Sm90 { WARPGROUP_LANES } else { LANES }
}

/// Variants with probes.
pub fn variants() -> Vec<Variant> {
    let mut variants: Vec<_> = PROBES.iter().map(|p| p.variant).collect();
    variants.dedup();
    variants
}

/// PTX of the variant's chip, which newer GPUs run. Hopper's needs its own chip.
pub fn target(variant: Variant) -> Target {
    Target::Ptx { arch: variant.number(), specific: variant == Variant::Sm90 }
}

/// Kernel with all probes of `variant`.
pub fn spec(variant: Variant) -> KernelSpec {
    let (number, lanes) = (variant.number(), lanes(variant));
    let mut prelude = format!("#define QG_VARIANT {number}\n#define QG_LANES {lanes}\n#define QG_PROBES(PROBE)");
    for probe in PROBES.iter().filter(|p| p.variant == variant) {
        let (number, name) = (probe.number(), probe.name);
        write!(prelude, " PROBE({number}, {}, {}, {name})", probe.words_in(), probe.words_out).expect("a string");
    }
    prelude.push('\n');
    KernelSpec {
        name: format!("atom_probe_{variant}"),
        entry: "atom_probe.cu",
        text: include_str!("../kernels/atom_probe.cu"),
        symbol: "atom_probe",
        prelude,
        arch_specific: variant == Variant::Sm90,
    }
}

const fn probe(name: &'static str, variant: Variant, inputs: &'static [(Kind, usize)], words_out: usize) -> Probe {
    Probe { name, variant, inputs, words_out }
}

use Kind::{AnyF16, AnyF32, Below, Bf16, Bits, E4m3, E5m2, F16, F32, S8};
use Variant::{Sm70, Sm75, Sm80, Sm89, Sm90};

/// All atoms that compute or move registers, by variant.
pub static PROBES: &[Probe] = &[
    probe("mma_m8n8k4_f16", Sm70, &[(F16, 2), (F16, 2), (F32, 8)], 8),
    probe("shfl_xor", Sm70, &[(AnyF32, 1), (Below(32), 1)], 1),
    probe("shfl_xor_u32", Sm70, &[(Bits, 1), (Below(32), 1)], 1),
    probe("shfl_idx_u32", Sm70, &[(Bits, 1), (Below(64), 1)], 1),
    probe("ballot", Sm70, &[(Bits, 1)], 1),
    probe("match_any", Sm70, &[(Below(9), 1)], 1),
    probe("prmt", Sm70, &[(Bits, 3)], 1),
    probe("and_or", Sm70, &[(Bits, 3)], 1),
    probe("dp4a", Sm70, &[(S8, 1), (S8, 1), (Bits, 1)], 1),
    probe("sub_f16x2", Sm70, &[(AnyF16, 2)], 1),
    probe("mul_f16x2", Sm70, &[(AnyF16, 2)], 1),
    probe("fma_f16x2", Sm70, &[(AnyF16, 3)], 1),
    probe("f16_to_f32", Sm70, &[(AnyF16, 1)], 1),
    probe("f32_to_f16", Sm70, &[(AnyF32, 1)], 1),
    probe("bf16_to_f32", Sm70, &[(Bits, 1)], 1),
    probe("f32_to_bf16", Sm70, &[(AnyF32, 1)], 1),
    probe("e4m3_to_f32", Sm70, &[(Bits, 1)], 1),
    probe("mma_m16n8k8_f16", Sm75, &[(F16, 2), (F16, 1), (F32, 4)], 4),
    probe("mma_m8n8k16_s8", Sm75, &[(S8, 1), (S8, 1), (Bits, 2)], 2),
    probe("ldmatrix_x1", Sm75, &[(Bits, 4), (Below(32), 1)], 1),
    probe("ldmatrix_x2", Sm75, &[(Bits, 4), (Below(32), 1)], 2),
    probe("ldmatrix_x4", Sm75, &[(Bits, 4), (Below(32), 1)], 4),
    probe("ldmatrix_x1_trans", Sm75, &[(Bits, 4), (Below(32), 1)], 1),
    probe("ldmatrix_x2_trans", Sm75, &[(Bits, 4), (Below(32), 1)], 2),
    probe("ldmatrix_x4_trans", Sm75, &[(Bits, 4), (Below(32), 1)], 4),
    probe("mma_m16n8k16_f16", Sm80, &[(F16, 4), (F16, 2), (F32, 4)], 4),
    probe("mma_m16n8k16_bf16", Sm80, &[(Bf16, 4), (Bf16, 2), (F32, 4)], 4),
    probe("mma_m16n8k8_tf32", Sm80, &[(F32, 4), (F32, 2), (F32, 4)], 4),
    probe("mma_m16n8k16_s8", Sm80, &[(S8, 2), (S8, 1), (Bits, 4)], 4),
    probe("mma_m16n8k32_s8", Sm80, &[(S8, 4), (S8, 2), (Bits, 4)], 4),
    probe("redux_add", Sm80, &[(Bits, 1)], 1),
    probe("redux_max_u32", Sm80, &[(Bits, 1)], 1),
    probe("f32_to_bf16x2", Sm80, &[(AnyF32, 2)], 1),
    probe("cp_async_4", Sm80, &[(Below(5), 1), (Bits, 7)], 1),
    probe("cp_async_8", Sm80, &[(Below(9), 1), (Bits, 7)], 2),
    probe("cp_async_16", Sm80, &[(Below(17), 1), (Bits, 7)], 4),
    probe("mma_m16n8k32_e4m3", Sm89, &[(E4m3, 4), (E4m3, 2), (F32, 4)], 4),
    probe("mma_m16n8k32_e5m2", Sm89, &[(E5m2, 4), (E5m2, 2), (F32, 4)], 4),
    probe("mma_m16n8k32_e4m3_e5m2", Sm89, &[(E4m3, 4), (E5m2, 2), (F32, 4)], 4),
    probe("cvt_f16x2_e4m3x2", Sm89, &[(Bits, 1)], 1),
    probe("cvt_f16x2_e5m2x2", Sm89, &[(Bits, 1)], 1),
    probe("cvt_e4m3x2_f32", Sm89, &[(AnyF32, 2)], 1),
    probe("cvt_e5m2x2_f32", Sm89, &[(AnyF32, 2)], 1),
    probe("wgmma_k16_f16", Sm90, &[(F16, 4), (F16, 8), (F32, 4)], 4),
    probe("wgmma_k16_bf16", Sm90, &[(Bf16, 4), (Bf16, 8), (F32, 4)], 4),
    probe("wgmma_k32_e4m3_e4m3", Sm90, &[(E4m3, 4), (E4m3, 8), (F32, 4)], 4),
    probe("wgmma_k32_e4m3_e5m2", Sm90, &[(E4m3, 4), (E5m2, 8), (F32, 4)], 4),
    probe("wgmma_k32_s8_u8", Sm90, &[(S8, 4), (S8, 8), (Bits, 4)], 4),
    probe("wgmma_k32_s8_s8", Sm90, &[(S8, 4), (S8, 8), (Bits, 4)], 4),
    probe("wgmma_shared_k32_e4m3", Sm90, &[(E4m3, 4), (E4m3, 8), (F32, 4)], 4),
];
