//! bitsandbytes layers: golden files of its CPU library (see
//! `golden/README.md`), and states that contradict them.

use std::path::Path;

use crate::checkpoint::{Checkpoint, values};
use qgemm_formats::model::{Model, ModelOptions, TensorKind};
use qgemm_formats::{DType, FormatError};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype::{self, F32, I8, U8};

fn golden() -> Vec<u8> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bitsandbytes.safetensors");
    std::fs::read(file).expect("is there")
}

const NF4: &str = r#"{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true,
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true}}"#;

#[test]
fn four_bit_layers_have_the_values_of_the_library() {
    let bytes = golden();
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let model = Model::from_bytes(bytes.clone().into(), None, ModelOptions::default()).expect("a model");
    for name in ["nf4", "nf4_nested", "nf4_f32", "nf4_f16", "fp4", "fp4_nested"] {
        let expected = tensors.tensor(&format!("expected.{name}")).expect("is there");
        let weight = model.weight(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let dtype = match expected.dtype() {
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            _ => DType::F32,
        };
        assert_eq!([weight.n(), weight.k()], *expected.shape(), "{name}");
        assert_eq!(weight.format().name, dtype.name(), "{name}");
        assert_eq!(values(&weight), dtype.decode(expected.data()), "{name}");
        let info = model.info(name).expect("listed");
        assert!(matches!(info.kind, TensorKind::Quantized(_)), "{info:?}");
    }
}

/// bitsandbytes multiplies by SCB and 1 / 127 one after the
/// other.
#[test]
fn llm_int8_layers_differ_by_one_rounding() {
    let bytes = golden();
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let expected = DType::F32.decode(tensors.tensor("expected.int8").expect("is there").data());
    let model = Model::from_bytes(bytes.clone().into(), None, ModelOptions::default()).expect("a model");
    let weight = model.weight("int8").expect("loads");
    assert_eq!(weight.format().name, "int8_channel");
    for (value, expected) in values(&weight).into_iter().zip(expected) {
        assert!((value - expected).abs() <= expected.abs() * f32::EPSILON, "{value} is not {expected}");
    }
}

/// The golden layer `nf4` as `layer`, with its state changed
/// by `change`.
fn changed(change: impl Fn(String) -> String) -> Checkpoint {
    let bytes = golden();
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let parts = ["weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"];
    parts.iter().fold(Checkpoint::default(), |all, part| {
        let tensor = tensors.tensor(&format!("nf4.{part}")).expect("is there");
        if !part.contains("quant_state") {
            return all.add(&format!("layer.{part}"), tensor.dtype(), tensor.shape(), tensor.data().to_vec());
        }
        let state = change(String::from_utf8(tensor.data().to_vec()).expect("text")).into_bytes();
        all.add(&format!("layer.{part}"), U8, &[state.len()], state)
    })
}

#[test]
fn contradictions_are_refused_with_both_facts() {
    let same = |state: String| state;
    let put = |from: &'static str, to: &'static str| {
        changed(move |state| {
            assert!(state.contains(from), "{state}");
            state.replace(from, to)
        })
    };
    assert!(changed(same).weight(Some(NF4)).is_ok());
    let fp4 = NF4.replace("\"nf4\"", "\"fp4\"");
    let eight = NF4.replace("\"load_in_4bit\": true", "\"load_in_4bit\": false");
    for (checkpoint, config, expected) in [
        (changed(same), fp4.as_str(), &["`bnb_4bit_quant_type` is \"fp4\"", "`nf4`"][..]),
        (changed(same), &eight, &["`load_in_4bit` is false", "`nf4`"]),
        (put("[4, 128]", "[4, 126]"), NF4, &["256 bytes", "[4, 126]"]),
        (put("[4, 128]", "[4294967296, 4294967296]"), NF4, &["256 bytes"]),
        (put("[4, 128]", "[512]"), NF4, &["`shape` is [512]"]),
        (put("\"blocksize\": 64", "\"blocksize\": 128"), NF4, &["expected 4 numbers", "[8]"]),
        (put("\"blocksize\": 64", "\"blocksize\": 0"), NF4, &["`blocksize` is 0"]),
        (put("bfloat16", "float64"), NF4, &["`dtype` is \"float64\""]),
        (put("\"quant_type\": \"nf4\"", "\"quant_type\": \"fp4\""), NF4, &["`fp4`", "`nf4`"]),
        (put("{", "["), NF4, &["quant_state"]),
        (changed(same).without("absmax"), NF4, &["layer.weight.absmax"]),
        (changed(same).without("quant_map"), NF4, &["layer.weight.quant_map"]),
        (changed(same).without("__nf4"), NF4, &["layer.weight.quant_state.bitsandbytes__nf4"]),
        (
            changed(same).without("quant_map").add_f32("layer.weight.quant_map", &[16], &[0.5; 16]),
            NF4,
            &["codebook", "NF4"],
        ),
        (changed(same).without("absmax").add("layer.weight.absmax", U8, &[8], vec![0; 8]), NF4, &["nested_quant_map"]),
        (changed(same).add_f32("layer.weight.more", &[1], &[0.0]), NF4, &["layer.weight.more", "not understood"]),
    ] {
        let error = checkpoint.weight(Some(config)).expect_err(expected[0]).to_string();
        assert!(expected.iter().all(|fact| error.contains(fact)), "{expected:?}: {error}");
    }
    let nan = changed(same).without("absmax").add_f32("layer.weight.absmax", &[8], &[f32::NAN; 8]);
    assert!(matches!(nan.weight(Some(NF4)), Err(FormatError::NonFiniteScale { .. })));
}

#[test]
fn llm_int8_settings_and_orders_are_checked() {
    let layer = |order: u8| {
        Checkpoint::default()
            .add("layer.weight", I8, &[2, 32], vec![1; 64])
            .add("layer.SCB", F32, &[2], DType::F32.encode(&[127.0, 254.0]))
            .add("layer.weight_format", U8, &[], vec![order])
    };
    let of = |eight: bool| {
        format!(r#"{{"quantization_config": {{"quant_method": "bitsandbytes", "load_in_8bit": {eight}}}}}"#)
    };
    let weight = layer(0).weight(Some(&of(true))).expect("loads");
    assert_eq!((values(&weight)[0], values(&weight)[63]), (1.0, 2.0));
    let error = layer(1).weight(Some(&of(true))).expect_err("another order").to_string();
    assert!(error.contains("weight_format"), "{error}");
    let error = layer(0).weight(Some(&of(false))).expect_err("contradicts").to_string();
    assert!(error.contains("`load_in_8bit` is false") && error.contains("LLM.int8()"), "{error}");
}
