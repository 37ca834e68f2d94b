//! INT8, FP8, MXFP4 and NVFP4 layers of safetensors
//! files, and their quantizers.

use crate::checkpoint::{Checkpoint, Numbers, values};
use half::f16;
use qgemm_formats::float8::{e4m3_to_f32, e5m2_to_f32};
use qgemm_formats::{DType, Format, FormatError, HostWeight, XFormat};
use safetensors::tensor::Dtype;

const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn fp4(code: u8) -> f32 {
    let magnitude = FP4[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn bytes(count: usize, seed: u64, mut keep: impl FnMut(u8) -> bool) -> Vec<u8> {
    let mut numbers = Numbers::new(seed);
    std::iter::repeat_with(|| numbers.below(256) as u8).filter(|&byte| keep(byte)).take(count).collect()
}

fn fp8_bytes(count: usize, seed: u64) -> Vec<u8> {
    bytes(count, seed, |byte| e4m3_to_f32(byte).is_finite() && e5m2_to_f32(byte).is_finite())
}

fn scales(count: usize) -> Vec<f32> {
    (0..count).map(|i| 0.001 * (i + 1) as f32).collect()
}

#[test]
fn int8_per_channel() {
    for (n, k) in [(5, 64), (3, 70), (1, 1)] {
        let codes = bytes(n * k, 1, |_| true);
        let scale = scales(n);
        let checkpoint = Checkpoint::default().add("layer.weight", Dtype::I8, &[n, k], codes.clone());
        let expected: Vec<f32> = (0..n * k).map(|i| f32::from(codes[i] as i8) * scale[i / k]).collect();
        for shape in [vec![n], vec![n, 1]] {
            let weight = Checkpoint::default()
                .add("layer.weight", Dtype::I8, &[n, k], codes.clone())
                .add_f32("layer.weight_scale", &shape, &scale)
                .weight(None)
                .expect("loads");
            assert_eq!(weight.format().name, "int8_channel");
            assert_eq!(values(&weight), expected);
        }
        let without = checkpoint.weight(None).expect_err("no scale");
        assert!(without.to_string().contains("I8"), "{without}");
    }
}

#[test]
fn int8_with_zero_points() {
    for (n, k) in [(5, 128), (3, 300), (1, 1)] {
        let (codes, scale, zeros) = (bytes(n * k, 1, |_| true), scales(n), bytes(n, 9, |byte| byte != 0));
        let layer = |zero_shape: &[usize], zeros: &[u8]| {
            Checkpoint::default()
                .add("layer.weight", Dtype::I8, &[n, k], codes.clone())
                .add_f32("layer.weight_scale", &[n, 1], &scale)
                .add("layer.weight_zero_point", Dtype::I8, zero_shape, zeros.to_vec())
                .weight(None)
        };
        let expected = |zero: &dyn Fn(usize) -> i32| -> Vec<f32> {
            (0..n * k).map(|i| (i32::from(codes[i] as i8) - zero(i / k)) as f32 * scale[i / k]).collect()
        };
        let by_row = layer(&[n, 1], &zeros).expect("loads");
        assert_eq!(by_row.format().name, "int8_g128");
        assert_eq!(values(&by_row), expected(&|row| i32::from(zeros[row] as i8)));
        assert_eq!(values(&layer(&[1], &[0x83]).expect("loads")), expected(&|_| -125));
        // Zero points of 0 have no effect.
        let symmetric = layer(&[n, 1], &vec![0; n]).expect("loads");
        assert_eq!((symmetric.format().name, values(&symmetric)), ("int8_channel", expected(&|_| 0)));
        let error = layer(&[n + 1], &vec![1; n + 1]).expect_err("one too many").to_string();
        assert!(error.contains("layer.weight_zero_point"), "{error}");
    }
    let fp8 = |zero: u8| {
        Checkpoint::default()
            .add("layer.weight", Dtype::F8_E4M3, &[2, 2], vec![1; 4])
            .add_f32("layer.weight_scale", &[1], &[1.0])
            .add("layer.weight_zero_point", Dtype::I8, &[1], vec![zero])
            .weight(None)
    };
    assert!(fp8(0).is_ok());
    assert!(fp8(1).expect_err("means nothing").to_string().contains("zero_point"));
}

#[test]
fn what_is_not_understood_of_a_layer_is_refused() {
    let int8 = || {
        Checkpoint::default()
            .add("a.weight", Dtype::I8, &[2, 2], vec![1; 4])
            .add_f32("a.weight_scale", &[2, 1], &[1.0, 2.0])
            .add("b.weight", Dtype::I8, &[2, 2], vec![1; 4])
            .add_f32("b.weight_scale", &[2, 1], &[1.0, 2.0])
    };
    for name in ["a.weight_g_idx", "a.pre_quant_scale", "a.weight_scale_2", "a.smooth", "a.weight.absmax"] {
        let model = int8().add_f32(name, &[2], &[1.0, 2.0]).open(None);
        let error = model.weight("a").expect_err("refused").to_string();
        assert!(error.contains(&format!("`{name}`")) && error.contains("`a.weight`"), "{error}");
        assert!(model.weight("b").is_ok(), "the other layer has nothing to do with {name}");
    }
    for name in
        ["a.bias", "a.input_scale", "a.input_scale_ub", "a.k_scale", "a.lora.weight", "ab.smooth", "norm.weight"]
    {
        let model = int8().add_f32(name, &[2], &[1.0, 2.0]).open(None);
        assert!(model.weight("a").is_ok(), "{name} leaves the weight as it is");
    }
    let mxfp4 = || {
        Checkpoint::default().add("experts.up_blocks", Dtype::U8, &[1, 1, 16], vec![0; 16]).add(
            "experts.up_scales",
            Dtype::U8,
            &[1, 1],
            vec![127],
        )
    };
    let with = |name: &str| mxfp4().add_f32(name, &[1], &[1.0]).open(None).weight("experts.up").map(|_| ());
    assert!(with("experts.up_global_scale").expect_err("refused").to_string().contains("up_global_scale"));
    for name in ["experts.up_bias", "experts.up_norm", "experts.down_global_scale"] {
        assert_eq!(with(name), Ok(()), "{name}");
    }
}

#[test]
fn fp8_per_tensor_and_channel() {
    for (dtype, decode, name) in
        [(Dtype::F8_E4M3, e4m3_to_f32 as fn(u8) -> f32, "fp8_e4m3"), (Dtype::F8_E5M2, e5m2_to_f32, "fp8_e5m2")]
    {
        for (n, k) in [(4, 96), (6, 45)] {
            let codes = fp8_bytes(n * k, 2);
            let expected = |scale: &dyn Fn(usize) -> f32| -> Vec<f32> {
                (0..n * k).map(|i| decode(codes[i]) * scale(i / k)).collect()
            };
            let layer = || Checkpoint::default().add("layer.weight", dtype, &[n, k], codes.clone());
            let check = |checkpoint: Checkpoint, expected: Vec<f32>| {
                let weight = checkpoint.weight(None).expect("loads");
                assert_eq!(weight.format().name, name);
                assert_eq!(values(&weight), expected);
            };
            check(layer().add_f32("layer.weight_scale", &[], &[0.25]), expected(&|_| 0.25));
            check(layer().add_f32("layer.weight_scale", &[1], &[0.3]), expected(&|_| 0.3));
            let by_row = scales(n);
            check(layer().add_f32("layer.weight_scale", &[n, 1], &by_row), expected(&|row| by_row[row]));
            check(layer(), expected(&|_| 1.0));
            let bf16: Vec<u8> = by_row.iter().flat_map(|&s| half::bf16::from_f32(s).to_le_bytes()).collect();
            check(
                layer().add("layer.weight_scale", Dtype::BF16, &[n, 1], bf16),
                expected(&|row| half::bf16::from_f32(by_row[row]).to_f32()),
            );
        }
    }
}

#[test]
fn fp8_in_blocks() {
    for (n, k) in [(256usize, 256usize), (130, 300), (1, 129), (129, 7)] {
        let (rows, columns) = (n.div_ceil(128), k.div_ceil(128));
        let (codes, scale) = (fp8_bytes(n * k, 3), scales(rows * columns));
        let expected: Vec<f32> =
            (0..n * k).map(|i| e4m3_to_f32(codes[i]) * scale[i / k / 128 * columns + i % k / 128]).collect();
        for name in ["layer.weight_scale_inv", "layer.weight_scale"] {
            let weight = Checkpoint::default()
                .add("layer.weight", Dtype::F8_E4M3, &[n, k], codes.clone())
                .add_f32(name, &[rows, columns], &scale)
                .weight(Some(r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#))
                .expect("loads");
            assert_eq!(weight.format().name, "fp8_e4m3_block128");
            assert_eq!(values(&weight), expected);
        }
    }
}

#[test]
fn experts_that_are_layers_of_fp8() {
    const NAME: &str = "model.layers.0.mlp.experts.{}.up_proj";
    let (n, k, count) = (130usize, 300usize, 3);
    let (rows, columns) = (n.div_ceil(128), k.div_ceil(128));
    let codes: Vec<Vec<u8>> = (0..count).map(|seed| fp8_bytes(n * k, 20 + seed)).collect();
    let scale = scales(rows * columns);
    let config = r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#;
    let checkpoint = codes.iter().enumerate().fold(Checkpoint::default(), |all, (expert, codes)| {
        let layer = Checkpoint::default().add("layer.weight", Dtype::F8_E4M3, &[n, k], codes.clone()).add_f32(
            "layer.weight_scale_inv",
            &[rows, columns],
            &scale,
        );
        all.with_layer(&NAME.replace("{}", &expert.to_string()), layer)
    });
    let experts = checkpoint.open(Some(config)).experts(NAME).expect("three layers");
    assert_eq!((experts.experts(), experts.n(), experts.k()), (3, n, k));
    let all = values(experts.stacked());
    for (expert, codes) in codes.iter().enumerate() {
        let expected: Vec<f32> =
            (0..n * k).map(|i| e4m3_to_f32(codes[i]) * scale[i / k / 128 * columns + i % k / 128]).collect();
        assert_eq!(all[expert * experts.row_pitch() * k..][..n * k], expected, "expert {expert}");
    }
}

#[test]
fn fp8_in_blocks_whose_scales_are_powers_of_two() {
    let e8m0 = |byte: u8| 2f32.powi(i32::from(byte) - 127);
    type Decode = fn(u8) -> f32;
    let types: [(Dtype, Decode, [&str; 3]); 2] = [
        (Dtype::F8_E4M3, e4m3_to_f32, ["fp8_e4m3", "fp8_e4m3_block128", "mxfp8"]),
        (Dtype::F8_E5M2, e5m2_to_f32, ["fp8_e5m2", "fp8_e5m2_block128", "mxfp8_e5m2"]),
    ];
    let sizes = [(64usize, 96usize), (130, 300), (33, 40)];
    for ((dtype, decode, [by_row, by_block, by_power]), (n, k)) in
        types.into_iter().flat_map(|of| sizes.map(|size| (of, size)))
    {
        let codes = fp8_bytes(n * k, 3);
        for (rows, stated) in [(1, "[1, 32]"), (32, "[32, 32]"), (128, "[128, 128]")] {
            let columns = if rows == 128 { 128 } else { 32 };
            let shape = [n.div_ceil(rows), k.div_ceil(columns)];
            let bytes = bytes(shape[0] * shape[1], 5, |e| (100..140).contains(&e));
            let expected: Vec<f32> =
                (0..n * k).map(|i| decode(codes[i]) * e8m0(bytes[i / k / rows * shape[1] + i % k / columns])).collect();
            let numbers: Vec<f32> = bytes.iter().map(|&byte| e8m0(byte)).collect();
            let settings = format!(
                r#"{{"quantization_config": {{"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": {stated}}}}}"#
            );
            let layer = || Checkpoint::default().add("layer.weight", dtype, &[n, k], codes.clone());
            let name = "layer.weight_scale_inv";
            let all = [
                layer().add(name, Dtype::F8_E8M0, &shape, bytes.clone()),
                layer().add(name, Dtype::U8, &shape, bytes.clone()),
                layer().add_f32(name, &shape, &numbers),
            ];
            for (checkpoint, config) in all.into_iter().zip([Some(settings.as_str()), None, Some(&settings)]) {
                let weight = checkpoint.weight(config).expect("loads");
                let expected_name = match (rows, numbers.len()) {
                    // One scale per tensor becomes one scale per row.
                    (_, 1) => by_row,
                    (128, _) => by_block,
                    _ => by_power,
                };
                assert_eq!(weight.format().name, expected_name);
                assert_eq!(values(&weight), expected);
            }
            let mut wrong = numbers.clone();
            let last = wrong.len() - 1;
            wrong[last] = 0.75;
            let error = layer().add_f32(name, &shape, &wrong).weight(Some(&settings)).expect_err("no power of two");
            let text = error.to_string();
            assert!(text.contains(name) && text.contains("7.5e-1") && text.contains("power of two"), "{text}");
        }
    }
}

#[test]
fn what_is_stated_of_activations_is_kept() {
    let fp8 = |dtype: Dtype, scale: &[usize]| {
        Checkpoint::default()
            .add("layer.weight", dtype, &[2, 4], vec![1; 8])
            .add_f32("layer.weight_scale", scale, &vec![1.0; scale.iter().product()])
            .add_f32("layer.input_scale", &[1], &[0.5])
    };
    let group = |number: u32, strategy: &str, dynamic: &str| {
        format!(
            r#""group_{number}": {{"weights": {{"num_bits": 8, "type": "float"}}, "input_activations":
            {{"num_bits": 8, "type": "float", "strategy": "{strategy}", "group_size": 128, "dynamic": {dynamic}}}}}"#
        )
    };
    let groups = |all: &[String]| {
        let method = r#""quant_method": "compressed-tensors""#;
        format!(r#"{{"quantization_config": {{{method}, "config_groups": {{{}}}}}}}"#, all.join(","))
    };
    let fp8_method = |rest: &str| format!(r#"{{"quantization_config": {{"quant_method": "fp8"{rest}}}}}"#);
    let integers = r#""group_9": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": null}"#.to_owned();
    let (token, block, tensor) = (Some(XFormat::E4M3Token), Some(XFormat::E4M3Block), Some(XFormat::E4M3Tensor));
    for (config, expected) in [
        (fp8_method(r#", "activation_scheme": "dynamic""#), token),
        (fp8_method(r#", "activation_scheme": "dynamic", "weight_block_size": [128, 128]"#), block),
        (fp8_method(r#", "activation_scheme": "static""#), tensor),
        (fp8_method(r#", "activation_scheme": "sometimes""#), None),
        (fp8_method(""), None),
        (groups(&[group(0, "token", "true")]), token),
        (groups(&[group(0, "group", "true"), integers.clone()]), block),
        (groups(&[group(0, "tensor", "false")]), tensor),
        (groups(&[group(0, "tensor", "true")]), None),
        (groups(&[group(0, "token", "\"local\"")]), None),
        (groups(&[group(0, "token", "true"), group(1, "token", "true")]), token),
        (groups(&[group(0, "token", "true"), group(1, "tensor", "false")]), None),
        (groups(std::slice::from_ref(&integers)), None),
    ] {
        let scale: &[usize] = if config.contains("weight_block_size") { &[1, 1] } else { &[2] };
        for dtype in [Dtype::F8_E4M3, Dtype::F8_E5M2] {
            let weight = fp8(dtype, scale).weight(Some(&config)).expect("loads");
            assert_eq!(weight.stated_x(), expected, "{config}");
            let pair = HostWeight::gated_pair(&weight, &weight).expect("alike");
            let rows = HostWeight::concat_rows(&[&weight, &weight]).expect("alike");
            assert_eq!([pair.stated_x(), rows.stated_x()], [expected; 2], "{config}");
            let plain = weight.clone().with_stated_x(None);
            assert_eq!(HostWeight::concat_rows(&[&weight, &plain]).expect("alike").stated_x(), None);
        }
        // Activation settings apply to FP8 layers only.
        assert_eq!(fp8(Dtype::I8, &[2]).weight(Some(&config)).expect("loads").stated_x(), None, "{config}");
    }
}

#[test]
fn experts_of_layers_of_their_own() {
    let (n, k) = (2, 32);
    let numbers = |expert: usize| DType::F32.encode(&vec![expert as f32; n * k]);
    let (mut checkpoint, names) = (Checkpoint::default(), ["mlp.experts.{}.gate", "mlp.experts.{}.up"]);
    for (name, count) in names.into_iter().zip([3, 2]) {
        for expert in 0..count {
            let name = format!("{}.weight", name.replace("{}", &expert.to_string()));
            checkpoint = checkpoint.add(&name, Dtype::F32, &[n, k], numbers(expert));
        }
    }
    let model = checkpoint.open(None);
    let experts = model.experts(names[0]).expect("three layers");
    assert_eq!((experts.experts(), experts.n(), experts.k()), (3, n, k));
    let of_last = 2 * experts.row_pitch() * k;
    assert_eq!(values(experts.stacked())[of_last..of_last + n * k], vec![2.0; n * k]);
    assert!(matches!(
        model.gated_experts(names[0], names[1]),
        Err(FormatError::MissingExpert { expert: 2, there, .. }) if there == "mlp.experts.2.gate.weight"
    ));
    assert!(matches!(model.experts("mlp.experts.{}.down"), Err(FormatError::NoSuchTensor { .. })));
}

#[test]
fn pairs_of_gpt_oss_alternate_row_by_row_as_their_biases_do() {
    let (experts, features, k) = (2, 5, 64);
    let n = 2 * features;
    let codes = bytes(experts * n * k / 2, 6, |_| true);
    let exponents = bytes(experts * n * k / 32, 7, |e| (100..140).contains(&e));
    let biases: Vec<f32> = (0..experts * n).map(|i| i as f32).collect();
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let model = Checkpoint::default()
        .add(&format!("{name}_blocks"), Dtype::U8, &[experts, n, k / 32, 16], codes)
        .add(&format!("{name}_scales"), Dtype::U8, &[experts, n, k / 32], exponents)
        .add(&format!("{name}_bias"), Dtype::BF16, &[experts, n], DType::BF16.encode(&biases))
        .add("uneven_bias", Dtype::BF16, &[experts, 3], vec![0; experts * 6])
        .add("flat_bias", Dtype::BF16, &[4], vec![0; 8])
        .open(None);
    let loaded = model.interleaved_experts(name).expect("pairs");
    assert_eq!((loaded.experts(), loaded.n(), loaded.k(), loaded.is_gated()), (experts, features, k, true));
    let stacked = values(loaded.stacked());
    for expert in 0..experts {
        let rows = values(&model.stacked_weight(name, expert).expect("loads"));
        for feature in 0..features {
            for part in [0, 1] {
                // A gated pair interleaves gate and up in runs of 8 rows.
                let at = expert * loaded.row_pitch() + part * 8 + feature;
                let row = 2 * feature + part;
                assert_eq!(stacked[at * k..(at + 1) * k], rows[row * k..(row + 1) * k], "row {row} of {expert}");
            }
        }
    }
    let wanted = [0.0, 2.0, 4.0, 6.0, 8.0, 1.0, 3.0, 5.0, 7.0, 9.0];
    let got = model.interleaved_biases(&format!("{name}_bias")).expect("a row an expert");
    assert_eq!((&got[..n], got[n]), (&wanted[..], 10.0));
    for (bias, why) in [("uneven_bias", "got 3"), ("flat_bias", "[4]")] {
        let error = model.interleaved_biases(bias).expect_err("not by turns");
        assert!(matches!(&error, FormatError::BadFile { .. }) && error.to_string().contains(why), "{error}");
    }
    let odd = Checkpoint::default()
        .add("up_blocks", Dtype::U8, &[1, 3, 1, 16], vec![0; 48])
        .add("up_scales", Dtype::U8, &[1, 3, 1], vec![127; 3])
        .open(None);
    assert!(matches!(
        odd.interleaved_experts("up"),
        Err(FormatError::PairMismatch { what: "number of alternate rows", .. })
    ));
    assert!(matches!(odd.interleaved_experts("down"), Err(FormatError::NoSuchTensor { .. })));
}

#[test]
fn mxfp4_experts() {
    let (experts, n, k) = (3, 4, 64);
    let codes = bytes(experts * n * k / 2, 4, |_| true);
    let exponents = bytes(experts * n * k / 32, 5, |e| (100..140).contains(&e));
    let model = Checkpoint::default()
        .add("mlp.experts.up_blocks", Dtype::U8, &[experts, n, k / 32, 16], codes.clone())
        .add("mlp.experts.up_scales", Dtype::U8, &[experts, n, k / 32], exponents.clone())
        .open(None);
    let info = model.info("mlp.experts.up").expect("listed");
    assert_eq!(info.shape, [experts, n, k]);
    for expert in 0..experts {
        let weight = model.stacked_weight("mlp.experts.up", expert).expect("loads");
        assert_eq!(weight.format().name, "mxfp4");
        let expected: Vec<f32> = (expert * n * k..(expert + 1) * n * k)
            .map(|i| fp4(codes[i / 2] >> (4 * (i % 2)) & 15) * 2f32.powi(i32::from(exponents[i / 32]) - 127))
            .collect();
        assert_eq!(values(&weight), expected);
    }
    assert!(matches!(model.weight("mlp.experts.up"), Err(FormatError::UnsupportedFile { .. })));
    assert!(matches!(model.stacked_weight("mlp.experts.up", 3), Err(FormatError::BadFile { .. })));
}

#[test]
fn nvfp4_of_both_writers() {
    let (n, k) = (3, 48);
    let codes = bytes(n * k / 2, 6, |_| true);
    let block_scales = fp8_bytes(n * k / 16, 7);
    let expected = |tensor_scale: f32| -> Vec<f32> {
        // The block's part is exact; the tensor scale rounds once.
        let block = |i: usize| fp4(codes[i / 2] >> (4 * (i % 2)) & 15) * e4m3_to_f32(block_scales[i / 16]);
        (0..n * k).map(|i| block(i) * tensor_scale).collect()
    };
    let parts = |codes_name: &str| {
        Checkpoint::default().add(codes_name, Dtype::U8, &[n, k / 2], codes.clone()).add(
            "layer.weight_scale",
            Dtype::F8_E4M3,
            &[n, k / 16],
            block_scales.clone(),
        )
    };
    let model_opt = parts("layer.weight").add_f32("layer.weight_scale_2", &[], &[0.0123]).weight(None).expect("loads");
    assert_eq!(model_opt.format().name, "nvfp4");
    assert_eq!(values(&model_opt), expected(0.0123));
    let compressed = parts("layer.weight_packed").add_f32("layer.weight_global_scale", &[1], &[8.0]);
    assert_eq!(values(&compressed.weight(None).expect("loads")), expected(0.125));
}

#[test]
fn plain_matrices_are_weights_too() {
    let numbers = [1.0f32, -2.5, 0.25, 1024.0, -0.5, 3.0];
    let half_bytes = numbers.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
    let model = Checkpoint::default()
        .add_f32("a.weight", &[2, 3], &numbers)
        .add("b.weight", Dtype::F16, &[3, 2], half_bytes)
        .add_f32("norm.weight", &[6], &numbers)
        .add_f32("experts", &[2, 1, 3], &numbers)
        .add("ids", Dtype::I64, &[1], vec![0; 8])
        .open(None);
    for (name, format) in [("a", "f32"), ("b", "f16")] {
        let weight = model.weight(name).expect("loads");
        assert_eq!(weight.format().name, format);
        assert_eq!(values(&weight), numbers);
    }
    assert_eq!(values(&model.stacked_weight("experts", 1).expect("loads")), numbers[3..]);
    assert!(matches!(model.weight("norm"), Err(FormatError::UnsupportedFile { .. })));
    assert!(matches!(model.weight("ids"), Err(FormatError::UnsupportedFile { .. })));
    assert_eq!(model.dense("norm").expect("dense").to_f32(), numbers);
}

#[test]
fn shards_are_one_model() {
    let first = Checkpoint::default().add("a.weight", Dtype::I8, &[1, 2], vec![1, 2]);
    let second = Checkpoint::default().add_f32("a.weight_scale", &[1], &[2.0]);
    let open = |shards: &[&Checkpoint]| {
        let shards: Vec<_> = shards.iter().map(|shard| shard.bytes().into()).collect();
        qgemm_formats::model::Model::from_shards(&shards, None, Default::default())
    };
    let model = open(&[&first, &second]).expect("a model");
    assert_eq!(values(&model.weight("a").expect("loads")), [2.0, 4.0]);
    assert!(matches!(open(&[&first, &first]), Err(FormatError::BadFile { .. })));
}

#[test]
fn wrong_scales_are_refused() {
    let fp8 = |shape: &[usize], values: &[f32], config: Option<&str>| {
        Checkpoint::default()
            .add("layer.weight", Dtype::F8_E4M3, &[200, 200], vec![1; 40_000])
            .add_f32("layer.weight_scale", shape, values)
            .weight(config)
            .expect_err("refused")
    };
    let text = fp8(&[3], &[1.0; 3], None).to_string();
    assert!(text.contains("[2, 2], [7, 7], [200, 7]") && text.contains("got [3]"), "{text}");
    assert!(fp8(&[2, 2], &[1.0; 4], Some(r#"{"weight_block_size": [64, 64]}"#)).to_string().contains("[128, 128]"));
    assert!(matches!(fp8(&[], &[f32::NAN], None), FormatError::NonFiniteScale { .. }));
    assert_eq!(
        fp8(&[2, 2], &[1.0, 1.0, 1.0, f32::INFINITY], None),
        FormatError::NonFiniteScale { what: "layer.weight".into(), row: 128, block: 1 }
    );
    let mx = Checkpoint::default()
        .add("layer_blocks", Dtype::U8, &[2, 1, 16], vec![0; 32])
        .add("layer_scales", Dtype::U8, &[2, 1], vec![127, 255])
        .weight(None);
    assert!(matches!(mx, Err(FormatError::NonFiniteScale { row: 1, block: 0, .. })));
    let nv = Checkpoint::default()
        .add("layer.weight", Dtype::U8, &[1, 16], vec![0; 16])
        .add("layer.weight_scale", Dtype::F8_E4M3, &[1, 2], vec![0x38, 0x7f])
        .add_f32("layer.weight_scale_2", &[], &[1.0])
        .weight(None);
    assert!(matches!(nv, Err(FormatError::NonFiniteScale { row: 0, block: 1, .. })));
}

/// Values with a mean and outliers.
fn layer_values(n: usize, k: usize) -> Vec<f32> {
    let mut numbers = Numbers::new(8);
    (0..n * k)
        .map(|i| {
            let x = numbers.below(2000) as f32 / 1000.0 - 0.9;
            if i % 97 == 0 { x * 20.0 } else { x }
        })
        .collect()
}

fn quantize(format: &str, x: &[f32], n: usize, k: usize) -> Result<HostWeight, FormatError> {
    let format: Format = format.parse().expect("a format");
    format.quantize_matrix.expect("a whole-matrix quantizer")(x, n, k)
}

#[test]
fn whole_matrix_quantizers_round_to_nearest() {
    // Maximum error relative to the largest value of the
    // scale: half the widest step.
    for (format, rows, columns, limit) in [
        ("int8_channel", 1, usize::MAX, 0.5 / 127.0),
        ("fp8_e4m3", 1, usize::MAX, 16.0 / 448.0),
        ("fp8_e5m2", 1, usize::MAX, 4096.0 / 57344.0),
        ("fp8_e4m3_block128", 128, 128, 16.0 / 448.0),
        ("fp8_e5m2_block128", 128, 128, 4096.0 / 57344.0),
        // The block scale itself is rounded by up to 1/16, which can also
        // clip the largest value.
        ("nvfp4", 1, 16, 1.0 / 6.0 * 17.0 / 16.0),
    ] {
        for (n, k) in [(3, 256), (130, 300), (1, 33)] {
            let x = layer_values(n, k);
            let weight = quantize(format, &x, n, k).expect("quantizes");
            let y = values(&weight);
            for first_row in (0..n).step_by(rows) {
                for from in (0..k).step_by(columns.min(k)) {
                    let sharing = (first_row..(first_row + rows).min(n))
                        .flat_map(|row| row * k + from..row * k + from.saturating_add(columns).min(k));
                    let largest = sharing.clone().fold(0.0f32, |max, i| max.max(x[i].abs()));
                    for i in sharing {
                        let error = (x[i] - y[i]).abs();
                        assert!(error <= largest * limit * 1.0001, "{format} {n}x{k}, value {i}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn whole_matrix_quantizers_take_zeros_and_tiny_values() {
    for format in ["int8_channel", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3_block128", "fp8_e5m2_block128", "nvfp4"] {
        let zeros = quantize(format, &[0.0; 66], 2, 33).expect("quantizes");
        assert_eq!(values(&zeros), [0.0; 66], "{format}");
        let tiny = quantize(format, &[1e-45; 66], 2, 33).expect("quantizes");
        assert!(values(&tiny).iter().all(|v| v.is_finite()), "{format}");
        assert!(matches!(quantize(format, &[f32::NAN; 33], 1, 33), Err(FormatError::NotQuantizable { .. })));
        assert!(matches!(quantize(format, &[0.0; 33], 1, 34), Err(FormatError::WrongLength { .. })));
        assert!(matches!(quantize(format, &[], 0, 34), Err(FormatError::ZeroDimension { .. })));
        assert!(matches!(quantize(format, &[], 34, 0), Err(FormatError::ZeroDimension { .. })));
        assert!(matches!(quantize(format, &[], usize::MAX, 2), Err(FormatError::Overflow { .. })));
    }
}

#[test]
fn grouped_quantizers_keep_zero_and_half_a_step() {
    for format in Format::all().filter(|f| f.name.starts_with("int") && f.quantize_blocks.is_some()) {
        let group = format.block_len;
        for offset in [-1.0, 0.0, 0.4, 30.0] {
            let mut x: Vec<f32> = layer_values(1, group).iter().map(|v| v + offset).collect();
            x[3] = 0.0;
            let mut block = vec![0; format.block_bytes];
            format.quantize_blocks.expect("has one")(&x, &mut block);
            let mut y = vec![1.0; group];
            (format.dequantize_block)(&block, &mut y);
            assert_eq!(y[3], 0.0, "{format}: zero is exact");
            let (low, high) = x.iter().fold((0.0f32, 0.0f32), |(low, high), &v| (low.min(v), high.max(v)));
            let step = (high - low) / ((1u32 << format.code_bits()) - 1) as f32;
            // Rounding costs half a step, and the zero point up to half a step at the
            // ends. The f16 scale moves the ends by 2^-11 of the range.
            let limit = step + (high - low) / 2048.0;
            assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() <= limit), "{format} + {offset}");
        }
        for (extreme, finite) in [(0.0, true), (1e-30, true), (1e4, true), (3e38, false)] {
            let x: Vec<f32> = (0..group).map(|i| if i % 2 == 0 { extreme } else { -extreme }).collect();
            let mut block = vec![0xff; format.block_bytes];
            format.quantize_blocks.expect("has one")(&x, &mut block);
            // A scale beyond f16 becomes infinite, never clipped weights.
            assert_eq!(format.float_scales[0].is_finite(&block), finite, "{format} of {extreme}");
        }
    }
}

#[test]
fn one_is_added_to_a_stored_distance_after_widening() {
    // BF16 would round 1 + 2⁻¹⁰ to 1.
    let distances = [0.0, 2f32.powi(-10), -1.0, 0.25, 3.0, -2f32.powi(-20)];
    let model = Checkpoint::default().add("norm.weight", Dtype::BF16, &[6], DType::BF16.encode(&distances)).open(None);
    let gamma = model.dense("norm").expect("a tensor").one_plus();
    assert_eq!((gamma.dtype, &gamma.shape[..]), (DType::F32, &[6][..]));
    assert_eq!(gamma.to_f32(), distances.map(|v| 1.0 + v));
    assert!(gamma.to_f32()[1] > 1.0 && gamma.to_f32()[5] < 1.0);
}
