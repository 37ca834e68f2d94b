//! Expert weights as one layer per expert, and
//! as one stacked tensor.

use std::collections::BTreeMap;

use crate::checkpoint::{Checkpoint, Numbers, values};
use qgemm_formats::float8::e4m3_to_f32;
use qgemm_formats::{DType, FormatError};
use safetensors::tensor::Dtype;

const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn fp4(code: u8) -> f32 {
    FP4[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 }
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut numbers = Numbers::new(seed);
    (0..count).map(|_| numbers.below(126) as u8).collect()
}

fn scales(count: usize) -> Vec<f32> {
    (0..count).map(|i| 0.25 * (i + 1) as f32).collect()
}

/// One layer for each of these experts and weight names.
fn layers(experts: &[(usize, &[&str])]) -> Checkpoint {
    let weights = experts.iter().flat_map(|(expert, names)| names.iter().map(move |name| (expert, name)));
    weights.fold(Checkpoint::default(), |all, (expert, name)| {
        let values = DType::F32.encode(&[*expert as f32; 32]);
        all.add(&format!("mlp.experts.{expert}.{name}.weight"), Dtype::F32, &[1, 32], values)
    })
}

#[test]
fn a_gap_in_the_numbers_names_the_missing_expert() {
    let (down, all) = (&["down"][..], &["gate", "up", "down"][..]);
    type Case<'a> = (&'a [(usize, &'a [&'a str])], &'a str, usize, &'a str);
    let cases: [Case<'_>; 6] = [
        (&[(0, down), (1, down), (3, down)], "down", 2, "mlp.experts.3.down.weight"),
        (&[(1, down)], "down", 0, "mlp.experts.1.down.weight"),
        (&[(0, all), (1, all), (2, &["gate", "down"])], "up", 2, "mlp.experts.2."),
        (&[(0, &["gate", "up"]), (1, all)], "down", 0, "mlp.experts.0."),
        (&[(0, all), (1, &["gate"]), (2, all)], "down", 1, "mlp.experts.1.gate.weight"),
        (&[(0, down), (usize::MAX, down)], "down", 1, "mlp.experts.18446744073709551615.down.weight"),
    ];
    for (experts, name, missing, there) in cases {
        let name = format!("mlp.experts.{{}}.{name}");
        let error = layers(experts).open(None).experts(&name).expect_err("a gap");
        let text = error.to_string();
        assert!(
            matches!(&error, FormatError::MissingExpert { expert, there: t, .. } if *expert == missing && t.starts_with(there)),
            "{error:?}"
        );
        assert!(text.contains(&format!("expert {missing} is missing")), "{text}");
    }
    let whole = layers(&[(0, all), (1, all)]).open(None);
    assert_eq!(whole.gated_experts("mlp.experts.{}.gate", "mlp.experts.{}.up").expect("whole").experts(), 2);
    let part = whole.experts_in("mlp.experts.{}.down", Some(1..2)).expect("there");
    assert_eq!((part.experts(), part.stacked().dequantize().expect("finite")[0]), (1, 1.0));
    for range in [1..3, usize::MAX..usize::MAX] {
        let error = whole.experts_in("mlp.experts.{}.down", Some(range)).expect_err("beyond");
        assert!(matches!(error, FormatError::NoRange { what: "experts", len: 2, .. }), "{error:?}");
    }
    assert!(matches!(whole.experts("mlp.experts.{}.dwn"), Err(FormatError::NoSuchTensor { .. })), "a wrong name");
    // Names that resemble an expert id but have leading
    // zeros or other text.
    let odd = layers(&[(0, down)]).add_f32("mlp.experts.01.down.weight", &[1, 32], &[0.0; 32]);
    assert_eq!(odd.open(None).experts("mlp.experts.{}.down").expect("one").experts(), 1);
}

#[test]
fn experts_in_other_shards_are_missed() {
    let shard = "model-2.safetensors".to_owned();
    let others = BTreeMap::from([("mlp.experts.2.down.weight".to_owned(), shard.clone())]);
    let model = layers(&[(0, &["down"]), (1, &["down"])]).open(None).with_other_shards(others);
    let error = model.experts("mlp.experts.{}.down").expect_err("the third is elsewhere");
    assert_eq!(error, FormatError::InOtherShard { name: "mlp.experts.2.down.weight".into(), shard });
}

#[test]
fn fused_fp8_experts() {
    let (experts, n, k) = (3usize, 130usize, 260usize);
    let codes = bytes(experts * n * k, 1);
    let blocks = [n.div_ceil(128), k.div_ceil(128)];
    type At = fn(usize, usize, usize) -> usize;
    let cases: [(&[usize], &str, At); 9] = [
        (&[], "fp8_e4m3", |_, _, _| 0),
        (&[1], "fp8_e4m3", |_, _, _| 0),
        (&[1, 1, 1], "fp8_e4m3", |_, _, _| 0),
        (&[experts], "fp8_e4m3", |e, _, _| e),
        (&[experts, 1], "fp8_e4m3", |e, _, _| e),
        (&[experts, 1, 1], "fp8_e4m3", |e, _, _| e),
        (&[experts, n], "fp8_e4m3", |e, row, _| e * 130 + row),
        (&[experts, n, 1], "fp8_e4m3", |e, row, _| e * 130 + row),
        (&[experts, blocks[0], blocks[1]], "fp8_e4m3_block128", |e, row, column| {
            (e * 2 + row / 128) * 3 + column / 128
        }),
    ];
    for (shape, format, at) in cases {
        let scales = scales(shape.iter().product());
        for (name, scale) in [
            ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_scale"),
            ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_scale_inv"),
            ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_weight_scale"),
            ("mlp.experts.down_proj.weight", "mlp.experts.down_proj.weight_scale"),
        ] {
            let model = Checkpoint::default()
                .add(name, Dtype::F8_E4M3, &[experts, n, k], codes.clone())
                .add_f32(scale, shape, &scales)
                .add_f32(&format!("{}_bias", name.trim_end_matches(".weight")), &[experts, n], &vec![0.0; experts * n])
                .open(Some(r#"{"quantization_config": {"quant_method": "fp8"}}"#));
            let info = model.info(name).expect("listed");
            assert_eq!((&info.shape[..], info.bytes), (&[experts, n, k][..], codes.len() + 4 * scales.len()));
            for expert in 0..experts {
                let weight = model.stacked_weight(name, expert).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
                assert_eq!(weight.format().name, format);
                let value = |i: usize| e4m3_to_f32(codes[expert * n * k + i]) * scales[at(expert, i / k, i % k)];
                assert_eq!(values(&weight), (0..n * k).map(value).collect::<Vec<_>>(), "{shape:?}, expert {expert}");
            }
            let stacked = model.experts(name).expect("a stack");
            assert_eq!((stacked.experts(), stacked.n(), stacked.k()), (experts, n, k));
            assert!(model.stacked_weight(name, experts).is_err() && model.weight(name).is_err());
        }
    }
}

#[test]
fn fused_fp8_experts_without_their_scales() {
    let model = |config| Checkpoint::default().add("e.up", Dtype::F8_E4M3, &[2, 2, 4], vec![0x38; 16]).open(config);
    assert_eq!(values(&model(None).stacked_weight("e.up", 1).expect("plain")), [1.0; 8]);
    let config = Some(r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#);
    let error = model(config).experts("e.up").expect_err("promised");
    assert!(matches!(&error, FormatError::MissingTensor { tensors, .. } if tensors[0] == "e.up_scale"), "{error}");
}

#[test]
fn fused_nvfp4_experts_of_both_writers() {
    let (experts, n, k) = (3usize, 5usize, 48usize);
    let (codes, block_scales) = (bytes(experts * n * k / 2, 2), bytes(experts * n * k / 16, 3));
    let expected = |expert: usize, scale: f32| -> Vec<f32> {
        let value = |i: usize| fp4(codes[i / 2] >> (4 * (i % 2)) & 15) * e4m3_to_f32(block_scales[i / 16]) * scale;
        (expert * n * k..(expert + 1) * n * k).map(value).collect()
    };
    let parts = |codes_name: &str, scales_name: &str| {
        Checkpoint::default().add(codes_name, Dtype::U8, &[experts, n, k / 2], codes.clone()).add(
            scales_name,
            Dtype::F8_E4M3,
            &[experts, n, k / 16],
            block_scales.clone(),
        )
    };
    let names = [
        ("e.up", "e.up_weight_scale", "e.up_weight_scale_2", false),
        ("e.up", "e.up_scale", "e.up_scale_2", false),
        ("e.up.weight", "e.up.weight_scale", "e.up.weight_scale_2", false),
        ("e.up.weight_packed", "e.up.weight_scale", "e.up.weight_global_scale", true),
        ("e.up_packed", "e.up_scale", "e.up_global_scale", true),
    ];
    for (codes_name, scales_name, scale_name, divides) in names {
        for shape in [&[][..], &[1], &[experts], &[experts, 1], &[experts, 1, 1]] {
            // Powers of two, so that division is exact.
            let scales: Vec<f32> = (0..shape.iter().product()).map(|i| 2f32.powi(i as i32 + 1)).collect();
            let model = parts(codes_name, scales_name).add_f32(scale_name, shape, &scales).open(None);
            assert_eq!(model.info("e.up").expect("listed").shape, [experts, n, k]);
            for expert in 0..experts {
                let scale = scales[expert.min(scales.len() - 1)];
                let scale = if divides { 1.0 / scale } else { scale };
                let weight = model.stacked_weight("e.up", expert).expect("loads");
                assert_eq!((weight.format().name, values(&weight)), ("nvfp4", expected(expert, scale)), "{scale_name}");
            }
            assert_eq!(model.experts("e.up").expect("a stack").experts(), experts);
        }
    }
}

#[test]
fn stacks_that_are_stored_the_other_way_are_refused() {
    let (experts, k, n) = (2usize, 64usize, 24usize);
    // Llama 4: [E, K, N] in FP8, and [E, K/2, N] in NVFP4, with
    // scales of [E, K/16, N].
    let fp8 = Checkpoint::default().add("e.up", Dtype::F8_E4M3, &[experts, k, n], vec![0; experts * k * n]).add_f32(
        "e.up_scale",
        &[experts, 1, n],
        &vec![1.0; experts * n],
    );
    let nvfp4 = Checkpoint::default()
        .add("e.up", Dtype::U8, &[experts, k / 2, n], vec![0; experts * k / 2 * n])
        .add("e.up_weight_scale", Dtype::F8_E4M3, &[experts, k / 16, n], vec![1; experts * k / 16 * n])
        .add_f32("e.up_weight_scale_2", &[], &[1.0]);
    for checkpoint in [fp8, nvfp4] {
        let error = checkpoint.open(None).stacked_weight("e.up", 0).expect_err("transposed");
        let text = error.to_string();
        assert!(matches!(error, FormatError::UnsupportedFile { .. }) && text.contains("[E, K, N]"), "{text}");
    }
}

#[test]
fn stacks_whose_scales_do_not_fit_are_refused() {
    let fp8 = |shape: &[usize], scale: &[usize]| {
        Checkpoint::default()
            .add("e.up", Dtype::F8_E4M3, shape, vec![0; shape.iter().product()])
            .add_f32("e.up_scale", scale, &vec![1.0; scale.iter().product()])
            .open(None)
            .stacked_weight("e.up", 0)
    };
    for scale in [&[3][..], &[2, 7], &[2, 4, 2], &[3, 8, 1], &[8, 1]] {
        assert!(fp8(&[2, 8, 16], scale).is_err(), "{scale:?}");
    }
    assert!(fp8(&[2, 0, 16], &[2]).is_err() && fp8(&[0, 8, 16], &[1]).is_err() && fp8(&[1, 2, 2, 2], &[1]).is_err());
    assert!(fp8(&[1, 1, 1], &[1, 1, 1]).is_ok());
}
