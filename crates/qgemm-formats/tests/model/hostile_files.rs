//! Damaged files: real files with bytes changed, cut and moved. Each must be read or
//! refused. None may panic, or allocate much more than its length.

use crate::checkpoint::{Checkpoint, Numbers};
use proptest::prelude::*;
use qgemm_formats::model::gguf::{GgufArray, GgufHeader, GgufValue};
use qgemm_formats::model::{Model, TensorKind};
use qgemm_formats::{Format, SharedBytes};
use safetensors::tensor::Dtype;

/// Metadata of several types, and a tensor per format.
fn gguf_file() -> Vec<u8> {
    let mut header = GgufHeader::new();
    header.metadata("general.architecture", "llama".into()).expect("new");
    header.metadata("general.alignment", 32u32.into()).expect("new");
    let strings = GgufArray::Strings(vec!["one".into(), "two".into()]);
    header.metadata("tokens", GgufValue::Array(strings.clone())).expect("new");
    header.metadata("nested", GgufValue::Array(GgufArray::Arrays(vec![strings]))).expect("new");
    let sizes: Vec<usize> = Format::all()
        .filter(|f| f.ggml_type.is_some())
        .map(|f| header.tensor(&format!("{f}.weight"), &[2, f.block_len * 2], f).expect("fits"))
        .collect();
    let mut writer = header.write(Vec::new()).expect("writes");
    for size in sizes {
        writer.tensor(&vec![7; size]).expect("in order");
    }
    writer.finish().expect("complete")
}

/// One layer of every supported kind.
fn safetensors_file() -> Vec<u8> {
    let mut numbers = Numbers::new(3);
    let mut bytes = |count: usize| -> Vec<u8> { (0..count).map(|_| numbers.below(100) as u8).collect() };
    let group_of: Vec<u8> = (0..64u32).flat_map(|k| (k % 2).to_le_bytes()).collect();
    Checkpoint::default()
        .add("gptq.qweight", Dtype::I32, &[8, 8], bytes(256))
        .add("gptq.qzeros", Dtype::I32, &[2, 1], bytes(8))
        .add("gptq.scales", Dtype::F16, &[2, 8], bytes(32))
        .add("gptq.g_idx", Dtype::I32, &[64], group_of)
        .add("awq.qweight", Dtype::I32, &[64, 1], bytes(256))
        .add("awq.qzeros", Dtype::I32, &[2, 1], bytes(8))
        .add("awq.scales", Dtype::F16, &[2, 8], bytes(32))
        .add("int8.weight", Dtype::I8, &[2, 40], bytes(80))
        .add("int8.weight_scale", Dtype::F32, &[2, 1], bytes(8))
        .add("fp8.weight", Dtype::F8_E4M3, &[130, 3], bytes(390))
        .add("fp8.weight_scale_inv", Dtype::F32, &[2, 1], bytes(8))
        .add("mx_blocks", Dtype::U8, &[2, 1, 2, 16], bytes(64))
        .add("mx_scales", Dtype::U8, &[2, 1, 2], bytes(4))
        .add("nv.weight", Dtype::U8, &[2, 8], bytes(16))
        .add("nv.weight_scale", Dtype::F8_E4M3, &[2, 1], bytes(2))
        .add("nv.weight_scale_2", Dtype::F32, &[], bytes(4))
        .add("plain.weight", Dtype::BF16, &[3, 5], bytes(30))
        .add("fp8_experts", Dtype::F8_E4M3, &[2, 3, 5], bytes(30))
        .add("fp8_experts_scale", Dtype::F32, &[2, 3, 1], bytes(24))
        .add("nv_experts", Dtype::U8, &[2, 2, 8], bytes(32))
        .add("nv_experts_weight_scale", Dtype::F8_E4M3, &[2, 2, 1], bytes(4))
        .add("nv_experts_weight_scale_2", Dtype::F32, &[2], bytes(8))
        .bytes()
}

/// Opens the model and loads all of it.
fn exercise(bytes: Vec<u8>, config: Option<&str>) {
    let length = bytes.len();
    let Ok(model) = Model::from_bytes(SharedBytes::from(bytes), config, Default::default()) else { return };
    for tensor in model.tensors() {
        if let Ok(weight) = model.weight(&tensor.name) {
            // Padding grows an act-order row at most eightfold. A byte has up
            // to 8 values (4 at 2 bits).
            assert!(weight.blocks().len() <= 64 * length + 256, "{} grew to {}", tensor.name, weight.blocks().len());
            weight.dequantize_row(weight.n() - 1);
        }
        if tensor.shape.len() > 2 && matches!(tensor.kind, TensorKind::Quantized(_) | TensorKind::Dense(_)) {
            let _ = model.stacked_weight(&tensor.name, 1);
            let _ = model.stacked_weight(&tensor.name, usize::MAX);
        }
        let _ = model.dense(&tensor.name);
    }
    let _ = model.weight("no such tensor");
}

/// Position and kind of damage. Most damage hits the header, which is short.
#[derive(Clone, Debug)]
enum Damage {
    Byte { at: usize, value: u8 },
    Number { at: usize, value: u64 },
    Digit { nth: usize, digit: u8 },
    Cut { at: usize },
    Move { from: usize, to: usize, count: usize },
}

fn damage() -> impl Strategy<Value = Damage> {
    let number = prop_oneof![Just(u64::MAX), Just(1 << 63), Just(1 << 32), Just(0), 0..300u64, any::<u64>()];
    prop_oneof![
        (any::<usize>(), any::<u8>()).prop_map(|(at, value)| Damage::Byte { at, value }),
        (any::<usize>(), number).prop_map(|(at, value)| Damage::Number { at, value }),
        (any::<usize>(), b'0'..=b'9').prop_map(|(nth, digit)| Damage::Digit { nth, digit }),
        any::<usize>().prop_map(|at| Damage::Cut { at }),
        (any::<usize>(), any::<usize>(), 1..64usize).prop_map(|(from, to, count)| Damage::Move { from, to, count }),
    ]
}

fn apply(damage: &Damage, bytes: &mut Vec<u8>, header: usize) {
    let place =
        |at: usize, length: usize| if at & 3 != 0 { (at >> 2) % header.min(length) } else { (at >> 2) % length };
    if bytes.is_empty() {
        return;
    }
    let length = bytes.len();
    match *damage {
        Damage::Byte { at, value } => bytes[place(at, length)] = value,
        Damage::Number { at, value } => {
            let at = place(at, length);
            let end = (at + 8).min(length);
            bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        // Digits in a JSON header.
        Damage::Digit { nth, digit } => {
            let digits: Vec<usize> = (0..header.min(length)).filter(|&i| bytes[i].is_ascii_digit()).collect();
            if !digits.is_empty() {
                bytes[digits[nth % digits.len()]] = digit;
            }
        }
        Damage::Cut { at } => bytes.truncate(place(at, length)),
        Damage::Move { from, to, count } => {
            let (from, to) = (place(from, length), place(to, length));
            let count = count.min(length - from.max(to));
            bytes.copy_within(from..from + count, to);
        }
    }
}

const CONFIGS: [Option<&str>; 6] = [
    None,
    Some(r#"{"quant_method": "gptq", "bits": 4, "group_size": 32}"#),
    Some(r#"{"quant_method": "awq", "bits": 4, "group_size": 32}"#),
    Some(r#"{"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}"#),
    Some(
        r#"{"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:.*[a-f]$"],
        "weights": {"num_bits": 8, "type": "float"}}}, "ignore": ["re:(", "*b*"]}"#,
    ),
    Some(r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["d*"]}"#),
];

/// Settings of every supported kind.
const SETTINGS: &str = r#"{"limits": [Infinity, NaN, -1e5], "text_config": {"quantization_config": {"quant_method": "gptq",
    "bits": "4", "group_size": 32, "sym": false, "checkpoint_format": "gptq_v2", "desc_act": true, "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0", "dynamic": {"-:.*a\\.b$": {}, "+:(aw|gp).{2}": {"bits": 4, "group_size": -1}, "int8": {"bits": 8}}}},
    "quantization_config": {"packing_format": "auto_round:auto_awq", "quant_method": null, "zero_point": true,
    "extra_config": {"gptq": {"bits": 4}, ".*wq[^x]*": {"bits": 16}}}, "quantization": {"quantized_layers": {"fp8": {}}}}"#;

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_gguf_files_do_no_harm(damages in proptest::collection::vec(damage(), 1..4)) {
        let mut bytes = gguf_file();
        let header = bytes.len() / 3;
        damages.iter().for_each(|damage| apply(damage, &mut bytes, header));
        exercise(bytes, None);
    }

    #[test]
    fn damaged_safetensors_files_do_no_harm(
        damages in proptest::collection::vec(damage(), 1..4),
        config in 0..CONFIGS.len(),
    ) {
        let mut bytes = safetensors_file();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        damages.iter().for_each(|damage| apply(damage, &mut bytes, header));
        exercise(bytes, CONFIGS[config]);
    }

    /// Settings with bytes changed, cut and moved.
    #[test]
    fn damaged_settings_do_no_harm(damages in proptest::collection::vec(damage(), 1..6)) {
        let mut bytes = SETTINGS.as_bytes().to_vec();
        damages.iter().for_each(|damage| apply(damage, &mut bytes, SETTINGS.len()));
        exercise(safetensors_file(), Some(&String::from_utf8_lossy(&bytes)));
    }

    /// The safetensors crate refuses most damaged headers. Here types and shapes
    /// are wrong but consistent.
    #[test]
    fn layers_of_any_shape_do_no_harm(
        shapes in proptest::collection::vec((0..6usize, 0..6usize, 0..6usize), 24),
        types in proptest::collection::vec(0..11usize, 24),
        config in 0..CONFIGS.len(),
    ) {
        const TYPES: [Dtype; 11] = [
            Dtype::I32, Dtype::F16, Dtype::F32, Dtype::I8, Dtype::U8, Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::BF16,
            Dtype::I64, Dtype::U32, Dtype::F8_E8M0,
        ];
        const SIZES: [usize; 6] = [1, 0, 2, 8, 16, 3];
        const NAMES: [&str; 24] = [
            "a.qweight", "a.qzeros", "a.scales", "a.g_idx", "b.qweight", "b.qzeros", "b.scales", "c.weight",
            "c.weight_scale", "d.weight", "d.weight_scale_inv", "e_blocks", "e_scales", "f.weight",
            "f.weight_scale", "f.weight_scale_2", "g.weight", "h.weight_packed", "h.weight_scale", "h.weight_shape",
            "h.weight_global_scale", "g.scales", "g.scale", "d.qweight",
        ];
        let mut checkpoint = Checkpoint::default();
        for ((name, (outer, rows, columns)), dtype) in NAMES.iter().zip(shapes).zip(types) {
            // Half are matrices, half are stacks.
            let shape = [SIZES[outer % 4], SIZES[rows], SIZES[columns]];
            let (shape, dtype) = (if outer < 3 { &shape[1..] } else { &shape[..] }, TYPES[dtype]);
            let bytes = vec![1; shape.iter().product::<usize>() * dtype.bitsize() / 8];
            checkpoint = checkpoint.add(name, dtype, shape, bytes);
        }
        exercise(checkpoint.bytes(), CONFIGS[config]);
    }
}

#[test]
fn undamaged_files_load_completely() {
    for (bytes, layers) in [(gguf_file(), 17), (safetensors_file(), 9)] {
        let model = Model::from_bytes(bytes.into(), None, Default::default()).expect("opens");
        assert_eq!(model.tensors().len(), layers);
        for tensor in model.tensors() {
            model.stacked_weight(&tensor.name, 0).unwrap_or_else(|error| panic!("{}: {error}", tensor.name));
        }
    }
}

#[test]
fn shapes_without_elements_do_no_harm() {
    // If one dimension is 0, the others can be anything without backing bytes.
    let huge = 1usize << 61;
    for shape in [[huge, 0], [0, huge]] {
        for dtype in [Dtype::I32, Dtype::I8, Dtype::F8_E4M3, Dtype::U8, Dtype::F32] {
            let empty = |name: &str, dtype| (name.to_owned(), dtype);
            let names = [
                empty("a.qweight", Dtype::I32),
                empty("a.qzeros", Dtype::I32),
                empty("a.scales", Dtype::F16),
                empty("c.weight", dtype),
                empty("c.weight_scale", Dtype::F32),
                empty("f.weight", Dtype::U8),
                empty("f.weight_scale", Dtype::F8_E4M3),
                empty("f.weight_scale_2", Dtype::F32),
                empty("e_blocks", Dtype::U8),
                empty("e_scales", Dtype::U8),
            ];
            let entries: Vec<String> = names
                .iter()
                .map(|(name, dtype)| {
                    format!(r#""{name}":{{"dtype":"{dtype:?}","shape":{shape:?},"data_offsets":[0,0]}}"#)
                })
                .collect();
            let header = format!("{{{}}}", entries.join(","));
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            CONFIGS.iter().for_each(|config| exercise(bytes.clone(), *config));
        }
    }
}

#[test]
fn shapes_of_which_a_part_overflows_are_refused() {
    let huge = 1usize << 40;
    for shape in [[0, huge, huge], [huge, 0, huge], [huge, huge, 0]] {
        let header = format!(r#"{{"w":{{"dtype":"F32","shape":{shape:?},"data_offsets":[0,0]}}}}"#);
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        let error = Model::from_bytes(bytes.into(), None, Default::default()).expect_err("no such tensor");
        assert!(error.to_string().to_lowercase().contains("overflow"), "{error}");
    }
}
