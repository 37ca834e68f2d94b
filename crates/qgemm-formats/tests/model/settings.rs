//! Quantization settings in all files and spellings.

use crate::checkpoint::{Checkpoint, values};
use crate::integers::Layer;
use qgemm_formats::model::TensorKind;
use qgemm_formats::{FormatError, HostWeight};
use safetensors::tensor::Dtype;

/// Asymmetric GPTQ v2 layer. Only settings tell it from version 1.
fn layer() -> Layer {
    Layer::in_groups_of(32, 64, 4, 32)
}

const V2: &str =
    r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": false, "checkpoint_format": "gptq_v2"}"#;

fn load(checkpoint: &Checkpoint, files: &[(&str, &str)]) -> Result<HostWeight, FormatError> {
    checkpoint.open_beside(files)?.weight("layer")
}

fn refusal(checkpoint: &Checkpoint, files: &[(&str, &str)]) -> String {
    load(checkpoint, files).expect_err(&format!("{files:?}")).to_string()
}

#[test]
fn settings_are_read_wherever_they_stand() {
    let layer = layer();
    let config = |path: &str| {
        let (open, close): (String, String) =
            path.split('.').map(|part| (format!(r#", "{part}": {{"hidden_size": 64"#), '}')).unzip();
        let (part, rest) = open.rsplit_once(r#"{"hidden_size": 64"#).expect("one part at least");
        format!(r#"{{"model_type": "x", "version": 9{part}{V2}{rest}{}}}"#, &close[1..])
    };
    for path in [
        "quantization_config",
        "compression_config",
        "text_config.quantization_config",
        "llm_config.quantization_config",
        "language_config.quantization_config",
        "text_config.compression_config",
        "thinker_config.text_config.quantization_config",
    ] {
        let text = config(path);
        let weight = load(&layer.gptq(0), &[("config.json", &text)]).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(values(&weight), layer.expected(), "{text}");
    }
    let plain = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bits": 2}"#;
    for file in ["quantize_config.json", "quantization_config.json", "quant_config.json"] {
        for files in [&[(file, V2)][..], &[("config.json", plain), (file, V2)]] {
            assert_eq!(values(&load(&layer.gptq(0), files).expect("loads")), layer.expected(), "{files:?}");
        }
    }
    let hf = format!(r#"{{"producer": {{"name": "modelopt", "version": "0.29"}}, "quantization": {V2}}}"#);
    let files = [("config.json", plain), ("hf_quant_config.json", &*hf)];
    assert_eq!(values(&load(&layer.gptq(0), &files).expect("loads")), layer.expected());
}

#[test]
fn places_fill_one_another_in_or_contradict() {
    let layer = layer();
    let (inside, alone) = ("config.json", "quantize_config.json");
    let config = |settings: &str| format!(r#"{{"model_type": "llama", "quantization_config": {settings}}}"#);
    let agreeing = [
        (
            r#"{"quant_method": "gptq", "bits": 4}"#,
            r#"{"checkpoint_format": "gptq_v2", "sym": false, "group_size": 32}"#,
        ),
        (V2, V2),
        (V2, r#"{"bits": "4", "group_size": 32.0, "sym": "false", "quant_method": "GPTQ", "checkpoint_format": null}"#),
        (V2, r#"{"w_bit": 4, "q_group_size": 32, "format": "GPTQ_V2"}"#),
        ("null", V2),
        ("{}", V2),
        (V2, r#"{"damp_percent": 0.01, "desc_act": false, "version": 2, "meta": {"quantizer": ["gptqmodel:5.0"]}}"#),
    ];
    for (first, second) in agreeing {
        let files = [(inside, &*config(first)), (alone, second)];
        let weight = load(&layer.gptq(0), &files).unwrap_or_else(|error| panic!("{files:?}: {error}"));
        assert_eq!(values(&weight), layer.expected(), "{files:?}");
    }
    for (second, first_fact, second_fact) in [
        (r#"{"bits": 8}"#, "`bits` is 4", "`bits` is 8"),
        (r#"{"group_size": 64}"#, "`group_size` is 32", "`group_size` is 64"),
        (r#"{"sym": true}"#, "`sym` is false", "`sym` is true"),
        (r#"{"checkpoint_format": "gptq"}"#, "`checkpoint_format` is \"gptq_v2\"", "is \"gptq\""),
        (r#"{"quant_method": "awq"}"#, "`quant_method` is \"gptq\"", "`quant_method` is \"awq\""),
        (r#"{"dynamic": {"+:lay.*": {"bits": 8}}}"#, "`bits` is 4", "`bits` is 8"),
    ] {
        let error = refusal(&layer.gptq(0), &[(inside, &config(V2)), (alone, second)]);
        let first_place = format!("config.json: quantization_config: {first_fact}");
        for part in [&first_place, "quantize_config.json: ", second_fact].map(str::to_owned) {
            assert!(error.contains(&part), "{part}: {error}");
        }
    }
    // One file may contradict itself.
    let both = format!(r#"{{"quantization_config": {V2}, "text_config": {{"quantization_config": {{"bits": 3}}}}}}"#);
    let error = refusal(&layer.gptq(0), &[(inside, &both)]);
    assert!(error.contains("config.json: text_config.quantization_config: `bits` is 3"), "{error}");
}

/// A contradiction or mistake affects only the layers that depend on the setting.
#[test]
fn other_layers_stay_usable() {
    let checkpoint = layer()
        .gptq(0)
        .add("plain.weight", Dtype::F32, &[2, 2], vec![0; 16])
        .add("int8.weight", Dtype::I8, &[2, 40], vec![1; 80])
        .add_f32("int8.weight_scale", &[2], &[1.0, 2.0])
        .add("fp8.weight", Dtype::F8_E4M3, &[2, 256], vec![0x38; 512])
        .add_f32("fp8.weight_scale_inv", &[1, 2], &[2.0, 4.0]);
    for (settings, fp8_loads) in [
        (r#"{"quant_method": "gptq", "bits": "four"}"#, true),
        (r#"{"quant_method": "gptq", "bits": NaN}"#, true),
        (r#"{"quant_method": "gptq", "bits": 4, "group_size": [32]}"#, true),
        (r#"{"quant_method": "hqq", "bits": 4}"#, true),
        (r#"{"quant_method": "bitsandbytes", "load_in_4bit": true}"#, true),
        (r#"{"quant_method": 7}"#, true),
        (r#"{"quant_method": "gptq", "bits": 4, "weight_block_size": "large", "group_size": 1}"#, false),
        (r#"{"quant_method": "gptq", "bits": 4, "dynamic": {"(?!layer)": {"bits": 8}}}"#, false),
        (r#"{"quant_method": "gptq", "bits": 4, "dynamic": 5}"#, false),
    ] {
        let text = format!(r#"{{"quantization_config": {settings}}}"#);
        let model = checkpoint.open_beside(&[("config.json", &text)]).unwrap_or_else(|error| panic!("{text}: {error}"));
        let error = model.weight("layer").expect_err(settings).to_string();
        assert!(matches!(&model.info("layer").expect("listed").kind, TensorKind::Opaque(why) if *why == error));
        model.weight("plain").expect("no quantization");
        model.weight("int8").expect("needs no settings");
        assert_eq!(model.weight("fp8").is_ok(), fp8_loads, "{settings}");
    }
    for (settings, named) in [
        (r#"{"quant_method": "hqq"}"#, "quantization method `hqq`"),
        (r#"{"bits": 8}"#, "fit codes of [4] bits, but config.json: quantization_config: `bits` is 8"),
        (r#"{"bits": 16}"#, "`bits` is 16, so the layer is not quantized"),
        (r#"{"bits": 4, "group_size": 16}"#, "`group_size` is 16) makes 4 groups, but there are scales for 2"),
        (r#"{"bits": -4}"#, "`bits` is -4: expected a number of bits"),
        (r#"{"bits": Infinity}"#, "`bits` is \"Infinity\": expected a number of bits"),
        (r#"{"sym": 3}"#, "`sym` is 3: expected true or false"),
        (r#"{"dynamic": {"-:.*ay.*": {}}}"#, "`bits` is 16, so the layer is not quantized"),
        (r#"{"dynamic": {"a(?=b)": {}}}"#, "the layer pattern `a(?=b)`"),
    ] {
        let error = refusal(&checkpoint, &[("config.json", &format!(r#"{{"quantization_config": {settings}}}"#))]);
        assert!(error.contains(named), "{settings}: {error}");
    }
}

/// Layers with their own width and group size, by name and by pattern.
#[test]
fn layers_have_settings_of_their_own() {
    let (four, eight, wide) = (layer(), Layer::in_groups_of(32, 64, 8, 16), Layer::in_groups_of(32, 64, 4, 64));
    let checkpoint = Checkpoint::default()
        .with_layer("model.layers.0.up_proj", four.gptq(0))
        .with_layer("model.layers.0.down_proj", eight.gptq(0))
        .with_layer("model.layers.1.down_proj", eight.gptq(1))
        .with_layer("lm_head", wide.gptq(0));
    let base = r#""bits": 4, "group_size": 32, "sym": false"#;
    let gptq = format!(
        r#"{{"quant_method": "gptq", "checkpoint_format": "gptq_v2", {base}, "dynamic": {{
            "-:.*visual.*": {{}}, "+:.*\\.1\\.down.*": {{"bits": 8, "group_size": 16, "checkpoint_format": "gptq"}},
            ".*down_proj": {{"bits": 8, "group_size": 16}}, "lm_head": {{"group_size": -1}}}}}}"#
    );
    let auto_round = format!(
        r#"{{"quant_method": "auto-round", "packing_format": "auto_round", {base}, "extra_config": {{
            ".*down_proj.*": {{"bits": 8, "group_size": 16}}, "lm_head": {{"bits": 4, "group_size": 64, "sym": null}},
            "model.layers.1.down_proj": {{"bits": 8, "group_size": "16", "packing_format": "auto_round:auto_gptq"}}}}}}"#
    );
    for settings in [gptq, auto_round] {
        let model = checkpoint.open_beside(&[("quantization_config.json", &settings)]).expect("opens");
        for (name, layer) in [
            ("model.layers.0.up_proj", &four),
            ("model.layers.0.down_proj", &eight),
            ("model.layers.1.down_proj", &eight),
            ("lm_head", &wide),
        ] {
            let weight = model.weight(name).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(values(&weight), layer.expected(), "{name}");
        }
    }
}

#[test]
fn json_is_read_as_python_writes_it() {
    let layer = layer();
    let around = |before: &str, after: &str| {
        format!(r#"{before}{{"model_type": "nemotron_h", "quantization_config": {V2}, {after}}}"#)
    };
    for text in [
        around("\u{feff}", r#""x": 1"#),
        around("", r#""time_step_limit": [0.0, Infinity]"#),
        around("", r#""limits": [-Infinity, NaN, 1e-05], "text": "NaN \" Infinity""#),
        around("\u{feff}\r\n", r#""max": 1000000000000000019884624838656, "a": null, "a": 1"#),
        around("", r#""compression_config": null, "text_config": null, "llm_config": [], "other_config": {"a": []}"#),
        around("", r#""quantization": "none", "vision_config": {"quantization_config": null}"#),
    ] {
        let weight = load(&layer.gptq(0), &[("config.json", &text)]).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(values(&weight), layer.expected(), "{text}");
    }
    // No settings: shapes decide.
    for text in ["{}", r#"{"model_type": "mamba2", "quantization_config": null}"#, r#"{"compression_config": null}"#] {
        let weight = load(&layer.gptq(1), &[("config.json", text)]).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(values(&weight), layer.expected(), "{text}");
    }
    // Settings as strings, and a numeric version.
    for settings in [
        r#"{"quant_method": "awq", "w_bit": "4", "q_group_size": "32", "zero_point": "true", "version": 2}"#,
        r#"{"quant_method": "awq", "bits": 4.0, "group_size": 32, "version": "1.0", "format": "GEMM"}"#,
        r#"{"quant_method": "AWQ", "bits": 4, "version": "Gemm", "backend": "autoawq"}"#,
    ] {
        let weight = load(&layer.awq(), &[("quant_config.json", settings)]);
        assert_eq!(
            values(&weight.unwrap_or_else(|error| panic!("{settings}: {error}"))),
            layer.expected(),
            "{settings}"
        );
    }
    let error = refusal(&layer.awq(), &[("a.json", r#"{"quant_method": "awq", "backend": "llm-awq"}"#)]);
    assert!(error.contains("llm-awq"), "{error}");
    for text in [
        "",
        "[]",
        "{",
        "\u{feff}",
        "{\"a\": Nan}",
        "[NaN]",
        r#"{"quantization_config": [4]}"#,
        r#"{"text_config": {"quantization_config": 1}}"#,
    ] {
        let error = layer.gptq(0).open_beside(&[("folder/config.json", text)]).expect_err(text);
        assert!(matches!(&error, FormatError::BadFile { file, .. } if file == "folder/config.json"), "{text}: {error}");
    }
    for text in [r#"{"a":"#.repeat(500_000), "[".repeat(1 << 20), format!(r#"{{"a": {}"#, "[{\"a\":".repeat(100_000))] {
        layer.gptq(0).open_beside(&[("config.json", &text)]).expect_err("too deep");
    }
}
