//! GPTQ and AWQ layers, packed bit by bit, must dequantize to exactly
//! `scale · (code − zero)`.

use crate::checkpoint::{Checkpoint, Numbers, values};
use crate::integers::{Layer, le_bytes};
use half::f16;
use qgemm_formats::model::{GptqZeros, Model, ModelOptions, TensorKind};
use qgemm_formats::{FormatError, NO_COLUMN};
use safetensors::tensor::Dtype;

fn settings(bits: usize, group: i64, format: &str) -> String {
    format!(
        r#"{{"model_type": "llama", "version": 7, "quantization_config": {{"quant_method": "gptq", "bits": {bits},
            "group_size": {group}, "desc_act": false, "checkpoint_format": "{format}"}}}}"#
    )
}

#[test]
fn gptq_of_every_width_and_group() {
    for bits in [2, 3, 4, 8] {
        for (k, group) in [(256, 32), (256, 64), (256, 128), (96, 96), (384, 96), (512, 256), (288, 128), (160, 64)] {
            for (subtract, version) in [(1, "gptq"), (0, "gptq_v2")] {
                for n in [8, 40] {
                    let layer = Layer::in_groups_of(n, k, bits, group);
                    let checkpoint = layer.gptq(subtract);
                    let weight = checkpoint.weight(Some(&settings(bits, group as i64, version))).expect("loads");
                    assert_eq!((weight.n(), weight.k()), (n, k));
                    let block = [128, 64, 32].into_iter().find(|block| group % block == 0).expect("multiple of 32");
                    if k != group {
                        assert_eq!(weight.format().name, format!("int{bits}_g{block}"), "K {k} group {group}");
                    }
                    assert!(weight.k_order().is_none());
                    assert_eq!(values(&weight), layer.expected(), "{bits} bits, K {k}, group {group}, {version}");
                }
            }
        }
    }
}

#[test]
fn gptq_of_one_group() {
    for bits in [2, 3, 4, 8] {
        let layer = Layer::in_groups_of(32, 416, bits, 416);
        let weight = layer.gptq(1).weight(Some(&settings(bits, -1, "gptq"))).expect("loads");
        assert_eq!(weight.format().name, format!("int{bits}_g128"));
        assert_eq!(values(&weight), layer.expected());
        // Shapes alone imply the same settings.
        let guessed = layer.gptq(1).weight(None).expect("loads");
        assert_eq!(guessed.blocks(), weight.blocks());
    }
}

#[test]
fn gptq_with_act_order() {
    for bits in [2, 3, 4, 8] {
        let mut group_of: Vec<u32> = (0..256).map(|column| column / 64).collect();
        let mut numbers = Numbers::new(5);
        for i in (1..group_of.len()).rev() {
            group_of.swap(i, numbers.below(i as u32 + 1) as usize);
        }
        let layer = Layer::random(32, bits, group_of, 4);
        let checkpoint = layer.gptq(1).add("layer.g_idx", Dtype::I32, &[256], le_bytes(&layer.group_of));
        let weight = checkpoint.weight(Some(&settings(bits, 64, "gptq"))).expect("loads");
        assert_eq!((weight.format().block_len, weight.stored_k()), (64, 256));
        let order = weight.k_order().expect("sorted by group");
        assert!(order.chunks(64).enumerate().all(|(g, c)| c.iter().all(|&k| layer.group_of[k as usize] == g as u32)));
        assert_eq!(values(&weight), layer.expected());
    }
}

#[test]
fn gptq_with_act_order_after_sharding() {
    // A column shard has groups of all sizes, even empty ones, and need
    // not fill words or blocks.
    let mut numbers = Numbers::new(77);
    let group_of: Vec<u32> = (0..203).map(|_| [0, 1, 1, 1, 3, 4, 4, 5][numbers.below(8) as usize]).collect();
    for bits in [2, 3, 4, 8] {
        let layer = Layer::random(24, bits, group_of.clone(), 7);
        let checkpoint = layer.gptq(1).add("layer.g_idx", Dtype::I32, &[203], le_bytes(&layer.group_of));
        let weight = checkpoint.weight(Some(&settings(bits, 128, "gptq"))).expect("loads");
        assert_eq!((weight.k(), weight.format().block_len), (203, 32));
        let order = weight.k_order().expect("sorted by group");
        assert_eq!(order.iter().filter(|&&column| column != NO_COLUMN).count(), 203);
        assert_eq!(values(&weight), layer.expected());
        // Padding columns must be 0, or the product would depend on stray values of X.
        let mut stored = vec![1.0; weight.format().blocks_per_row(weight.stored_k()) * 32];
        weight.dequantize_stored_row(3, &mut stored);
        assert!(order.iter().zip(&stored).all(|(&column, &value)| column != NO_COLUMN || value == 0.0));
        assert!(stored[order.len()..].iter().all(|&value| value == 0.0));
    }
}

#[test]
fn awq_of_every_group() {
    for (k, group) in [(128, 32), (128, 64), (256, 128), (192, 96), (160, 160), (200, 64), (33, 32)] {
        let layer = Layer::in_groups_of(24, k, 4, group);
        let config = format!(r#"{{"quant_method": "awq", "w_bit": 4, "q_group_size": {group}, "version": "GEMM"}}"#);
        let weight = layer.awq().weight(Some(&config)).expect("loads");
        assert_eq!(values(&weight), layer.expected(), "K {k} group {group}");
    }
    let layer = Layer::in_groups_of(16, 256, 4, 64);
    assert_eq!(values(&layer.awq().weight(None).expect("recognised by shape")), layer.expected());
}

/// One layer per expert, as in MoE checkpoints.
#[test]
fn experts_that_are_layers_of_gptq_and_awq() {
    const NAME: &str = "model.layers.0.mlp.experts.{}.down_proj";
    let (n, k, group) = (24, 128, 64);
    let layers: Vec<Layer> = (0..3)
        .map(|seed| Layer { zeros: vec![seed + 3; n * k / group], ..Layer::in_groups_of(n, k, 4, group) })
        .collect();
    let awq = format!(r#"{{"quant_method": "awq", "w_bit": 4, "q_group_size": {group}, "version": "GEMM"}}"#);
    let stack = |of: &dyn Fn(&Layer) -> Checkpoint| {
        layers.iter().enumerate().fold(Checkpoint::default(), |all, (expert, layer)| {
            all.with_layer(&NAME.replace("{}", &expert.to_string()), of(layer))
        })
    };
    let models = [
        stack(&|layer| layer.gptq(1)).open(Some(&settings(4, group as i64, "gptq"))),
        stack(&Layer::awq).open(Some(&awq)),
    ];
    for model in models {
        let experts = model.experts(NAME).expect("three layers");
        assert_eq!((experts.experts(), experts.n(), experts.k(), experts.k_orders()), (3, n, k, None));
        let all = values(experts.stacked());
        for (expert, layer) in layers.iter().enumerate() {
            assert_eq!(all[expert * experts.row_pitch() * k..][..n * k], layer.expected(), "expert {expert}");
        }
        let gated = model.gated_experts(NAME, NAME).expect("pairs");
        assert_eq!((gated.n(), gated.is_gated()), (n, true));
    }
    // Each expert has its own column order.
    let group_of = |expert: usize| -> Vec<u32> { (0..k).map(|column| ((column + expert) % 2) as u32).collect() };
    let ordered = (0..2).fold(Checkpoint::default(), |all, expert| {
        let layer = Layer::random(n, 4, group_of(expert), 2);
        let tensors = layer.gptq(1).add("layer.g_idx", Dtype::I32, &[k], le_bytes(&layer.group_of));
        all.with_layer(&NAME.replace("{}", &expert.to_string()), tensors)
    });
    let model = ordered.open(Some(&settings(4, group as i64, "gptq")));
    let experts = model.experts(NAME).expect("two layers");
    let orders = experts.k_orders().expect("permuted");
    for (expert, order) in orders.iter().enumerate() {
        let alone = model.weight(&NAME.replace("{}", &expert.to_string())).expect("loads");
        assert_eq!(alone.k_order(), Some(&order[..]));
    }
    assert_ne!(orders[0], orders[1]);
}

#[test]
fn mislabelled_versions_can_be_overridden() {
    let layer = Layer::in_groups_of(32, 128, 4, 128);
    let (v1, v2) = (settings(4, 128, "gptq"), settings(4, 128, "gptq_v2"));
    let load = |checkpoint: &Checkpoint, config: &str, gptq_zeros| {
        values(&checkpoint.open_with(Some(config), ModelOptions { gptq_zeros }).weight("layer").expect("loads"))
    };
    assert_ne!(load(&layer.gptq(0), &v1, GptqZeros::FromConfig), layer.expected());
    assert_eq!(load(&layer.gptq(0), &v1, GptqZeros::AsIs), layer.expected());
    assert_eq!(load(&layer.gptq(1), &v2, GptqZeros::LessOne), layer.expected());
}

#[test]
fn suspicious_zero_points_are_reported() {
    for bits in [2, 3, 4, 8] {
        let mut layer = Layer::in_groups_of(32, 128, bits, 128);
        layer.zeros.fill(1 << (bits - 1));
        for (subtract, stated, suspicious) in
            [(1, "gptq", false), (0, "gptq", true), (0, "gptq_v2", false), (1, "gptq_v2", true)]
        {
            let log = logged(|| {
                layer.gptq(subtract).weight(Some(&settings(bits, 128, stated))).expect("loads");
            });
            assert_eq!(log.contains("mislabelled"), suspicious, "{bits} bits, less {subtract}, {stated}: {log}");
        }
    }
}

/// Log output of `action`.
fn logged(action: impl FnOnce()) -> String {
    let log = std::sync::Arc::new(Log::default());
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).finish();
    tracing::subscriber::with_default(subscriber, action);
    let bytes = log.0.lock().expect("not poisoned").clone();
    String::from_utf8(bytes).expect("text")
}

#[derive(Default)]
struct Log(std::sync::Mutex<Vec<u8>>);

impl std::io::Write for &Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("not poisoned").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_model_lists_layers_not_their_parts() {
    let layer = Layer::in_groups_of(32, 128, 4, 128);
    let model = layer.gptq(1).open(Some(&settings(4, 128, "gptq")));
    let names: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["layer.bias", "layer.weight"]);
    let info = model.info("layer").expect("is there");
    assert_eq!((info.shape.as_slice(), info.bytes), ([32, 128].as_slice(), 128 * 32 / 2 + 16 + 64));
    assert!(matches!(info.kind, TensorKind::Quantized(format) if format.name == "int4_g128"));
    assert_eq!(model.dense("layer.bias").expect("dense").to_f32(), vec![0.5; 32]);
    let error = model.weight("layr.weight").expect_err("not there");
    assert_eq!(error, FormatError::NoSuchTensor { name: "layr.weight".into(), near: Some("layer.weight".into()) });
    assert!(matches!(model.dense("layer"), Err(FormatError::UnsupportedFile { .. })));
}

#[test]
fn layers_that_do_not_fit_together_are_refused() {
    let layer = Layer::in_groups_of(32, 128, 4, 64);
    let refused = |checkpoint: Checkpoint, config: &str, expected: &str| {
        let model = checkpoint.open(Some(config));
        let error = model.weight("layer").expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
        assert!(matches!(&model.info("layer").expect("listed").kind, TensorKind::Opaque(why) if *why == error));
    };
    refused(layer.gptq(1), &settings(4, 128, "gptq"), "makes 1 groups, but there are scales for 2");
    refused(layer.gptq(1), &settings(4, 48, "gptq"), "makes 3 groups, but there are scales for 2");
    refused(layer.gptq(1), &settings(4, 0, "gptq"), "`group_size` is 0: expected -1 (one group) or a positive number");
    refused(layer.gptq(1), &settings(4, -7, "gptq"), "`group_size` is -7");
    refused(layer.gptq(1), &settings(5, 64, "gptq"), "expected one of 2, 3, 4 and 8");
    refused(layer.gptq(1), &settings(4, 64, "marlin"), "expected gptq or gptq_v2");
    let group_9 = vec![9u32; 128];
    refused(
        layer.gptq(1).add("layer.g_idx", Dtype::I32, &[128], le_bytes(&group_9)),
        &settings(4, 64, "gptq"),
        "there are 2 groups",
    );
    refused(
        layer.gptq(1).add("layer.g_idx", Dtype::I32, &[127], le_bytes(&group_9[1..])),
        &settings(4, 64, "gptq"),
        "group 9",
    );
    refused(layer.awq(), r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#, "expected `gemm`");
    refused(layer.awq(), r#"{"quant_method": "awq", "bits": 8}"#, "expected 4");
    refused(layer.awq(), r#"{"quant_method": "awq", "group_size": 32}"#, "makes 4 groups");
}

#[test]
fn scales_must_be_finite() {
    for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
        let mut layer = Layer::in_groups_of(40, 128, 4, 64);
        layer.scales[40 + 33] = bad;
        let error = layer.gptq(1).weight(Some(&settings(4, 64, "gptq"))).expect_err("refused");
        assert_eq!(error, FormatError::NonFiniteScale { what: "layer.weight".into(), row: 33, block: 1 });
    }
}

#[test]
fn bad_settings_are_refused() {
    let bytes = || Layer::in_groups_of(8, 32, 4, 32).awq().bytes();
    for config in ["", "[]", "{", r#"{"quantization_config": "four"}"#, r#"{"quantization_config": 4}"#] {
        let error = Model::from_bytes(bytes().into(), Some(config), ModelOptions::default()).expect_err("refused");
        assert!(matches!(error, FormatError::BadFile { .. }), "{config}: {error}");
    }
}
