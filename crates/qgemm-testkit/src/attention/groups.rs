//! The suite of `attention`: cases that every backend must pass.

use qgemm_formats::DType;
use qgemm_hal::{KvFormat, MaskBits};

use super::case::{AttentionCase, AttentionStorage, AttentionValues, numbered, types};
use super::every_kernel::{dequantized, every_kernel, gated, mixed, sinks};
use super::mask::{AttentionMask, MaskPattern};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<AttentionCase>] = &[
    group("attention_lengths", "no queries or keys, one, a tile and one more or less, parts of the keys", lengths),
    group("attention_heads", "every head dimension, groups of heads, every type of queries and keys", heads),
    group("attention_masks", "causal or not, windows, more queries than keys, soft caps, scales", masks),
    group("attention_values", "huge logits, NaN and infinities in keys that some queries do not see", values),
    group("attention_places", "offsets, lengths, pages of every size, pages that are none", places),
    group("attention_pages", "many queries over pages of every size, masks, NaN and pages that are none", pages),
    group("attention_layouts", "strides, heads before tokens, unaligned operands", layouts),
    group(
        "attention_codes",
        "caches in codes: every place with masks, soft caps, log-sum-exps and unaligned operands",
        codes,
    ),
    group(
        "attention_decode",
        "few queries: caches in codes, long heads, parts, groups of heads of every size, large scales",
        decode,
    ),
    group(
        "attention_bits",
        "masks of bits: trees, prefixes, documents, rows and tiles without a bit, NaN in keys that are masked",
        bits,
    ),
    group("attention_every_kernel", "every kernel that a plan has the choice of", every_kernel),
    group(
        "attention_dequantized",
        "caches in codes and many queries: every kernel, every place, masks, pages that are none, unaligned operands",
        dequantized,
    ),
    group("attention_sinks", "sinks: every kernel, parts of the keys, queries without keys, masks, codes", sinks),
    group(
        "attention_gated",
        "output gates: every kernel, parts of the keys, queries without keys, sinks, codes",
        gated,
    ),
    group(
        "attention_mixed",
        "keys and values in two formats: every pair, place and kernel, with masks, NaN and sinks",
        mixed,
    ),
    group("attention_invariant", "bits of a sequence do not depend on the others", invariant),
];

fn lengths() -> Vec<AttentionCase> {
    let all: [&[(usize, usize)]; 15] = [
        &[(1, 1)],
        &[(1, 0)],
        &[(1, 63), (1, 64), (1, 65)],
        &[(1, 700)],
        &[(2, 31), (2, 33)],
        &[(5, 5)],
        &[(8, 300), (8, 0), (8, 8)],
        &[(0, 3), (3, 0), (1, 9), (0, 0), (7, 7)],
        &[(16, 16), (17, 40)],
        &[(33, 64)],
        &[(63, 63), (64, 64), (65, 65)],
        &[(128, 200)],
        &[(70, 129), (1, 128), (20, 31)],
        &[(1, 1300), (1, 5)],
        &[(3, 2049), (3, 1024), (3, 2)],
    ];
    let cases = all.into_iter().enumerate().flat_map(|(i, lengths)| {
        let of = |dtype| AttentionCase { lse: i % 2 == 0, ..AttentionCase::new(lengths, (4, 2), 64, dtype) };
        [of(types(i)), of(types(i + 1))]
    });
    numbered(cases.collect())
}

fn heads() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    let dims = [
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 128),
        (256, 256),
        (8, 8),
        (72, 40),
        (120, 136),
        (200, 248),
        (320, 256),
        (512, 512),
        (264, 392),
        (512, 64),
        (192, 192),
    ];
    for (i, dims) in dims.into_iter().enumerate() {
        for (j, lengths) in [&[(1, 70), (1, 33)], &[(40, 90), (40, 40)]].into_iter().enumerate() {
            let heads = [(2, 2), (4, 1), (3, 1)][(i + j) % 3];
            let case = AttentionCase::new(lengths, heads, 8, types(i + j));
            cases.push(AttentionCase { dims, ..case });
        }
    }
    for (i, heads) in [(1, 1), (8, 8), (8, 1), (6, 2), (9, 1), (32, 4)].into_iter().enumerate() {
        for (queries, keys) in [(1, 50), (3, 41), (20, 20)] {
            cases.push(AttentionCase::new(&[(queries, keys)], heads, 32, types(i)));
        }
    }
    // Every pair of types.
    for (i, kv) in KvFormat::ALL.into_iter().enumerate() {
        for dtype in DType::ALL {
            for queries in [1, 19] {
                let case =
                    AttentionCase::new(&[(queries, 66), (queries, 20)], (4, 2), [64, 128, 40, 96, 64, 128][i], dtype);
                cases.push(AttentionCase { kv, ..case });
            }
        }
    }
    numbered(cases)
}

fn masks() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    for (i, causal) in [true, false].into_iter().enumerate() {
        for (j, window) in [None, Some(1), Some(7), Some(64), Some(1000)].into_iter().enumerate() {
            for lengths in [[(1, 200), (1, 3)], [(70, 150), (70, 20)], [(9, 9), (9, 2)]] {
                let case = AttentionCase::new(&lengths, (2, 1), 64, types(i + j));
                cases.push(AttentionCase { causal, window, ..case });
            }
        }
    }
    for (scale, soft_cap) in
        [(Some(0.3), None), (Some(-0.2), None), (None, Some(2.0)), (Some(1.0), Some(30.0)), (Some(0.0), None)]
    {
        for (i, lengths) in [[(1, 80)], [(66, 66)]].into_iter().enumerate() {
            let case = AttentionCase::new(&lengths, (2, 2), 64, types(i));
            cases.push(AttentionCase { scale, soft_cap, ..case });
        }
    }
    numbered(cases)
}

fn values() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    let kinds = [
        AttentionValues::Huge,
        AttentionValues::Cancelling,
        AttentionValues::Equal,
        AttentionValues::NotFinite,
        AttentionValues::MinusInfinity,
    ];
    for values in kinds {
        for (i, lengths) in
            [&[(1, 90), (1, 2), (1, 40)][..], &[(70, 100), (70, 70), (70, 9)], &[(4, 6), (4, 300), (4, 4)]]
                .into_iter()
                .enumerate()
        {
            for dtype in DType::ALL {
                let case = AttentionCase::new(lengths, (2, 1), 64, dtype);
                cases.push(AttentionCase { values, ..case.clone() });
                if values == AttentionValues::NotFinite {
                    let dims = [(64, 64), (128, 128), (96, 160)][i];
                    cases.push(AttentionCase { values, kv: KvFormat::E4M3, dims, ..case.clone() });
                }
                if i == 1 {
                    cases.push(AttentionCase { values, causal: false, window: Some(5), ..case });
                }
            }
        }
    }
    numbered(cases)
}

fn places() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    let pages = [1, 3, 7, 16, 64, 100].map(AttentionStorage::Paged);
    let all = [AttentionStorage::Offsets, AttentionStorage::Lengths(0), AttentionStorage::Lengths(9)];
    for (i, places) in all.into_iter().chain(pages).enumerate() {
        for lengths in [&[(1, 130), (1, 0), (1, 17)][..], &[(68, 140), (3, 64), (20, 20)]] {
            let case = AttentionCase::new(lengths, (4, 2), 64, types(i));
            cases.push(AttentionCase { places, ..case.clone() });
            cases.push(AttentionCase { places, ragged: true, kv: KvFormat::Plain(types(i + 1)), ..case.clone() });
            if matches!(places, AttentionStorage::Paged(_)) {
                cases.push(AttentionCase { places, values: AttentionValues::BadPages, ..case });
            }
        }
    }
    numbered(cases)
}

/// Pages that are key tiles, parts of tiles or several tiles.
/// Some share pieces with tiles, others do not.
fn pages() -> Vec<AttentionCase> {
    let all_dims = [(64, 64), (128, 128), (192, 128), (256, 256), (80, 40), (512, 512), (320, 256)];
    let all_values = [AttentionValues::Normal, AttentionValues::BadPages, AttentionValues::NotFinite];
    let mut cases = Vec::new();
    for (i, size) in [1, 5, 8, 16, 24, 32, 48, 64, 100, 128, 272].into_iter().enumerate() {
        for (j, values) in all_values.into_iter().enumerate() {
            let lengths: &[(usize, usize)] =
                if (i + j) % 2 == 0 { &[(40, 150), (70, 70), (0, 9), (20, 275)] } else { &[(65, 310), (65, 40)] };
            let case = AttentionCase::new(lengths, [(2, 1), (3, 3)][i % 2], 8, types((i + j) % 2));
            cases.push(AttentionCase {
                places: AttentionStorage::Paged(size),
                values,
                dims: all_dims[(i + 2 * j) % 7],
                causal: (i + j) % 3 != 0,
                window: ((i + j) % 4 == 1).then_some(50),
                soft_cap: ((i + j) % 4 == 2).then_some(20.0),
                batch_invariant: case.ragged && i % 3 == 0,
                head_major: j == 1,
                gap: 8 * (i % 2),
                offset: 8 * (j % 2),
                ..case
            });
        }
    }
    numbered(cases)
}

fn layouts() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    for (i, (gap, offset, head_major)) in
        [(3, 0, false), (8, 0, false), (0, 1, false), (5, 2, true), (16, 0, true), (0, 3, true)].into_iter().enumerate()
    {
        for (j, lengths) in [&[(1, 75), (1, 20)][..], &[(67, 67), (67, 80)]].into_iter().enumerate() {
            let places =
                [AttentionStorage::Paged(10), AttentionStorage::Lengths(2), AttentionStorage::Offsets][(i + j) % 3];
            for (k, dtype) in DType::ALL.into_iter().enumerate() {
                let case = AttentionCase::new(lengths, (4, 2), 40, dtype);
                let kv = if k == i % 3 { KvFormat::E4M3 } else { case.kv };
                cases.push(AttentionCase { places, gap, offset, head_major, kv, ..case });
            }
        }
    }
    numbered(cases)
}

fn codes() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    let all = [
        AttentionStorage::Offsets,
        AttentionStorage::Lengths(4),
        AttentionStorage::Paged(7),
        AttentionStorage::Paged(16),
    ];
    for (i, places) in all.into_iter().enumerate() {
        for (j, lengths) in [&[(1, 130), (1, 0), (1, 17)][..], &[(21, 70), (3, 64), (5, 5)]].into_iter().enumerate() {
            for (k, kv) in [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].into_iter().enumerate() {
                let case = AttentionCase::new(lengths, (4, 2), 64, types(i + j + k));
                cases.push(AttentionCase {
                    kv,
                    places,
                    dims: [(64, 64), (96, 160), (128, 32)][(i + j + k) % 3],
                    ragged: case.ragged || i % 2 == 0,
                    window: (i == j + 1).then_some(9),
                    soft_cap: (i == 2 * j).then_some(20.0),
                    lse: (i + k) % 2 == 0,
                    head_major: i >= 2 && k == 1,
                    gap: 32 * (k % 2),
                    offset: i,
                    ..case
                });
            }
        }
    }
    numbered(cases)
}

fn decode() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    for kv in [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0] {
        for dtype in [DType::F16, DType::BF16] {
            let of = |lengths: &[(usize, usize)], heads, dim| AttentionCase {
                kv,
                ..AttentionCase::new(lengths, heads, dim, dtype)
            };
            cases.push(of(&[(1, 1100), (1, 70)], (4, 1), 128));
            cases.push(AttentionCase {
                places: AttentionStorage::Paged(16),
                values: AttentionValues::BadPages,
                window: Some(40),
                ..of(&[(4, 150), (4, 4)], (8, 2), 96)
            });
            cases.push(AttentionCase {
                places: AttentionStorage::Offsets,
                gap: 32,
                soft_cap: Some(20.0),
                ..of(&[(8, 130), (2, 65), (1, 0)], (12, 2), 64)
            });
            cases.push(AttentionCase { offset: 8, causal: false, ..of(&[(3, 80), (3, 33)], (6, 2), 128) });
            // With one visible key the log-sum-exp is its score, in which
            // sums of codes and their offset cancel.
            for values in [AttentionValues::Huge, AttentionValues::Cancelling] {
                cases.push(AttentionCase { values, window: Some(1), ..of(&[(1, 90), (3, 40)], (3, 3), 96) });
            }
            // Values beyond f16 fit results in bf16 only.
            if kv.has_scales() && dtype == DType::BF16 {
                let values = AttentionValues::LargeScales;
                cases.push(AttentionCase { values, scale: Some(2e-6), ..of(&[(1, 200), (1, 33)], (6, 2), 64) });
            }
        }
    }
    // Long heads.
    for (i, dims) in [(256, 256), (512, 512), (320, 256), (200, 136), (512, 256)].into_iter().enumerate() {
        let dtype = types(i % 2);
        let of =
            |lengths: &[(usize, usize)], heads| AttentionCase { dims, ..AttentionCase::new(lengths, heads, 8, dtype) };
        let mask = AttentionMask { bits: MaskBits::of_tokens(), pattern: MaskPattern::Random };
        cases.push(AttentionCase { every_kernel: true, ..of(&[(1, 1100), (1, 70)], (8, 1)) });
        cases.push(AttentionCase {
            places: AttentionStorage::Paged(16),
            values: AttentionValues::BadPages,
            window: Some(40),
            ..of(&[(4, 150), (4, 4)], (8, 2))
        });
        cases.push(AttentionCase {
            values: AttentionValues::NotFinite,
            gap: 8,
            ..of(&[(3, 130), (2, 65), (1, 0)], (3, 1))
        });
        cases.push(AttentionCase { mask: Some(mask), causal: false, ..of(&[(3, 80), (3, 33)], (6, 2)) });
    }
    // So many sequences that one has splits of thousands of keys;
    // heads form pairs.
    let mut lengths = vec![(1, 5); 66];
    lengths[0] = (1, 4200);
    for (dtype, places) in [(DType::F16, AttentionStorage::Paged(16)), (DType::BF16, AttentionStorage::Offsets)] {
        let case = AttentionCase::new(&lengths, (4, 2), 128, dtype);
        cases.push(AttentionCase { kv: KvFormat::Q4_0, places, ragged: true, ..case });
    }
    // More splits than the combine adds at once.
    for kv in [KvFormat::Plain(DType::F16), KvFormat::Q4_0] {
        let case = AttentionCase::new(&[(2, 17_000), (1, 600)], (2, 1), 64, DType::F16);
        cases.push(AttentionCase { kv, places: AttentionStorage::Paged(16), batch_invariant: true, ..case });
    }
    numbered(cases)
}

fn invariant() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    for (i, lengths) in
        [&[(1, 1200), (1, 3), (1, 513), (1, 700)][..], &[(2, 40), (1, 600), (8, 8)], &[(40, 40), (1, 90), (70, 300)]]
            .into_iter()
            .enumerate()
    {
        for places in [AttentionStorage::Offsets, AttentionStorage::Paged(16)] {
            let case = AttentionCase::new(lengths, (4, 2), 64, types(i));
            cases.push(AttentionCase { places, ragged: true, batch_invariant: true, ..case.clone() });
            let plain = KvFormat::Plain(DType::F16);
            for kv in [Some(plain), (i < 2).then_some(KvFormat::Q8_0)].into_iter().flatten() {
                let case = AttentionCase { dtype: DType::F16, kv, places, ragged: true, ..case.clone() };
                cases.push(AttentionCase { batch_invariant: true, ..case });
            }
        }
    }
    numbered(cases)
}

fn bits() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    let rows =
        [MaskBits::of_tokens(), MaskBits::shared(), MaskBits::of_tokens().per_head(), MaskBits::shared().per_head()];
    let patterns = [MaskPattern::Tree, MaskPattern::Random, MaskPattern::Documents(130), MaskPattern::Prefix];
    let lengths: [&[(usize, usize)]; 4] =
        [&[(7, 200), (7, 33)], &[(1, 90), (1, 0), (1, 700)], &[(40, 70), (3, 64), (20, 5)], &[(130, 300)]];
    for (i, pattern) in patterns.into_iter().enumerate() {
        for (j, lengths) in lengths.into_iter().enumerate() {
            let mask = Some(AttentionMask { bits: rows[(i + j) % 4], pattern });
            for (k, dtype) in [DType::F16, types(i + j)].into_iter().enumerate() {
                let case = AttentionCase::new(lengths, [(4, 1), (4, 2)][(i + k) % 2], [64, 128][(i + j) % 2], dtype);
                cases.push(AttentionCase {
                    mask,
                    causal: (i + j + k) % 3 == 0,
                    window: ((i + j) % 4 == 3).then_some(50),
                    soft_cap: (i == 2 && k == 0).then_some(20.0),
                    places: if (j + k) % 3 == 1 { AttentionStorage::Paged(24) } else { case.places },
                    values: if k == 1 { AttentionValues::NotFinite } else { AttentionValues::Normal },
                    ..case
                });
            }
        }
    }
    // Masked tiles and masked groups of many tiles; other head
    // dimensions; split-KV.
    let all_dims = [(64, 64), (128, 128), (192, 128), (256, 256), (80, 96), (40, 8), (512, 512), (320, 256)];
    for (i, dims) in all_dims.into_iter().enumerate() {
        for (j, lengths) in [[(3, 2500)], [(70, 2300)]].into_iter().enumerate() {
            let pattern = [MaskPattern::Documents(33), MaskPattern::Tree][(i + j) % 2];
            let mask = Some(AttentionMask { bits: MaskBits::of_tokens(), pattern });
            let values = [AttentionValues::NotFinite, AttentionValues::Normal][i % 2];
            let case = AttentionCase::new(&lengths, (2, 1), 8, DType::F16);
            cases.push(AttentionCase { mask, dims, values, causal: false, ..case });
        }
    }
    for (i, kv) in [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].into_iter().enumerate() {
        for (j, places) in [AttentionStorage::Offsets, AttentionStorage::Paged(16)].into_iter().enumerate() {
            let mask = Some(AttentionMask { bits: rows[(i + j) % 2], pattern: patterns[(i + j) % 4] });
            let case = AttentionCase::new(&[(5, 150), (5, 600)], (8, 2), 64, types(i));
            cases.push(AttentionCase { mask, kv, places, ..case.clone() });
            cases.push(AttentionCase { mask, kv, places, ragged: true, dtype: DType::BF16, ..case });
        }
    }
    let mask = Some(AttentionMask { bits: MaskBits::of_tokens(), pattern: MaskPattern::Random });
    for lengths in [[(2, 600), (1, 40)], [(40, 300), (70, 90)]] {
        let case = AttentionCase::new(&lengths, (4, 2), 64, DType::F16);
        cases.push(AttentionCase {
            mask,
            places: AttentionStorage::Paged(16),
            ragged: true,
            batch_invariant: true,
            ..case
        });
    }
    numbered(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_place_and_type_occurs_with_one_query_and_with_many() {
        let all: Vec<AttentionCase> = GROUPS.iter().flat_map(|(_, cases)| cases()).collect();
        for dtype in DType::ALL {
            for kv in KvFormat::ALL {
                let of = || all.iter().filter(|case| case.dtype == dtype && case.kv == kv);
                assert!(of().any(|case| case.most_queries() == 1) && of().any(|case| case.most_queries() > 16));
            }
            assert!(all.iter().any(|case| case.dtype == dtype && matches!(case.places, AttentionStorage::Paged(_))));
        }
    }
}
