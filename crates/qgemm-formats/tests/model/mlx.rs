//! MLX layers: golden files of the library itself
//! (see `golden/README.md`), and contradicting settings.

use std::path::Path;

use crate::checkpoint::{Checkpoint, values};
use half::bf16;
use qgemm_formats::model::{Model, ModelOptions};
use qgemm_formats::{DType, FormatError, HostWeight};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype::{self, BF16, F16, F32, U8, U32};

fn golden(file: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)).expect("is there")
}

/// Bit patterns, so that zeros keep their signs.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_packing_has_the_values_of_the_library() {
    let (bytes, config) = (golden("mlx.safetensors"), golden("mlx.json"));
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let config = std::str::from_utf8(&config).expect("text");
    let model = Model::from_bytes(bytes.clone().into(), Some(config), ModelOptions::default()).expect("a model");
    let mut layers = 0;
    for name in tensors.names().into_iter().filter_map(|name| name.strip_prefix("expected.")) {
        let expected = tensors.tensor(&format!("expected.{name}")).expect("is there");
        let load = |matrix: usize| model.stacked_weight(name, matrix).unwrap_or_else(|error| panic!("{name}: {error}"));
        let matrices = if expected.shape().len() == 3 { expected.shape()[0] } else { 1 };
        let read: Vec<f32> = (0..matrices).flat_map(|matrix| values(&load(matrix))).collect();
        assert_eq!(bits(&read), bits(&DType::F32.decode(expected.data())), "{name}");
        layers += 1;
    }
    assert_eq!(layers, 24);
    for (name, format) in [
        ("affine2_g32", "q4_1"),
        ("affine3_g64", "affine3_g64"),
        ("affine4_g32", "q4_1"),
        ("affine4_g128", "affine4_g64"),
        ("affine5_g32", "q5_1"),
        ("affine6_g32", "affine8_g32"),
        ("affine6_g64", "affine6_g64"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8"),
    ] {
        assert_eq!(model.weight(name).expect("loads").format().name, format, "{name}");
    }
    assert!(model.weight("affine4_g64_f16").expect("loads").row_scale().is_none());
}

/// A layer of 2 × 64 weights of 4 bits in one group a row,
/// with these scales and biases.
fn layer(dtype: Dtype, scales: [f32; 2], biases: [f32; 2]) -> Checkpoint {
    let encode = |values: [f32; 2]| match dtype {
        BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        F16 => DType::F16.encode(&values),
        _ => DType::F32.encode(&values),
    };
    let codes = (0..64u8).map(|i| i.wrapping_mul(37)).collect();
    Checkpoint::default()
        .add("layer.weight", U32, &[2, 8], codes)
        .add("layer.scales", dtype, &[2, 1], encode(scales))
        .add("layer.biases", dtype, &[2, 1], encode(biases))
}

const FOUR: &str = r#"{"model_type": "qwen3", "quantization": {"group_size": 64, "bits": 4},
    "quantization_config": {"group_size": 64, "bits": 4, "mode": "affine"}}"#;

fn load(checkpoint: &Checkpoint, config: &str) -> Result<HostWeight, FormatError> {
    checkpoint.open(Some(config)).weight("layer")
}

#[test]
fn scales_are_exact_or_refused() {
    let first = |scales, biases, dtype| load(&layer(dtype, scales, biases), FOUR).map(|weight| values(&weight)[1]);
    // Code 2 is 5.
    for (dtype, scale) in [(BF16, 1.5e-30), (BF16, 3e30), (F32, 2f32.powi(-90)), (F16, 2f32.powi(-24)), (BF16, 0.0)] {
        let scale = if dtype == BF16 { bf16::from_f32(scale).to_f32() } else { scale };
        let weight = load(&layer(dtype, [scale, 0.0], [-scale, 0.0]), FOUR).expect("exact");
        assert_eq!(values(&weight)[2], 5.0 * scale - scale, "{dtype:?} {scale:e}");
    }
    assert!(first([1.0, 1.0], [0.0, 0.0], F32).is_ok());
    let third = first([1.0 / 3.0, 1.0], [0.0, 0.0], F32).expect_err("24 bits").to_string();
    assert!(third.contains("layer.scales") && third.contains("F32") && third.contains("3.3333334e-1"), "{third}");
    let far = first([1e-9, 1.0], [64.0, 0.0], BF16).expect_err("too far apart").to_string();
    assert!(far.contains("row 0, group 0"), "{far}");
    let infinite = load(&layer(BF16, [f32::INFINITY, 1.0], [0.0; 2]), FOUR).expect_err("infinite");
    assert!(matches!(infinite, FormatError::NonFiniteScale { row: 0, block: 0, .. }), "{infinite}");
}

#[test]
fn settings_that_contradict_the_tensors_are_refused_with_both() {
    let whole = || layer(BF16, [0.5; 2], [0.25; 2]);
    let stating = |settings: &str| format!(r#"{{"model_type": "qwen3", "quantization": {{{settings}}}}}"#);
    for (settings, checkpoint, expected) in [
        (r#""bits": 4, "group_size": 32"#, whole(), &["`group_size` is 32", "scales for 1 groups"][..]),
        (r#""bits": 8, "group_size": 64"#, whole(), &["8 words of 8-bit codes", "`bits` is 8"]),
        (r#""bits": 4, "group_size": 64, "layer": {"bits": 8, "group_size": 64}"#, whole(), &["`bits` is 8"]),
        (r#""bits": 4, "group_size": 64, "layer": false"#, whole(), &["not quantized, but it has these codes"]),
        (r#""bits": 4, "group_size": 64, "layer": {"bits": 7, "group_size": 64}"#, whole(), &["7 bits"]),
        (r#""bits": 4, "group_size": 16"#, whole(), &["groups of 16", "[32, 64, 128]"]),
        (r#""bits": 4"#, whole(), &["no settings state both"]),
        (r#""bits": 4, "group_size": 32, "mode": "mxfp4""#, whole(), &["`mode` is \"mxfp4\"", "expected no biases"]),
        (r#""bits": 4, "group_size": 64, "mode": "nvfp4""#, whole(), &["4 bits in groups of 16"]),
        (r#""bits": 4, "group_size": 64, "mode": "trellis""#, whole(), &["trellis"]),
        (r#""bits": 4, "group_size": 64"#, whole().without("biases"), &["layer.biases"]),
        (r#""bits": 4, "group_size": 64"#, whole().without("scales"), &["layer.scales"]),
        (r#""bits": 4, "group_size": 32, "mode": "mxfp4""#, whole().without("biases"), &["U8", "BF16"]),
        (r#""bits": 4, "group_size": 64"#, whole().add("layer.zeros", U8, &[2], vec![0; 2]), &["not understood"]),
    ] {
        let error = load(&checkpoint, &stating(settings)).expect_err(settings).to_string();
        assert!(expected.iter().all(|fact| error.contains(fact)), "{settings}: {error}");
    }
    let plain =
        Checkpoint::default().add_f32("layer.weight", &[2, 2], &[1.0; 4]).add_f32("layer.biases", &[2], &[0.0; 2]);
    assert!(load(&plain, FOUR).is_err(), "a plain weight beside biases");
}

#[test]
fn a_layer_stated_as_plain_is_plain() {
    let config = r#"{"model_type": "qwen3", "quantization": {"group_size": 64, "bits": 4, "layer": false}}"#;
    let plain = Checkpoint::default().add_f32("layer.weight", &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    assert_eq!(values(&load(&plain, config).expect("plain")), [1.0, 2.0, 3.0, 4.0]);
}
