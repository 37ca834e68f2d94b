//! Random attentions: any lengths, heads, storage and masks from one seed.

use qgemm_formats::DType;
use qgemm_hal::{KvFormat, MaskBits};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{AttentionCase, AttentionStorage, AttentionValues};
use super::mask::{AttentionMask, MaskPattern};
use crate::random::{gap, pick, skewed};

const MAX_SEQUENCES: usize = 6;
const MAX_QUERIES: usize = 150;
const MAX_KEYS: usize = 700;

/// The random case of `seed`.
pub(super) fn random_case(seed: u64) -> AttentionCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let ragged = rng.random();
    let each = skewed(rng, MAX_QUERIES);
    let length = |rng: &mut StdRng| {
        let queries = if ragged { skewed(rng, MAX_QUERIES + 1) - 1 } else { each };
        (queries, skewed(rng, MAX_KEYS + 1) - 1)
    };
    let lengths: Vec<(usize, usize)> = (0..skewed(rng, MAX_SEQUENCES)).map(|_| length(rng)).collect();
    let kv_heads = skewed(rng, 4);
    let heads = (kv_heads * skewed(rng, 9), kv_heads);
    let dtype = pick(rng, &DType::ALL);
    let dim = |rng: &mut StdRng| -> usize {
        8 * if rng.random_ratio(1, 5) { rng.random_range(33..=64) } else { rng.random_range(1..=32) }
    };
    let dims = if rng.random() { (pick(rng, &[64, 80, 96, 128, 256, 512]), 0) } else { (dim(rng), dim(rng)) };
    let dims = if dims.1 == 0 { (dims.0, dims.0) } else { dims };
    let page = skewed(rng, 80);
    // Pages that share pieces with key tiles are rarely drawn.
    let page = if seed.is_multiple_of(2) { 8 * page } else { page };
    let places = pick(
        rng,
        &[
            AttentionStorage::Lengths(0),
            AttentionStorage::Lengths(5),
            AttentionStorage::Offsets,
            AttentionStorage::Paged(page),
        ],
    );
    let kv = match rng.random_range(0..4) {
        0 => pick(rng, &[KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0]),
        _ => KvFormat::Plain(dtype),
    };
    let other = pick(rng, &KvFormat::ALL);
    let v_format = rng.random_ratio(1, 6).then_some(other);
    // Quantized rows have whole blocks.
    let of_values = v_format.unwrap_or(kv);
    let dims = (dims.0.next_multiple_of(kv.step()), dims.1.next_multiple_of(of_values.step()));
    // One alignment holds for keys and values.
    let unit = if kv.width() == of_values.width() { 1 } else { kv.width().max(of_values.width()) };
    let is_paged = matches!(places, AttentionStorage::Paged(_));
    let values = match pick(rng, &AttentionValues::ALL) {
        AttentionValues::BadPages if !is_paged => AttentionValues::Normal,
        // E4M3 has no infinities.
        AttentionValues::MinusInfinity | AttentionValues::NotFinite if !kv.is_plain() || !of_values.is_plain() => {
            AttentionValues::Normal
        }
        AttentionValues::LargeScales => AttentionValues::Normal,
        values => values,
    };
    let documents = skewed(rng, 300);
    let mask = AttentionMask {
        bits: MaskBits { is_shared: rng.random(), is_per_head: rng.random_ratio(1, 3) },
        pattern: pick(
            rng,
            &[MaskPattern::Tree, MaskPattern::Prefix, MaskPattern::Documents(documents), MaskPattern::Random],
        ),
    };
    AttentionCase {
        ragged,
        places,
        dims,
        kv,
        v_format,
        causal: rng.random_ratio(2, 3),
        // With one visible key the log-sum-exp is the score itself.
        window: rng.random_ratio(1, 3).then(|| if rng.random_ratio(1, 3) { 1 } else { skewed(rng, 300) }),
        mask: rng.random_ratio(1, 3).then_some(mask),
        sinks: rng.random_ratio(1, 4),
        gated: rng.random_ratio(1, 4),
        soft_cap: rng.random_ratio(1, 4).then_some(20.0),
        lse: rng.random(),
        // Offsets and pages can address a sequence alone.
        batch_invariant: ragged && (is_paged || places == AttentionStorage::Offsets) && rng.random_ratio(1, 3),
        head_major: is_paged && rng.random(),
        values,
        gap: gap(rng, 20),
        offset: gap(rng, 4) * unit,
        seed,
        ..AttentionCase::new(&lengths, heads, 8, dtype)
    }
}
