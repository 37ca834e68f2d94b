//! Groups of `attention` whose cases run every kernel that a plan has
//! the choice of.

use qgemm_formats::DType;
use qgemm_hal::{KvFormat, MaskBits};

use super::case::{AttentionCase, AttentionStorage, AttentionValues, numbered, types};
use super::mask::{AttentionMask, MaskPattern};

pub(super) fn dequantized() -> Vec<AttentionCase> {
    let places = [
        AttentionStorage::Paged(16),
        AttentionStorage::Offsets,
        AttentionStorage::Paged(5),
        AttentionStorage::Lengths(3),
    ];
    let lengths: [&[(usize, usize)]; 3] =
        [&[(130, 300)], &[(40, 70), (20, 5), (0, 9), (33, 260)], &[(70, 150), (70, 70)]];
    let kv = [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0];
    let mut cases = Vec::new();
    for (i, places) in places.into_iter().enumerate() {
        for (j, kv) in kv.into_iter().enumerate() {
            let case = AttentionCase::new(lengths[(i + j) % 3], [(4, 2), (3, 1)][i % 2], 64, types((i + j) % 2));
            let is_paged = matches!(places, AttentionStorage::Paged(_));
            let mask = AttentionMask { bits: MaskBits::of_tokens(), pattern: MaskPattern::Documents(40) };
            cases.push(AttentionCase {
                kv,
                places,
                dims: [(128, 128), (64, 96), (192, 128), (256, 256), (512, 512)][(i + 2 * j) % 5],
                values: if is_paged && j != 1 { AttentionValues::BadPages } else { AttentionValues::Normal },
                window: ((i + j) % 4 == 1).then_some(50),
                soft_cap: ((i + j) % 4 == 2).then_some(20.0),
                mask: ((i + j) % 4 == 3).then_some(mask),
                causal: (i + j) % 3 != 0,
                head_major: i == 2,
                gap: 32 * (j % 2),
                offset: i % 2,
                every_kernel: true,
                ..case
            });
        }
    }
    // NaN in keys that some queries do not see.
    let case = AttentionCase::new(&[(70, 100), (70, 70)], (2, 1), 128, DType::F16);
    cases.push(AttentionCase { kv: KvFormat::E4M3, values: AttentionValues::NotFinite, every_kernel: true, ..case });
    numbered(cases)
}

pub(super) fn sinks() -> Vec<AttentionCase> {
    let lengths: [&[(usize, usize)]; 6] = [
        &[(1, 70), (1, 0), (1, 1)],
        &[(1, 1100), (1, 300)],
        &[(3, 40), (3, 2)],
        &[(40, 90), (40, 20)],
        &[(70, 150), (0, 9), (20, 5)],
        &[(130, 260)],
    ];
    let mut cases = Vec::new();
    for (i, lengths) in lengths.into_iter().enumerate() {
        for (j, dims) in [(64, 64), (128, 128), (192, 96)].into_iter().enumerate() {
            let kv = [KvFormat::Plain(types(j)), KvFormat::Q4_0, KvFormat::E4M3][(i + 2 * j) % 3];
            let kv = if kv.is_plain() { KvFormat::Plain(types(i + j)) } else { kv };
            let case = AttentionCase::new(lengths, [(8, 2), (6, 6), (8, 1)][(i + j) % 3], 64, types(i + j));
            let mask = AttentionMask { bits: MaskBits::of_tokens(), pattern: MaskPattern::Documents(40) };
            cases.push(AttentionCase {
                kv,
                dims,
                places: if i % 2 == 1 { AttentionStorage::Paged(16) } else { case.places },
                window: (j == 1).then_some(33),
                soft_cap: ((i + j) % 4 == 3).then_some(20.0),
                mask: ((i + j) % 5 == 4).then_some(mask),
                values: if (i, j) == (0, 0) { AttentionValues::Huge } else { AttentionValues::Normal },
                causal: i != 2,
                sinks: true,
                // Of a plan that is refused there are no kernels.
                every_kernel: (i + j) % 5 != 4,
                ..case
            });
        }
    }
    // Parts of a fixed length.
    for kv in [KvFormat::Plain(DType::F16), KvFormat::Q8_0] {
        let case = AttentionCase::new(&[(1, 1300), (1, 520)], (2, 1), 64, DType::F16);
        let places = AttentionStorage::Offsets;
        cases.push(AttentionCase { kv, places, ragged: true, batch_invariant: true, sinks: true, ..case });
    }
    numbered(cases)
}

pub(super) fn gated() -> Vec<AttentionCase> {
    let lengths: [&[(usize, usize)]; 5] = [
        &[(1, 70), (1, 0), (1, 1)],
        &[(1, 1100), (1, 300)],
        &[(3, 40), (3, 2)],
        &[(40, 90), (0, 9), (20, 5)],
        &[(130, 260)],
    ];
    let mut cases = Vec::new();
    for (i, lengths) in lengths.into_iter().enumerate() {
        for (j, dims) in [(64, 64), (128, 128), (192, 96), (512, 512)].into_iter().enumerate() {
            let case = AttentionCase::new(lengths, [(8, 2), (6, 6), (8, 1)][(i + j) % 3], 64, types(i + j));
            let is_each = case.places == AttentionStorage::Each;
            let codes = [KvFormat::Q8_0, KvFormat::E4M3][i % 2];
            cases.push(AttentionCase {
                kv: if (i + j) % 4 == 3 { codes } else { case.kv },
                dims,
                places: if i == 1 && j % 2 == 1 { AttentionStorage::Paged(16) } else { case.places },
                causal: i != 2,
                // wgpu has one buffer for either.
                sinks: is_each && j == 1,
                lse: (i + j) % 2 == 0,
                gap: [0, 3, 8][(i + j) % 3],
                offset: [0, 1][i % 2],
                gated: true,
                // Of a plan that is refused there are no kernels.
                every_kernel: (i + j) % 4 != 3,
                ..case
            });
        }
    }
    // Aligned, so that every kernel serves it.
    for (i, lengths) in [[(130, 260)], [(2, 700)]].into_iter().enumerate() {
        for dims in [(64, 64), (128, 128), (256, 256), (320, 256)] {
            let case = AttentionCase::new(&lengths, (4, 2), 64, types(i));
            cases.push(AttentionCase { dims, gated: true, every_kernel: true, ..case });
        }
    }
    numbered(cases)
}

pub(super) fn mixed() -> Vec<AttentionCase> {
    let formats =
        [KvFormat::Plain(DType::F16), KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0, KvFormat::Plain(DType::BF16)];
    let pairs = formats.into_iter().flat_map(|k| formats.map(|v| (k, v))).filter(|(k, v)| k != v);
    let places = [
        AttentionStorage::Paged(16),
        AttentionStorage::Lengths(3),
        AttentionStorage::Paged(5),
        AttentionStorage::Offsets,
    ];
    let mut cases = Vec::new();
    for (i, (kv, v_format)) in pairs.enumerate() {
        for (j, lengths) in [&[(1, 300), (1, 40)][..], &[(40, 70), (40, 130)]].into_iter().enumerate() {
            let case = AttentionCase::new(lengths, [(8, 2), (3, 1)][i % 2], 64, types((i + j) % 3));
            let places = places[(i + j) % 4];
            let mask = AttentionMask { bits: MaskBits::of_tokens(), pattern: MaskPattern::Documents(40) };
            let (has_mask, is_gated) = (i % 5 == 1, i % 5 == 2);
            cases.push(AttentionCase {
                kv,
                v_format: Some(v_format),
                places,
                ragged: places == AttentionStorage::Offsets,
                dims: [(64, 64), (128, 64), (96, 160), (256, 256)][(i + j) % 4],
                window: (i % 4 == 3).then_some(33),
                soft_cap: (i % 7 == 5).then_some(20.0),
                mask: has_mask.then_some(mask),
                sinks: i % 5 == 3,
                gated: is_gated,
                head_major: i % 3 == 1 && matches!(places, AttentionStorage::Paged(_)),
                gap: 32 * (j % 2),
                lse: (i + j) % 2 == 0,
                // wgpu may refuse these: of a refused plan there are no kernels.
                every_kernel: !has_mask && !is_gated && i % 5 != 3,
                ..case
            });
        }
    }
    // NaN in keys and values that some queries do not see; long heads.
    for (kv, v_format) in [(KvFormat::E4M3, KvFormat::Plain(DType::F16)), (KvFormat::Plain(DType::F16), KvFormat::E4M3)]
    {
        for lengths in [[(70, 100), (70, 70)], [(2, 90), (2, 9)]] {
            let case = AttentionCase::new(&lengths, (2, 1), 512, DType::F16);
            let case = AttentionCase { kv, v_format: Some(v_format), every_kernel: true, ..case };
            cases.push(AttentionCase { values: AttentionValues::NotFinite, ..case });
        }
    }
    // Bits that do not depend on the other sequences.
    let case = AttentionCase::new(&[(1, 1200), (1, 3), (1, 700)], (4, 2), 64, DType::F16);
    let (places, v_format) = (AttentionStorage::Offsets, Some(KvFormat::Q4_0));
    cases.push(AttentionCase { kv: KvFormat::Q8_0, v_format, places, ragged: true, batch_invariant: true, ..case });
    numbered(cases)
}

pub(super) fn every_kernel() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    let rows =
        [MaskBits::of_tokens(), MaskBits::shared(), MaskBits::of_tokens().per_head(), MaskBits::shared().per_head()];
    let patterns = [MaskPattern::Tree, MaskPattern::Random, MaskPattern::Documents(130), MaskPattern::Prefix];
    let places =
        [AttentionStorage::Each, AttentionStorage::Paged(16), AttentionStorage::Offsets, AttentionStorage::Paged(5)];
    let dims = [(64, 64), (128, 128), (192, 128), (256, 256), (80, 96), (512, 512), (320, 256), (512, 200)];
    let lengths: [&[(usize, usize)]; 3] = [&[(130, 300)], &[(40, 70), (20, 5), (33, 260)], &[(200, 700)]];
    for (i, dims) in dims.into_iter().enumerate() {
        for (j, places) in places.into_iter().enumerate() {
            let lengths = lengths[(i + j) % 3];
            // Without lengths or offsets all sequences have the same number
            // of keys.
            let places = if lengths.len() > 1 && j == 0 { AttentionStorage::Lengths(3) } else { places };
            let bits = AttentionMask { bits: rows[(i + 2 * j) % 4], pattern: patterns[(i + j) % 4] };
            cases.push(AttentionCase {
                places,
                dims,
                ragged: lengths.len() > 1,
                mask: (j < 3 || i % 2 == 0).then_some(bits),
                causal: (i + j) % 2 == 0,
                window: ((i + j) % 4 == 3).then_some(50),
                soft_cap: ((2 * i + j) % 5 == 1).then_some(20.0),
                values: if (i + j) % 3 == 0 { AttentionValues::NotFinite } else { AttentionValues::Normal },
                every_kernel: true,
                ..AttentionCase::new(lengths, (4, 2), 64, [DType::F16, DType::BF16][(i + j / 2) % 2])
            });
        }
    }
    // As many key tiles as are examined together, and more; most are
    // masked.
    let mask = Some(AttentionMask { bits: MaskBits::of_tokens(), pattern: MaskPattern::Documents(33) });
    cases.push(AttentionCase {
        mask,
        causal: false,
        every_kernel: true,
        ..AttentionCase::new(&[(70, 2300)], (2, 1), 256, DType::F16)
    });
    // Persistent CTAs process heads in groups. This case has several groups,
    // and some CTAs have an item less in a group than others.
    let many = AttentionCase::new(&[(33, 40); 128], (4, 2), 64, DType::F16);
    cases.push(AttentionCase { places: AttentionStorage::Offsets, causal: true, every_kernel: true, ..many });
    numbered(cases)
}
