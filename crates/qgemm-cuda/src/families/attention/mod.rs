//! Attention families: FMA for few queries with all types and chips
//! (`simt`); matrix instructions for many queries (`wgmma` on
//! Hopper, `cp_async` from Ampere on, `mma`), and for few queries
//! whose heads share a KV head (`decode`).

mod cp_async;
mod decode;
mod decode_pairs;
mod dequantized;
mod mma;
pub(super) mod params;
mod simt;
mod tile_lists;
mod wgmma;

use qgemm_hal::{
    AttentionConfig, AttentionPlan, AttentionSpec, CheckedAttention, DeviceInfo, Families, HalError, KernelId,
    LaunchSequence, Math, Name, Spec, Unsupported, Variant,
};

use self::dequantized::Dequantized;
use super::kernel_launch::{MakeKernel, unknown_family};
use crate::spec::KernelSpec;

/// Families of CUDA devices.
pub(super) const FAMILIES: Families<CheckedAttention> = &[
    &simt::AttentionSimt,
    &mma::AttentionMma,
    &decode::AttentionDecode,
    &cp_async::AttentionCpAsync,
    &wgmma::AttentionWgmma,
];

/// Algorithm of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    Simt,
    Mma,
    Decode,
    CpAsync,
    Wgmma,
}

impl Algorithm {
    const ALL: [Self; 5] = [Self::Simt, Self::Mma, Self::Decode, Self::CpAsync, Self::Wgmma];

    /// The family's name.
    const fn name(self) -> &'static str {
        match self {
            Self::Simt => simt::NAME,
            Self::Mma => mma::NAME,
            Self::Decode => decode::NAME,
            Self::CpAsync => cp_async::NAME,
            Self::Wgmma => wgmma::NAME,
        }
    }

    /// The algorithm of a kernel of these families.
    fn of(kernel: &KernelId) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| kernel.family == Name::new(algorithm.name()))
    }
}

/// From this many queries on, prefill kernels are used. Batch-invariant
/// results also switch here to matrix instructions.
const LEAST_QUERIES: usize = 17;

/// `TileBits` of `attention/mask_tile.cuh`
/// for `warps` warps: two words for each warp, and one
/// word of 32 keys for each row.
fn tile_bits_bytes(spec: &AttentionSpec, warps: u32) -> u32 {
    (warps * 2 + spec.rows * (spec.keys / 32)) * 4
}

/// Whether bundles have the kernels of a head dimension. Others are
/// compiled on first use.
const fn is_common(dim: u32) -> bool {
    dim <= 256
}

/// Values of the axes that double a kernel: whether there is a
/// mask, and whether scores are bounded.
const MASKED_AND_BOUNDED: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// Whether scores are not the product times a positive factor: with
/// a soft cap, or a negative or zero scale.
fn is_bounded(op: &CheckedAttention) -> bool {
    op.soft_cap.is_some() || op.scale <= 0.0
}

/// Computed rows and features divided by the real ones.
fn padding(op: &CheckedAttention, spec: &AttentionSpec) -> f64 {
    let rows = op.most_queries().next_multiple_of(spec.rows as usize) as f64 / op.most_queries() as f64;
    rows * f64::from(spec.qk + spec.v) / (op.qk_dim + op.v_dim) as f64
}

/// As [`padding`], of CTAs with slices of the value features. Each
/// multiplies queries and keys.
fn padding_of_slices(op: &CheckedAttention, spec: &AttentionSpec, slice: u32) -> f64 {
    let slices = op.v_dim.div_ceil(slice as usize) as u32;
    padding(op, &AttentionSpec { qk: slices * spec.qk, v: slices * slice, ..*spec })
}

/// Config of a matrix-instruction kernel without split-KV: one launch.
fn one_launch(
    op: &CheckedAttention,
    kernel: KernelId,
    spec: &AttentionSpec,
    efficiency: (u32, u32),
) -> AttentionConfig {
    AttentionConfig {
        kernel,
        launches: 1,
        parts: 1,
        part_keys: op.most_keys as u32,
        workspace_bytes: 0,
        dequantized_bytes: 0,
        math: Math::TensorF16,
        padding: padding(op, spec),
        efficiency,
    }
}

/// Hash of a config's single source, and of the launch that
/// dequantizes in front.
fn source_hash(config: &AttentionConfig, source: impl Fn(AttentionSpec, Variant) -> KernelSpec) -> u64 {
    let (Spec::Attention(spec), Some(variant)) = (config.kernel.spec, config.kernel.variant) else { return 0 };
    let attend = source(spec, variant).source_hash().short();
    match config.dequantized_bytes {
        0 => attend,
        _ => attend ^ dequantized::source(variant).source_hash().short().rotate_left(13),
    }
}

/// All kernels of these families for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    simt::specs(variant)
        .chain(mma::specs(variant))
        .chain(decode::specs(variant))
        .chain(cp_async::specs(variant))
        .chain(wgmma::specs(variant))
        .chain([dequantized::source(variant)])
}

/// Heads whose queries are processed together by `ctas` CTAs, with
/// `of_head` items for each head.
///
/// Few enough that their keys stay in L2. Enough that each
/// CTA gets at least two items, a long and a short
/// one, and that few CTAs idle in a group's last round.
fn heads_together(heads: usize, of_head: u32, ctas: u32) -> u32 {
    let (of_head, ctas) = (u64::from(of_head.max(1)), u64::from(ctas.max(1)));
    let all = heads as u64;
    let rounds = |heads: u64| (heads * of_head).div_ceil(ctas);
    let rounds_by = |heads: u64| all / heads * rounds(heads) + rounds(all % heads);
    // Nearly two rounds suffice.
    let are_enough = |heads: u64| 20 * heads * of_head >= 37 * ctas;
    let candidates = || (1..all).filter(|&heads| are_enough(heads)).chain([all]);
    let least = candidates().map(rounds_by).min().unwrap_or(0);
    let together = candidates().find(|&heads| 33 * rounds_by(heads) <= 34 * least);
    together.unwrap_or(all) as u32
}

/// Whether the family `name` may run `op` when batch invariance is required. Exactly
/// one family may, chosen independently of the batch.
fn check_invariant(name: &str, op: &CheckedAttention, info: &DeviceInfo) -> Result<(), Unsupported> {
    if !op.batch_invariant {
        return Ok(());
    }
    let chosen = match op.most_queries() >= LEAST_QUERIES {
        false if decode::spec_of(op, info).is_ok() => Algorithm::Decode,
        true if wgmma::spec_of(op, info).is_ok() => Algorithm::Wgmma,
        true if cp_async::spec_of(op, info).is_ok() => Algorithm::CpAsync,
        true if mma::spec_of(op, info).is_ok() => Algorithm::Mma,
        _ => Algorithm::Simt,
    };
    match name == chosen.name() {
        true => Ok(()),
        false => Err(Unsupported::new(format!("leaves bits that may not depend on the batch to {}", chosen.name()))),
    }
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, [`HalError::KernelUnavailable`] when the plan is of
/// another backend's family, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedAttention,
    plan: &AttentionPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    if plan.config.dequantized_bytes > 0
        && let Ok(Some(dequantized)) = Dequantized::of(op)
    {
        return dequantized::sequence(op, &dequantized, plan, info, variant, make, |op, plan, make| {
            sequence(op, plan, info, make)
        });
    }
    match Algorithm::of(&plan.config.kernel) {
        Some(Algorithm::Mma) => mma::sequence(op, &plan.config, variant, make),
        Some(Algorithm::Wgmma) => wgmma::sequence(op, &plan.config, info, variant, make),
        Some(Algorithm::CpAsync) => cp_async::sequence(op, &plan.config, info, variant, make),
        Some(Algorithm::Decode) => decode::sequence(op, &plan.config, variant, make),
        Some(Algorithm::Simt) => simt::sequence(op, &plan.config, variant, make),
        None => Err(unknown_family(&plan.config.kernel, info)),
    }
}

#[cfg(test)]
mod tests {
    use super::heads_together;

    #[test]
    fn groups_of_heads_are_small_and_leave_few_ctas_without_work() {
        // 2048, 4096 and 16384 queries in tiles of 128 on 132
        // SMs: nearly two rounds.
        assert_eq!([16, 32, 128].map(|of_head| heads_together(32, of_head, 132)), [16, 8, 2]);
        // Few items, or one head: all heads together.
        assert_eq!([heads_together(32, 1, 132), heads_together(1, 500, 132), heads_together(1, 0, 0)], [32, 1, 1]);
        let rounds = |heads: u32, of_head: u32| (heads * of_head).div_ceil(132);
        for of_head in 1..600 {
            let together = heads_together(32, of_head, 132);
            let rounds_by_groups = 32 / together * rounds(together, of_head) + rounds(32 % together, of_head);
            assert!((1..=32).contains(&together));
            assert!(
                f64::from(rounds_by_groups) <= 1.04 * f64::from(rounds(32, of_head)) + 1.0,
                "{of_head}: {together}"
            );
        }
    }
}
