//! GGUF types that are converted at load, against values
//! of the Python package `gguf` (see `golden/README.md`)
//! and the definitions of Q1_0 and Q2_0.

use half::f16;
use qgemm_formats::FormatError;
use qgemm_formats::model::{Model, TensorKind};

use crate::checkpoint::values;
use crate::gguf_parts::{gguf, golden, open};

/// Name, type number, bytes of a block of 256, and
/// format.
const TYPES: [(&str, u32, usize, &str); 9] = [
    ("iq1_s", 19, 50, "iq1_s"),
    ("iq1_m", 29, 56, "iq1_m"),
    ("iq2_xxs", 16, 66, "iq2"),
    ("iq2_xs", 17, 74, "iq2"),
    ("iq2_s", 22, 82, "iq2"),
    ("iq3_xxs", 18, 98, "iq3_xxs"),
    ("iq3_s", 21, 110, "iq3_s"),
    ("tq1_0", 34, 54, "tq2_0"),
    ("tq2_0", 35, 66, "tq2_0"),
];
const Q1_0: u32 = 41;
const Q2_0: u32 = 42;
const Q8_0: u32 = 8;

fn model(tensors: &[(&str, &[usize], u32, &[u8])]) -> Model {
    open(&[gguf(&[], tensors)]).expect("a model")
}

#[test]
fn values_are_those_of_the_gguf_package() {
    for (name, number, bytes, format) in TYPES {
        let blocks = golden(&format!("{name}.random"));
        let decoded = golden(&format!("{name}.decoded"));
        let expected: Vec<f32> =
            decoded.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert_eq!((blocks.len(), expected.len()), (12 * bytes, 12 * 256), "{name}");
        let shapes: [(&str, &[usize]); 2] = [("w.weight", &[6, 512]), ("experts.weight", &[3, 4, 256])];
        let model = model(&shapes.map(|(name, shape)| (name, shape, number, &blocks[..])));
        let info = model.info("w").expect("listed");
        assert!(matches!(info.kind, TensorKind::Quantized(of) if of.name == format), "{name}");
        assert_eq!((info.type_name.to_lowercase().as_str(), info.bytes), (name, 12 * bytes));
        assert_eq!(values(&model.weight("w").expect("loads")), expected, "{name}");
        for expert in 0..3 {
            let weight = model.stacked_weight("experts", expert).expect("loads");
            assert_eq!(values(&weight), expected[expert * 1024..][..1024], "{name}");
        }
        assert_eq!(model.blocks("experts").expect("blocks only").len() % 12, 0);
    }
}

#[test]
fn signs_are_bits_of_q1_0() {
    let block = |d: f32, byte: u8| [&f16::from_f32(d).to_le_bytes()[..], &[byte; 16]].concat();
    let blocks = [block(0.5, 0b0000_0101), block(-2.0, 0xff), block(3.0, 0), block(1.0, 0x80)].concat();
    let weight = model(&[("w.weight", &[2, 256], Q1_0, &blocks)]).weight("w").expect("loads");
    assert_eq!((weight.format().name, weight.blocks()), ("q1_0", &blocks[..]));
    let values = values(&weight);
    assert_eq!(values[..8], [0.5, -0.5, 0.5, -0.5, -0.5, -0.5, -0.5, -0.5]);
    assert!(values[128..256].iter().all(|&v| v == -2.0) && values[256..384].iter().all(|&v| v == -3.0));
    assert_eq!(values[384..392], [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0]);
}

/// Blocks of Q2_0 with codes 0, 1, 2, 3, … and scales 1,
/// 2, 3, ….
fn q2_0(group: usize, values: usize) -> Vec<u8> {
    let block = |i: usize| [&f16::from_f32(i as f32 + 1.0).to_le_bytes()[..], &vec![0b11_10_01_00; group / 4]].concat();
    (0..values / group).flat_map(block).collect()
}

#[test]
fn groups_of_q2_0_follow_from_the_offsets_of_all_tensors() {
    for group in [64, 128] {
        let (large, small) = (q2_0(group, 16 * 256), q2_0(group, 128));
        let shape: [(&str, &[usize]); 3] = [("a.weight", &[16, 256]), ("b.weight", &[1, 128]), ("c.weight", &[8, 512])];
        // The size of `b` alone fits both groups.
        let tensors = [
            (shape[0].0, shape[0].1, Q2_0, &large[..]),
            (shape[1].0, shape[1].1, Q2_0, &small),
            (shape[2].0, shape[2].1, Q2_0, &large),
        ];
        let model = model(&tensors);
        for (name, _) in shape {
            let weight = model.weight(name).expect("loads");
            assert_eq!(weight.format().name, format!("q2_0_g{group}"));
            let values = values(&weight);
            assert_eq!(values[..5], [-1.0, 0.0, 1.0, 2.0, -1.0]);
            assert_eq!(values.get(group..group + 4), (values.len() > group).then_some(&[-2.0, 0.0, 2.0, 4.0][..]));
        }
    }
}

#[test]
fn q2_0_of_unknown_groups_is_refused() {
    let (of_64, of_128, tiny) = (q2_0(64, 4096), q2_0(128, 4096), q2_0(64, 128));
    type Tensors<'a> = [(&'a str, &'a [usize], u32, &'a [u8])];
    let cases: [(&Tensors<'_>, &str); 3] = [
        (&[("w.weight", &[1, 128], Q2_0, &tiny), ("x", &[1, 32], Q8_0, &[0; 34])], "fit both groups of 64 and of 128"),
        (&[("w.weight", &[8, 512], Q2_0, &of_64), ("v.weight", &[8, 512], Q2_0, &of_128)], "fit neither"),
        (&[("w.weight", &[8, 512], Q2_0, &of_64[..600])], "fit neither"),
    ];
    for (tensors, expected) in cases {
        let error = model(tensors).weight("w").expect_err(expected).to_string();
        assert!(error.contains("is Q2_0, ") && error.contains(expected), "{error}");
    }
}

#[test]
fn sizes_and_shapes_that_do_not_fit_are_refused() {
    for (name, number, bytes, _) in TYPES.into_iter().chain([("q1_0", Q1_0, 36, "")]).filter(|t| t.0 != "tq2_0") {
        let blocks = vec![1; bytes];
        let upper = name.to_uppercase();
        let cases: [(&[usize], &str); 4] = [
            (&[256], "expected a matrix"),
            (&[2, 192], "K = 192"),
            (&[300, 256], "and the file holds"),
            (&[usize::MAX >> 10, 1, 256], "and the file holds"),
        ];
        for (shape, expected) in cases {
            let model = model(&[("w.weight", shape, number, &blocks), ("x.weight", &[1, 32], Q8_0, &[0; 34])]);
            let error = model.weight("w").expect_err(expected).to_string();
            assert!(error.contains(expected) && error.contains(&upper), "{error}");
            assert!(model.weight("x").is_ok(), "the rest of the model loads");
        }
    }
}

#[test]
fn any_bytes_are_converted_or_refused() {
    let mut state = 1u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    for (name, number, bytes, _) in TYPES {
        for fill in [0x00, 0xff, 0x7f, 0x80] {
            let blocks: Vec<u8> = vec![fill; bytes];
            drop(model(&[("w.weight", &[1, 256], number, &blocks)]).weight("w"));
        }
        let blocks: Vec<u8> = (0..200 * bytes).map(|_| byte()).collect();
        match model(&[("w.weight", &[200, 256], number, &blocks)]).weight("w") {
            Err(FormatError::NonFiniteScale { .. }) | Ok(_) => {}
            Err(error) => panic!("{name}: {error}"),
        }
    }
}
