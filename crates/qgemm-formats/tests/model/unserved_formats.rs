//! Unsupported formats: a layer is refused by the format's name,
//! and the other layers load.

use crate::checkpoint::Checkpoint;
use qgemm_formats::model::TensorKind;
use qgemm_formats::{FormatError, model::gguf::ggml_type_name};
use safetensors::tensor::Dtype::{self, BF16, F8_E4M3, F16, F32, I8, I16, I32, I64, U8};

/// Format name, settings below `quantization_config`, and the tensors of a layer.
type Case = (&'static str, &'static str, &'static [(&'static str, Dtype, &'static [usize])]);

const CASES: &[Case] = &[
    (
        "int8 with a scale for each group of columns (compressed-tensors int-quantized)",
        r#"{"quant_method": "compressed-tensors", "format": "int-quantized"}"#,
        &[("weight", I8, &[8, 64]), ("weight_scale", F32, &[8, 2])],
    ),
    (
        "compressed-tensors marlin-24",
        r#"{"quant_method": "compressed-tensors", "format": "marlin-24"}"#,
        &[("weight_packed", I32, &[2, 16]), ("scale_packed", F16, &[1, 8]), ("meta", I16, &[2, 8])],
    ),
    (
        "Quark MXFP6_e2m3",
        r#"{"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e2m3"}}}"#,
        &[("weight", U8, &[8, 48]), ("weight_scale", U8, &[8, 2])],
    ),
    (
        "torchao int4",
        r#"{"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8DynamicActivationInt4WeightConfig"}}}"#,
        &[("_weight_qdata", I8, &[8, 64]), ("_weight_scale", BF16, &[8, 2]), ("_weight_zero_point", I8, &[8, 2])],
    ),
    ("HQQ", r#"{"quant_method": "hqq"}"#, &[("W_q", U8, &[4, 64]), ("scale", F16, &[8, 1]), ("zero", F16, &[8, 1])]),
    (
        "AQLM",
        r#"{"quant_method": "aqlm"}"#,
        &[("codes", I16, &[8, 8, 1]), ("codebooks", F16, &[1, 16, 1, 8]), ("scales", F16, &[8, 1, 1, 1])],
    ),
    ("QuIP#", r#"{"quant_method": "quip"}"#, &[("Qidxs", I64, &[8, 1]), ("SU", F16, &[64]), ("SV", F16, &[8])]),
    (
        "EETQ",
        r#"{"quant_method": "eetq", "weights": "int8"}"#,
        &[("weight", I8, &[64, 8]), ("weight_scales", F16, &[8])],
    ),
    (
        "SpQR",
        r#"{"quant_method": "spqr"}"#,
        &[("dense_weights", I64, &[64]), ("row_offsets", I32, &[9]), ("col_vals", I32, &[4]), ("in_perm", I16, &[64])],
    ),
    (
        "VPTQ",
        r#"{"quant_method": "vptq"}"#,
        &[("indices", I32, &[1, 8, 8]), ("centroids.weight", F16, &[1, 512]), ("weight_bias", F16, &[64])],
    ),
    (
        "EXL2",
        r#"{"quant_method": "exl2"}"#,
        &[("q_weight", I32, &[8, 8]), ("q_scale", I32, &[2, 1]), ("q_groups", I16, &[4]), ("q_invperm", I32, &[64])],
    ),
    ("EXL3", r#"{"quant_method": "exl3"}"#, &[("trellis", I16, &[4, 4, 64]), ("suh", F16, &[64]), ("svh", F16, &[64])]),
    ("QTIP", "{}", &[("trellis", I16, &[4, 64]), ("SU", F16, &[64]), ("SV", F16, &[64]), ("tlut", F16, &[512, 2])]),
    (
        "HIGGS",
        r#"{"quant_method": "higgs"}"#,
        &[("weight", U8, &[8, 8]), ("scales", F16, &[8, 1]), ("tables2", F16, &[16, 2])],
    ),
    (
        "FP-Quant",
        r#"{"quant_method": "fp_quant"}"#,
        &[("qweight", U8, &[8, 32]), ("scales", U8, &[8, 2]), ("forward_hadamard_matrix", BF16, &[32, 32])],
    ),
    ("BitNet 1.58 bit", r#"{"quant_method": "bitnet"}"#, &[("weight", U8, &[2, 64]), ("weight_scale", BF16, &[1])]),
    ("quanto", "{}", &[("weight._data", I8, &[8, 64]), ("weight._scale", F32, &[8, 1])]),
    (
        "QQQ",
        r#"{"quant_method": "qqq"}"#,
        &[("B", I32, &[4, 16]), ("s_channel", F32, &[1, 8]), ("s_group", F16, &[1, 8])],
    ),
    ("Marlin int4", "{}", &[("B", I32, &[4, 16]), ("s", F16, &[1, 8])]),
    ("Mistral FP8", "{}", &[("weight", F8_E4M3, &[8, 64]), ("qscale_weight", F32, &[])]),
    (
        "ModelOpt NVFP4_AWQ",
        r#"{"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}"#,
        &[
            ("weight", U8, &[8, 32]),
            ("weight_scale", F8_E4M3, &[8, 4]),
            ("weight_scale_2", F32, &[]),
            ("pre_quant_scale", BF16, &[64]),
        ],
    ),
    (
        "ModelOpt W4A16_AWQ",
        r#"{"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}"#,
        &[("weight", U8, &[4, 64]), ("weight_scale", F32, &[8, 1])],
    ),
    // The error names an unknown method.
    ("`sinq`", r#"{"quant_method": "sinq"}"#, &[("weight", I16, &[8, 64]), ("scale_a", F32, &[8])]),
];

/// Checkpoint with the case's layer and loadable layers.
fn checkpoint(tensors: &[(&str, Dtype, &[usize])], module: &str) -> Checkpoint {
    let beside = Checkpoint::default()
        .add_f32("plain.weight", &[2, 2], &[1.0; 4])
        .add("int8.weight", I8, &[2, 2], vec![1; 4])
        .add_f32("int8.weight_scale", &[2], &[1.0, 2.0])
        .add_f32("layer.bias", &[8], &[0.0; 8]);
    tensors.iter().fold(beside, |all, (name, dtype, shape)| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        all.add(&format!("{module}.{name}"), *dtype, shape, vec![1; bytes])
    })
}

#[test]
fn each_is_named_and_concerns_itself_alone() {
    for (format, settings, tensors) in CASES {
        let config = format!(r#"{{"architectures": ["X"], "quantization_config": {settings}}}"#);
        let model = checkpoint(tensors, "layer").open(Some(&config));
        let error = model.weight("layer").expect_err(format);
        let FormatError::UnsupportedFile { file, what } = &error else { panic!("{format}: {error}") };
        assert!(file == "tensor `layer.weight`" && what.contains(format), "expected {format}: {error}");
        let info = model.info("layer").expect("listed");
        assert!(matches!(&info.kind, TensorKind::Opaque(why) if why.contains(format)), "{format}: {info:?}");
        for name in ["plain", "int8"] {
            model.weight(name).unwrap_or_else(|error| panic!("{name} beside {format}: {error}"));
        }
        let names: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        assert!(model.dense("layer.bias").is_ok(), "{format}");
        let served = ["int-quantized"].iter().any(|kind| format.contains(kind)) || format.contains('`');
        assert!(served || names.len() == 4, "{format} leaves tensors: {names:?}");
    }
}

#[test]
fn layers_that_lack_a_tensor_name_it() {
    let nvfp4 = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#;
    type Lacking<'a> = (&'a str, &'a [(&'a str, Dtype, &'a [usize])], &'a str, &'a [&'a str]);
    let cases: &[Lacking<'_>] = &[
        ("{}", &[("qweight", I32, &[8, 8]), ("qzeros", I32, &[1, 1])], "GPTQ", &["layer.scales"]),
        ("{}", &[("weight", U8, &[8, 32]), ("weight_scale", F8_E4M3, &[8, 4])], "NVFP4", &["layer.weight_scale_2"]),
        (nvfp4, &[("weight", U8, &[8, 32])], "NVFP4", &["layer.weight_scale"]),
        (
            "{}",
            &[("weight_packed", U8, &[8, 32]), ("weight_scale", F8_E4M3, &[8, 4])],
            "NVFP4",
            &["layer.weight_global_scale"],
        ),
        ("{}", &[("weight_packed", I32, &[8, 8])], "pack-quantized", &["layer.weight_scale"]),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors"}}"#,
            &[("weight", I8, &[8, 8])],
            "INT8",
            &["layer.weight_scale"],
        ),
    ];
    for (config, tensors, expected, lacks) in cases {
        let model = checkpoint(tensors, "layer").open(Some(config));
        match model.weight("layer").expect_err(expected) {
            FormatError::MissingTensor { layer, format, tensors, shard: None } => {
                assert_eq!(layer, "layer.weight");
                assert_eq!(tensors, *lacks);
                assert!(format.contains(expected), "{format}");
            }
            error => panic!("{expected}: {error}"),
        }
        assert!(model.weight("plain").is_ok() && model.weight("int8").is_ok());
    }
}

#[test]
fn tensors_of_modules_that_are_not_quantized_are_what_they_are() {
    let config = |list: &str| {
        format!(r#"{{"quantization_config": {{"quant_method": "sinq", "modules_to_not_convert": [{list}]}}}}"#)
    };
    let checkpoint = || checkpoint(&[("weight", I16, &[2, 4])], "layer");
    assert!(checkpoint().open(Some(&config(""))).numbers("layer.weight").expect("listed").is_none());
    assert!(checkpoint().open(Some(&config(r#""layer""#))).numbers("layer.weight").expect("listed").is_some());
}

#[test]
fn ggml_types_have_their_names() {
    for (number, name) in [(4, "Q4_2"), (16, "IQ2_XXS"), (31, "Q4_0_4_4"), (34, "TQ1_0"), (40, "NVFP4"), (41, "Q1_0")] {
        assert_eq!(ggml_type_name(number), Some(name));
    }
    assert_eq!(ggml_type_name(9999), None);
}
