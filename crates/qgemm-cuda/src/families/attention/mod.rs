//! `attention`: softmax over keys and the mean of their values. By FMA for few queries, every type and every chip (`simt`), by matrix
//! instructions for many (`wgmma` on Hopper, `cp_async` from Ampere on, `mma`), and for few whose heads share keys (`decode`).

mod cp_async;
mod decode;
mod decode_pairs;
mod mma;
pub(super) mod params;
mod simt;
mod tile_lists;
mod wgmma;

use qgemm_hal::{
    AttentionConfig, AttentionFamilies, AttentionPlan, AttentionSpec, CheckedAttention, DeviceInfo, HalError, KernelId,
    LaunchSequence, Math, Spec, Unsupported, Variant,
};

use super::kernel_launch::MakeKernel;
use super::prelude::macro_line;
use crate::spec::KernelSpec;

/// What CUDA devices offer.
pub(super) const FAMILIES: AttentionFamilies = &[
    &simt::AttentionSimt,
    &mma::AttentionMma,
    &decode::AttentionDecode,
    &cp_async::AttentionCpAsync,
    &wgmma::AttentionWgmma,
];

/// From so many queries on, kernels with many rows serve them, and bits that may not depend on the batch are those of matrix
/// instructions.
const LEAST_QUERIES: usize = 17;

/// The step of kernels that take a mask, where it says nothing else.
const MASKED: &str = "attend_masked";
/// The same of kernels whose exponents are not products times a positive factor.
const MASKED_BOUNDED: &str = "attend_masked_bounded";

/// The step of kernels for many queries, by whether they take a mask, and whether exponents are not products times a positive factor, but
/// bounded by a soft cap, or turned round.
fn attend_step(is_masked: bool, is_bounded: bool) -> &'static str {
    match (is_masked, is_bounded) {
        (false, false) => "attend",
        (false, true) => "attend_bounded",
        (true, false) => MASKED,
        (true, true) => MASKED_BOUNDED,
    }
}

/// `TileBits` of `mainloop/attention_tile_bits.cuh`, of four warps: two words of each, and words of 32 keys of each row.
fn tile_bits_bytes(spec: &AttentionSpec) -> u32 {
    (4 * 2 + spec.rows * (spec.keys / 32)) * 4
}

/// Makes a kernel one that takes a mask.
fn mask_line(prelude: &mut String, is_masked: bool) {
    if is_masked {
        macro_line(prelude, "QG_BITS", "1");
    }
}

/// Whether exponents are not products times a positive factor, but bounded by a soft cap, or turned round.
fn is_bounded(op: &CheckedAttention) -> bool {
    op.soft_cap.is_some() || op.scale <= 0.0
}

/// Rows and features that a kernel computes of which one is there.
fn padding(op: &CheckedAttention, spec: &AttentionSpec) -> f64 {
    let rows = op.most_queries().next_multiple_of(spec.rows as usize) as f64 / op.most_queries() as f64;
    rows * f64::from(spec.qk + spec.v) / (op.qk_dim + op.v_dim) as f64
}

/// The configuration of a kernel that has the results of whole rows after one launch, by matrix instructions.
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
        math: Math::TensorF16,
        padding: padding(op, spec),
        efficiency,
    }
}

/// Of the one source of a configuration.
fn source_hash(config: &AttentionConfig, source: impl Fn(AttentionSpec, Variant) -> KernelSpec) -> u64 {
    match (config.kernel.spec, config.kernel.variant) {
        (Spec::Attention(spec), Some(variant)) => source(spec, variant).source_hash().short(),
        _ => 0,
    }
}

/// Every kernel of the families on devices of `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    simt::specs(variant)
        .chain(mma::specs(variant))
        .chain(decode::specs(variant))
        .chain(cp_async::specs(variant))
        .chain(wgmma::specs(variant))
}

/// Heads, of `heads`, whose queries `ctas` CTAs go through before those of the next, of `of_head` items each: so few that their keys stay in L2, and so
/// many that each CTA gets at least two items, a long one and a short one, and few CTAs none in the last round of a group.
fn heads_together(heads: usize, of_head: u32, ctas: u32) -> u32 {
    let (of_head, ctas) = (u64::from(of_head.max(1)), u64::from(ctas.max(1)));
    let all = heads as u64;
    let rounds = |heads: u64| (heads * of_head).div_ceil(ctas);
    let rounds_by = |heads: u64| all / heads * rounds(heads) + rounds(all % heads);
    // Nearly two rounds do.
    let are_enough = |heads: u64| 20 * heads * of_head >= 37 * ctas;
    let candidates = || (1..all).filter(|&heads| are_enough(heads)).chain([all]);
    let least = candidates().map(rounds_by).min().unwrap_or(0);
    let together = candidates().find(|&heads| 33 * rounds_by(heads) <= 34 * least);
    together.unwrap_or(all) as u32
}

/// Whether `family` may serve `op`: where bits may not depend on the batch, one family does, and what decides which does not depend on
/// it either.
fn check_invariant(family: &str, op: &CheckedAttention, info: &DeviceInfo) -> Result<(), Unsupported> {
    if !op.batch_invariant {
        return Ok(());
    }
    let chosen = match op.most_queries() >= LEAST_QUERIES {
        false if decode::spec_of(op, info).is_ok() => decode::NAME,
        true if wgmma::spec_of(op, info).is_ok() => wgmma::NAME,
        true if cp_async::spec_of(op, info).is_ok() => cp_async::NAME,
        true if mma::spec_of(op, info).is_ok() => mma::NAME,
        _ => simt::NAME,
    };
    match family == chosen {
        true => Ok(()),
        false => Err(Unsupported::new(format!("leaves bits that may not depend on the batch to {chosen}"))),
    }
}

/// The launches of a plan, whose kernels `make` makes ready.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel variant, and those of `make`.
pub fn attention_sequence(
    op: &CheckedAttention,
    plan: &AttentionPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    match plan.config.kernel.family.as_str() {
        mma::NAME => mma::sequence(op, &plan.config, variant, make),
        wgmma::NAME => wgmma::sequence(op, &plan.config, info, variant, make),
        cp_async::NAME => cp_async::sequence(op, &plan.config, info, variant, make),
        decode::NAME => decode::sequence(op, &plan.config, variant, make),
        _ => simt::sequence(op, &plan.config, variant, make),
    }
}

#[cfg(test)]
mod tests {
    use super::heads_together;

    #[test]
    fn groups_of_heads_are_small_and_leave_few_ctas_without_work() {
        // Of 2048, 4096 and 16384 queries in tiles of 128, on 132 multiprocessors: nearly two rounds.
        assert_eq!([16, 32, 128].map(|of_head| heads_together(32, of_head, 132)), [16, 8, 2]);
        // Few items, and one head: all.
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
