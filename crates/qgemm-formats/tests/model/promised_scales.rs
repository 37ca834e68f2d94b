//! FP8 layers whose settings promise scales, with and without them, and layers
//! of partly opened checkpoints.

use std::collections::BTreeMap;

use crate::checkpoint::{Checkpoint, values};
use qgemm_formats::{FormatError, model::TensorKind};
use safetensors::tensor::Dtype;

fn fp8(name: &str) -> Checkpoint {
    Checkpoint::default().add(name, Dtype::F8_E4M3, &[2, 4], vec![0x38; 8])
}

fn config(settings: &str) -> String {
    format!(r#"{{"architectures": ["X"], "quantization_config": {settings}}}"#)
}

fn groups(targets: &str, rest: &str) -> String {
    config(&format!(
        r#"{{"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {{"group_0":
            {{"targets": [{targets}], "weights": {{"num_bits": 8, "type": "float"}}}}}} {rest}}}"#
    ))
}

#[test]
fn scales_that_settings_promise_must_be_there() {
    for (settings, by) in [
        (config(r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#), "weight_block_size"),
        (config(r#"{"weight_block_size": [128, 128]}"#), "weight_block_size"),
        (config(r#"{"quant_method": "fp8", "activation_scheme": "static"}"#), "fp8"),
        (config(r#"{"quant_method": "FP8"}"#), "fp8"),
        (config(r#"{"quant_method": "fbgemm_fp8"}"#), "fbgemm_fp8"),
        (config(r#"{"quant_method": "quark"}"#), "quark"),
        (config(r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#), "FP8"),
        (config(r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}"#), "NVFP4"),
        (r#"{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}"#.into(), "FP8"),
        (
            config(r#"{"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layer": {"quant_algo": "FP8"}}}"#),
            "MIXED_PRECISION",
        ),
        (groups(r#""Linear""#, ""), "group_0"),
        (groups(r#""re:.*layer$""#, r#", "ignore": ["re:.*head"]"#), "group_0"),
        (groups("", ""), "group_0"),
    ] {
        let error = fp8("model.layer.weight").open(Some(&settings)).weight("model.layer").expect_err(&settings);
        let FormatError::MissingTensor { layer, format, tensors, shard: None } = &error else { panic!("{error}") };
        assert_eq!(layer, "model.layer.weight");
        assert_eq!(tensors, &["model.layer.weight_scale", "model.layer.weight_scale_inv"]);
        assert!(format.contains(by), "{settings}: {error}");
        // With the scale it loads.
        let whole = fp8("model.layer.weight").add_f32("model.layer.weight_scale", &[1], &[0.5]);
        assert_eq!(values(&whole.open(Some(&settings)).weight("model.layer").expect("whole")), [0.5; 8], "{settings}");
    }
}

#[test]
fn plain_fp8_stays_plain() {
    let algorithm = r#""quant_method": "modelopt", "quant_algo": "FP8""#;
    for settings in [
        None,
        Some(config(r#"{"quant_method": "gptq", "bits": 4}"#)),
        Some(config(r#"{"quant_method": "fp8", "modules_to_not_convert": ["model.layer"]}"#)),
        Some(config(r#"{"quant_method": "fp8", "ignored_layers": ["layer"]}"#)),
        Some(config(&format!(r#"{{{algorithm}, "ignore": ["lm_head", "model.layer"]}}"#))),
        Some(format!(r#"{{"quantization": {{{algorithm}, "exclude_modules": ["lm_head", "model.lay*"]}}}}"#)),
        Some(config(
            r#"{"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.other": {"quant_algo": "FP8"}}}"#,
        )),
        Some(groups(r#""Linear""#, r#", "ignore": ["re:.*\\.layer"]"#)),
        Some(groups(r#""re:.*other$""#, "")),
    ] {
        let weight = fp8("model.layer.weight").open(settings.as_deref()).weight("model.layer");
        let weight = weight.unwrap_or_else(|error| panic!("{settings:?}: {error}"));
        assert_eq!(values(&weight), [1.0; 8]);
    }
}

#[test]
fn scales_are_no_weights_of_their_own() {
    // Remainder of an NVFP4 layer whose codes are in another shard.
    let model = Checkpoint::default().add("layer.weight_scale", Dtype::F8_E4M3, &[8, 4], vec![1; 32]).open(None);
    assert_eq!(model.info("layer.weight_scale").expect("listed").kind, TensorKind::Opaque("F8_E4M3".into()));
}

#[test]
fn deepseek_calls_the_scale_scale() {
    let settings = config(r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#);
    let layer = || fp8("layer.weight");
    let e8m0 = layer().add("layer.scale", Dtype::F8_E8M0, &[1, 1], vec![126]);
    assert_eq!(values(&e8m0.weight(None).expect("a power of two")), [0.5; 8]);
    let number = || layer().add_f32("layer.scale", &[1, 1], &[0.5]);
    assert_eq!(values(&number().weight(Some(&settings)).expect("a block's")), [0.5; 8]);
    // Other writers do not document whether the scale divides.
    assert!(number().weight(None).is_err());
}

#[test]
fn a_shard_says_where_the_rest_is() {
    let others = |names: &[&str]| -> BTreeMap<String, String> {
        names.iter().map(|name| ((*name).to_owned(), "model-2.safetensors".to_owned())).collect()
    };
    let settings = config(r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#);
    for settings in [Some(settings.as_str()), None] {
        let model = fp8("a.weight").with_layer("b", fp8("layer.weight").add_f32("layer.weight_scale", &[1], &[2.0]));
        let model =
            model.open(settings).with_other_shards(others(&["a.weight_scale_inv", "c.weight", "b.input_scale"]));
        let error = model.weight("a").expect_err("its scale is elsewhere");
        assert!(matches!(&error, FormatError::MissingTensor { shard: Some(_), .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("`a.weight_scale_inv`") && text.contains("model-2.safetensors"), "{text}");
        assert!(matches!(&model.info("a").expect("listed").kind, TensorKind::Opaque(why) if *why == text));
        assert!(model.weight("b").is_ok(), "a scale of its input leaves a weight as it is");
        for name in ["c", "c.weight"] {
            let error = model.weight(name).expect_err("elsewhere");
            let expected = FormatError::InOtherShard { name: "c.weight".into(), shard: "model-2.safetensors".into() };
            assert_eq!(error, expected);
        }
    }
    // A layer that would load without the tensors of
    // another shard is refused, too.
    let bits = Some(r#"{"quant_method": "gptq", "bits": 4}"#);
    let gptq = Checkpoint::default()
        .add("g.qweight", Dtype::I32, &[16, 8], vec![0; 512])
        .add("g.qzeros", Dtype::I32, &[1, 1], vec![0; 4])
        .add_f32("g.scales", &[1, 8], &[1.0; 8]);
    gptq.open(bits).weight("g").expect("a layer of one group");
    let error = gptq.open(bits).with_other_shards(others(&["g.g_idx"])).weight("g").expect_err("act-order elsewhere");
    assert!(error.to_string().contains("g.g_idx"), "{error}");
}
