//! Packed-weight files: round trips, and errors for other contents.

use proptest::prelude::*;
use qgemm_formats::packed_file::{PackedParts, PackedWeight};
use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{Format, FormatError, HostWeight, NO_COLUMN, SharedBytes, XFormat};

const CLASSES: [FragmentLayout; 3] = [FragmentLayout::Canonical, FragmentLayout::MmaM16, FragmentLayout::MmaM8N8K4];

fn weight(format: Format, n: usize, k: usize) -> HostWeight {
    let mut blocks: Vec<u8> = (0..format.row_offset(n, k)).map(|i| (i * 131 % 251) as u8).collect();
    if let Some(largest) = format.largest_zero_point() {
        blocks.chunks_exact_mut(format.block_bytes).for_each(|b| b[format.block_bytes - 1] %= largest);
    }
    HostWeight::new(format, n, k, blocks.into()).expect("valid")
}

fn file(weight: &PackedWeight) -> Vec<u8> {
    let mut bytes = Vec::new();
    weight.write(&mut bytes).expect("memory");
    bytes
}

fn read(bytes: Vec<u8>) -> Result<PackedWeight, FormatError> {
    PackedWeight::read(&SharedBytes::from(bytes))
}

/// Weight with every section: 70 stored columns for 67
/// features, row factors.
fn act_order() -> PackedWeight {
    let format: Format = "int4_g32".parse().expect("a format");
    let order: Vec<u32> = (0..67).rev().chain([NO_COLUMN; 3]).collect();
    let blocks = vec![0x0d; format.row_offset(5, 70)];
    let weight = HostWeight::with_k_order(format, 5, 67, blocks.into(), order).expect("valid");
    PackedWeight::pack(&weight.with_row_scale(vec![0.5; 5]).expect("finite"), FragmentLayout::MmaM16).expect("small")
}

#[test]
fn what_is_written_is_read() {
    for (format, class) in Format::all().flat_map(|f| CLASSES.map(|c| (f, c))) {
        let written = PackedWeight::pack(&weight(format, 21, 2 * format.block_len), class).expect("small");
        let got = read(file(&written)).unwrap_or_else(|e| panic!("{format} {class:?}: {e}"));
        assert_eq!((got.format, got.class, got.n, got.k), (format, class, 21, 2 * format.block_len));
        assert_eq!((got.stored_k, got.fits_f16), (written.stored_k, written.fits_f16), "{format}");
        assert!(*got.data == *written.data && got.row_scale.is_none() && got.k_order.is_none());
    }
    for stated in [None, Some(XFormat::E4M3Token), Some(XFormat::E4M3Block), Some(XFormat::E4M3Tensor)] {
        let fp8 = weight("fp8_e4m3".parse().expect("a format"), 21, 64).with_stated_x(stated);
        let written = PackedWeight::pack(&fp8, FragmentLayout::MmaM16).expect("small");
        assert_eq!(read(file(&written)).expect("valid").stated_x, stated);
    }
    let written = act_order();
    let got = read(file(&written)).expect("valid");
    assert_eq!((got.k, got.stored_k), (67, 70));
    assert_eq!(got.k_order.as_deref(), written.k_order.as_deref());
    assert_eq!(got.row_scale.as_deref(), Some([0.5f32.to_le_bytes(); 5].as_flattened()));
}

#[test]
fn gated_pairs_are_kept() {
    let format: Format = "q4_k".parse().expect("a format");
    let (gate, up) = (weight(format, 19, 256), weight(format, 19, 256));
    let written = PackedWeight::pack_gated(&gate, &up, FragmentLayout::MmaM16).expect("small");
    let got = read(file(&written)).expect("valid");
    assert_eq!((got.n, got.features, got.gated), (48, 19, true));
    let single = PackedWeight::pack(&gate, FragmentLayout::MmaM16).expect("small");
    assert_eq!((single.n, single.features, single.gated), (19, 19, false));
    for features in [0, 16, 25] {
        let parts = PackedParts { features, ..(*written).clone() };
        let error = PackedWeight::new(parts).expect_err("other rows");
        assert!(matches!(error, FormatError::ZeroDimension { .. } | FormatError::BadFile { .. }), "{error}");
    }
}

#[test]
fn foreign_and_old_files_are_told_apart() {
    let good = file(&act_order());
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        read(file).expect_err("refused")
    };
    assert_eq!(changed(0, b"GGUF"), FormatError::NotPacked { got: *b"GGUFm-pw" });
    assert_eq!(changed(8, &[2]), FormatError::PackedVersion { expected: 1, got: 2 });
    assert!(matches!(changed(12, &[7]), FormatError::BadFile { .. }));
    // Another layout has another fingerprint.
    assert!(matches!(changed(12, &[2]), FormatError::PackedLayout { class: FragmentLayout::MmaM8N8K4, .. }));
    assert!(matches!(changed(40, &[0xab; 8]), FormatError::PackedLayout { got: 0xabab_abab_abab_abab, .. }));
    assert!(matches!(changed(56, b"int9"), FormatError::UnknownFormat { .. }));
    assert!(matches!(changed(16, &[0; 8]), FormatError::ZeroDimension { name: "N" }));
    assert!(matches!(changed(16, &[0xff; 8]), FormatError::Overflow { .. }));
    assert!(matches!(changed(24, &[0xff; 4]), FormatError::BadFile { .. }), "more features than columns");
    let WrongLength { expected, got } = length_error(changed(16, &[0xff; 4]));
    assert!(expected > got, "four thousand million rows would be a longer file");
}

struct WrongLength {
    expected: usize,
    got: usize,
}

fn length_error(error: FormatError) -> WrongLength {
    match error {
        FormatError::WrongLength { expected, got, .. } => WrongLength { expected, got },
        other => panic!("{other}"),
    }
}

#[test]
fn a_file_that_is_cut_off_or_goes_on_is_refused() {
    let good = file(&act_order());
    for len in 0..good.len() {
        let WrongLength { expected, got } = length_error(read(good[..len].to_vec()).expect_err("refused"));
        assert!(expected > got && got == len);
    }
    assert!(length_error(read([good.as_slice(), &[0]].concat()).expect_err("refused")).expected == good.len());
}

#[test]
fn every_changed_byte_is_noticed() {
    let good = file(&act_order());
    for at in 0..good.len() {
        let mut file = good.clone();
        file[at] ^= 0x10;
        let error = read(file).expect_err("refused");
        if at >= 64 {
            assert!(matches!(error, FormatError::Checksum { .. }), "{at}: {error}");
        }
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    type Change = fn(&mut PackedParts);
    type Expect = fn(&FormatError) -> bool;
    fn first_column(parts: &mut PackedParts, feature: u32) {
        let mut order = parts.k_order.as_deref().expect("permuted").to_vec();
        order[..4].copy_from_slice(&feature.to_le_bytes());
        parts.k_order = Some(order.into());
    }
    let table: &[(Change, Expect)] = &[
        (|p| p.n = 0, |e| matches!(e, FormatError::ZeroDimension { name: "N" })),
        (|p| p.n = 1 << 32, |e| matches!(e, FormatError::Overflow { .. })),
        (|p| p.n = 17, |e| matches!(e, FormatError::WrongLength { .. })),
        (|p| p.k = 71, |e| matches!(e, FormatError::BadFile { .. })),
        (|p| p.stored_k = 700, |e| matches!(e, FormatError::WrongLength { .. })),
        (|p| p.class = FragmentLayout::Canonical, |e| matches!(e, FormatError::WrongLength { .. })),
        (|p| p.k_order = None, |e| matches!(e, FormatError::BadFile { .. })),
        (
            |p| p.row_scale = Some(vec![0; 19].into()),
            |e| matches!(e, FormatError::WrongLength { expected: 20, got: 19, .. }),
        ),
        // A kernel would read beyond X; two columns would be one feature's.
        (|p| first_column(p, 67), |e| matches!(e, FormatError::BadFile { .. })),
        (|p| first_column(p, u32::MAX - 1), |e| matches!(e, FormatError::BadFile { .. })),
        (|p| first_column(p, 1), |e| matches!(e, FormatError::BadFile { .. })),
    ];
    for (i, (change, expect)) in table.iter().enumerate() {
        let mut parts = (*act_order()).clone();
        change(&mut parts);
        let error = PackedWeight::new(parts).expect_err("inconsistent");
        assert!(expect(&error), "{i}: {error:?}");
    }
}

proptest! {
    #[test]
    fn bytes_of_any_kind_are_read_or_refused(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<proptest::sample::Index>(),
    ) {
        let mut bytes = file(&act_order());
        for (at, byte) in changes {
            let at = at.index(bytes.len().min(64));
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len() - cut.index(3));
        // Any result: no panic, and nothing larger than the file.
        let _ = read(bytes);
    }
}
