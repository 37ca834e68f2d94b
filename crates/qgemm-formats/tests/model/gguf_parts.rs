//! GGUF files byte by byte: split models, and NVFP4 with its scales.

use std::path::Path;

use qgemm_formats::model::{Model, ModelOptions, NamedFile, TensorKind};
use qgemm_formats::{FormatError, SharedBytes};

use crate::checkpoint::values;

/// Numbers of ggml's types.
const F32: u32 = 0;
const NVFP4: u32 = 40;

/// A file with u16 metadata, and tensors: name,
/// dimensions (outermost first), type, bytes.
pub(crate) fn gguf(metadata: &[(&str, u16)], tensors: &[(&str, &[usize], u32, &[u8])]) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    let text = |file: &mut Vec<u8>, text: &str| {
        file.extend((text.len() as u64).to_le_bytes());
        file.extend(text.as_bytes());
    };
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        text(&mut file, key);
        file.extend(2u32.to_le_bytes());
        file.extend(value.to_le_bytes());
    }
    let mut offset = 0u64;
    for (name, shape, kind, bytes) in tensors {
        text(&mut file, name);
        file.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&d| file.extend((d as u64).to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend(offset.to_le_bytes());
        offset += (bytes.len() as u64).next_multiple_of(32);
    }
    for (_, _, _, bytes) in tensors {
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(*bytes);
    }
    file
}

pub(crate) fn open(files: &[Vec<u8>]) -> Result<Model, FormatError> {
    let named = |(i, bytes): (usize, &Vec<u8>)| NamedFile { name: format!("part {i}"), contents: bytes.clone().into() };
    let files: Vec<NamedFile<SharedBytes>> = files.iter().enumerate().map(named).collect();
    Model::from_files(&files, &[], ModelOptions::default())
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Part `number` of `count`, which holds a matrix of this number.
fn part(number: u16, count: u16, tensors: u16) -> Vec<u8> {
    let split = [("split.no", number), ("split.count", count), ("split.tensors.count", tensors)];
    let metadata = if number == 0 { [&[("general.answer", 42)][..], &split].concat() } else { split.to_vec() };
    gguf(&metadata, &[(&format!("m.{number}"), &[2, 2], F32, &f32s(&[f32::from(number); 4]))])
}

#[test]
fn parts_of_a_split_model_are_one() {
    let parts = [2, 0, 1].map(|number| part(number, 3, 3));
    let model = open(&parts).expect("a model");
    for number in 0..3u16 {
        let weight = model.weight(&format!("m.{number}")).expect("in a part");
        assert_eq!(values(&weight), [f32::from(number); 4]);
    }
    let keys: Vec<&str> = model.metadata().iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["general.answer"]);
}

#[test]
fn files_that_are_not_the_parts_of_one_model_are_refused() {
    let whole = gguf(&[], &[("w", &[2, 2], F32, &f32s(&[1.0; 4]))]);
    let same_tensor = {
        let split = [("split.no", 1), ("split.count", 2)];
        gguf(&split, &[("m.0", &[2, 2], F32, &f32s(&[1.0; 4]))])
    };
    for (files, expected) in [
        (vec![part(1, 3, 3)], "part 1: GGUF file: is part 2 of 3, and there are 1 files"),
        (vec![part(0, 3, 3), part(1, 3, 3)], "is part 1 of 3, and there are 2 files"),
        (vec![part(0, 2, 2), part(0, 2, 2)], "is part 1 of 2: expected part 2"),
        (vec![part(0, 2, 2), part(1, 3, 2)], "is of 3 parts, and another file of 2"),
        (vec![part(0, 2, 7), part(1, 2, 7)], "`split.tensors.count` is 7, but all parts have 2 tensors"),
        (vec![part(0, 2, 2), whole.clone()], "is no part of a split model"),
        (vec![whole.clone(), whole], "is no part of a split model"),
        (vec![part(0, 2, 2), same_tensor], "tensor `m.0` is in two parts"),
        (vec![part(u16::MAX, u16::MAX, 1)], "is part 65536 of 65535"),
    ] {
        let error = open(&files).expect_err(expected).to_string();
        assert!(error.contains(expected.trim_start_matches("part 1: ")), "{error}");
    }
}

pub(crate) fn golden(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn nvfp4_has_the_values_of_gguf() {
    let blocks = golden("nvfp4.random");
    let expected: Vec<f32> =
        golden("nvfp4.decoded").chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let scales = f32s(&[2.0, 0.25, 1.0]);
    let file = gguf(
        &[],
        &[
            ("plain.weight", &[12, 256], NVFP4, &blocks),
            ("scaled.weight", &[12, 256], NVFP4, &blocks),
            ("scaled.scale", &[1], F32, &f32s(&[0.5])),
            ("scaled.input_scale", &[1], F32, &f32s(&[3.0])),
            ("experts.weight", &[3, 4, 256], NVFP4, &blocks),
            ("experts.scale", &[3], F32, &scales),
            ("norm.scale", &[1], F32, &f32s(&[1.0])),
        ],
    );
    let model = open(&[file]).expect("a model");
    let names: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["plain.weight", "scaled.weight", "experts.weight", "norm.scale"]);
    assert!(matches!(model.tensors()[0].kind, TensorKind::Quantized(format) if format.name == "nvfp4"));
    assert_eq!(values(&model.weight("plain").expect("loads")), expected);
    let halves: Vec<f32> = expected.iter().map(|v| 0.5 * v).collect();
    assert_eq!(values(&model.weight("scaled").expect("loads")), halves);
    for (expert, scale) in [2.0, 0.25, 1.0].into_iter().enumerate() {
        let part: Vec<f32> = expected[expert * 1024..][..1024].iter().map(|v| scale * v).collect();
        assert_eq!(values(&model.stacked_weight("experts", expert).expect("loads")), part);
    }
}

#[test]
fn nvfp4_with_wrong_scales_is_refused() {
    let blocks = vec![1u8; 36];
    let mut signed = blocks.clone();
    signed[3] = 0x81;
    type Case<'a> = (&'a [usize], &'a [u8], &'a [f32], &'a str);
    let cases: [Case<'_>; 5] = [
        (&[1, 64], &blocks, &[1.0, 2.0], "expected 1 or 1 scales"),
        (&[1, 64], &blocks, &[f32::NAN], "expected finite scales"),
        (&[1, 32], &blocks, &[1.0], "64"),
        (&[64, 64], &blocks, &[1.0], "the file holds"),
        (&[1, 64], &signed, &[1.0], "scales with a sign"),
    ];
    for (shape, blocks, scales, expected) in cases {
        let file = gguf(&[], &[("w.scale", &[scales.len()], F32, &f32s(scales)), ("w.weight", shape, NVFP4, blocks)]);
        let error = open(&[file]).expect("a model").weight("w").expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
}
