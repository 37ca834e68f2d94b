//! Golden layers of AutoRound's own exporter with its settings
//! (see `golden/README.md`).

use std::path::Path;

use crate::checkpoint::{Checkpoint, values};
use qgemm_formats::DType;
use safetensors::SafeTensors;
use serde_json::Value;

const LAYER: &str = "model.layers.0.mlp.up_proj";

/// Golden files: settings by case, and all tensors.
fn golden() -> (Value, Vec<u8>) {
    let read = |file: &str| {
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)).expect("is there")
    };
    (serde_json::from_slice(&read("auto_round.json")).expect("JSON"), read("auto_round.safetensors"))
}

fn checkpoint(tensors: &SafeTensors<'_>, case: &str) -> Checkpoint {
    ["qweight", "qzeros", "scales", "g_idx"].iter().fold(Checkpoint::default(), |checkpoint, part| {
        match tensors.tensor(&format!("{case}.{part}")) {
            Ok(tensor) => {
                checkpoint.add(&format!("{LAYER}.{part}"), tensor.dtype(), tensor.shape(), tensor.data().to_vec())
            }
            Err(_) => checkpoint,
        }
    })
}

#[test]
fn every_packing_decodes_to_what_was_exported() {
    let (settings, bytes) = golden();
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let cases = settings.as_object().expect("an object");
    assert_eq!(cases.len(), 22);
    for (case, settings) in cases {
        let kind = case.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
        let expected = tensors.tensor(&format!("{kind}.expected")).expect("is there");
        let expected = DType::F16.decode(expected.data());
        let checkpoint = checkpoint(&tensors, case);
        let inside = format!(r#"{{"model_type": "llama", "quantization_config": {settings}}}"#);
        let alone = settings.to_string();
        for files in [
            &[("config.json", &*inside)][..],
            &[("quantization_config.json", &*alone)],
            &[("config.json", &*inside), ("quantization_config.json", &*alone)],
        ] {
            let weight = checkpoint.open_beside(files).and_then(|model| model.weight(LAYER));
            let weight = weight.unwrap_or_else(|error| panic!("{case}: {error}"));
            assert_eq!((weight.n(), weight.k()), (32, 64), "{case}");
            assert_eq!(values(&weight), expected, "{case}");
        }
    }
}

#[test]
fn other_names_of_packings_are_known() {
    let (_, bytes) = golden();
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let expected = DType::F16.decode(tensors.tensor("int4.asym.expected").expect("is there").data());
    let load = |case: &str, settings: &str| {
        let settings = format!(r#"{{"bits": 4, "group_size": 32, "sym": false, {settings}}}"#);
        let model = checkpoint(&tensors, case).open_beside(&[("quantization_config.json", &settings)]);
        model.and_then(|model| model.weight(LAYER))
    };
    let (as_is, less_one) = ("int4.asym.auto_round", "int4.asym.auto_round:auto_gptq");
    for (case, settings) in [
        (as_is, r#""quant_method": "intel/auto-round", "backend": "auto_round:exllamav2""#),
        (as_is, r#""quant_method": "auto-round", "packing_format": "auto_round:triton", "backend": "auto""#),
        (as_is, r#""quant_method": "AUTO_ROUND", "packing_format": "Auto_Round""#),
        (less_one, r#""quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2""#),
        (less_one, r#""quant_method": "intel/auto-round", "backend": "gptq:exllamav2""#),
        (less_one, r#""quant_method": "auto-round", "packing_format": null"#),
        ("int4.asym.auto_round:auto_awq", r#""quant_method": "auto-round", "packing_format": "auto_round:awq""#),
    ] {
        let weight = load(case, settings).unwrap_or_else(|error| panic!("{settings}: {error}"));
        assert_eq!(values(&weight), expected, "{settings}");
    }
    for (settings, named) in [
        (r#""packing_format": "auto_round:llm_compressor""#, "AutoRound packing `auto_round:llm_compressor`"),
        (r#""packing_format": "auto_round:fp8""#, "auto_round:fp8"),
        (r#""packing_format": "auto_round", "data_type": "mx_fp""#, "AutoRound data type `mx_fp`"),
        (r#""packing_format": "auto_round", "rotation_config": {"hadamard": true}"#, "rotation_config"),
        (r#""packing_format": "auto_round:auto_awq", "extra_config": {".*up_proj.*": {"bits": 8}}"#, "AWQ with 8 bits"),
    ] {
        let error = load(as_is, &format!(r#""quant_method": "auto-round", {settings}"#)).expect_err(settings);
        assert!(error.to_string().contains(named), "{settings}: {error}");
    }
}
