//! Storage of GPTQ zero points against the stated version, and
//! layers without zero points.

use crate::checkpoint::{Checkpoint, values};
use crate::integers::{Layer, le_bytes};
use qgemm_formats::model::{GptqZeros, ModelOptions};
use safetensors::tensor::Dtype;

const WIDTHS: [usize; 4] = [2, 3, 4, 8];

fn settings(bits: usize, rest: &str) -> String {
    format!(r#"{{"quant_method": "gptq", "bits": {bits}, "group_size": 32{rest}}}"#)
}

/// Dequantized values of the layer with these settings.
fn load(checkpoint: &Checkpoint, config: &str) -> Vec<f32> {
    values(&checkpoint.weight(Some(config)).unwrap_or_else(|error| panic!("{config}: {error}")))
}

fn symmetric(bits: usize) -> Layer {
    let mut layer = Layer::in_groups_of(40, 96, bits, 32);
    layer.zeros.fill(1 << (bits - 1));
    layer
}

const LABELS: [&str; 4] = [
    "",
    r#", "checkpoint_format": "gptq""#,
    r#", "checkpoint_format": "gptq_v2""#,
    r#", "checkpoint_format": null, "format": "gptq_v2""#,
];

#[test]
fn symmetric_layers_show_how_zero_points_are_stored() {
    for bits in WIDTHS {
        let layer = symmetric(bits);
        for label in LABELS {
            for sym in ["", r#", "sym": true"#, r#", "sym": "True""#] {
                for stored_less in [0, 1] {
                    let config = settings(bits, &format!("{label}{sym}"));
                    assert_eq!(
                        load(&layer.gptq(stored_less), &config),
                        layer.expected(),
                        "{config}, less {stored_less}"
                    );
                }
            }
        }
    }
}

/// A single differing zero point, anywhere, makes the label count.
#[test]
fn other_layers_are_read_as_labelled() {
    for bits in WIDTHS {
        for at in [0, 1, 39, 40, 119] {
            let mut layer = symmetric(bits);
            layer.zeros[at] = 1;
            for (label, less) in LABELS.into_iter().zip([1, 1, 0, 0]) {
                let config = settings(bits, &format!(r#"{label}, "sym": true"#));
                assert_eq!(load(&layer.gptq(less), &config), layer.expected(), "{config}, zero {at}");
            }
        }
    }
}

/// Asymmetric layers may have any zero points,
/// also that one throughout.
#[test]
fn asymmetric_layers_are_read_as_labelled() {
    for bits in WIDTHS {
        for (label, less) in LABELS.into_iter().zip([1, 1, 0, 0]) {
            let config = settings(bits, &format!(r#"{label}, "sym": false"#));
            for zero in [0, 1, 1 << (bits - 1), (1 << (bits - 1)) + 1, (1 << bits) - 1] {
                let mut layer = symmetric(bits);
                layer.zeros.fill(zero);
                // 0 minus 1 is the largest code, and adding 1 to that yields 0 again.
                assert_eq!(load(&layer.gptq(less), &config), layer.expected(), "{config}, zero {zero}");
            }
        }
    }
}

#[test]
fn the_caller_knows_better() {
    for bits in WIDTHS {
        let layer = symmetric(bits);
        for (gptq_zeros, less) in [(GptqZeros::LessOne, 1), (GptqZeros::AsIs, 0)] {
            for label in LABELS {
                let mut other = symmetric(bits);
                // Zero points as the other version would store a symmetric layer.
                other.zeros.fill(if less == 1 { layer.zeros[0] + 1 } else { layer.zeros[0] - 1 });
                let config = settings(bits, &format!(r#"{label}, "sym": true"#));
                let model = other.gptq(less).open_with(Some(&config), ModelOptions { gptq_zeros });
                // In 2 bits a zero point of 4 equals 0.
                let expected = other.expected_modulo(1 << bits);
                assert_eq!(values(&model.weight("layer").expect("loads")), expected, "{config}, {gptq_zeros:?}");
            }
        }
    }
}

#[test]
fn symmetric_layers_need_no_zero_points() {
    for bits in WIDTHS {
        let layer = symmetric(bits);
        let (gptq, ordered) = (layer.gptq(1).without("qzeros"), layer.gptq(0).without("qzeros"));
        let ordered = ordered.add("layer.g_idx", Dtype::I32, &[96], le_bytes(&layer.group_of));
        for label in LABELS {
            let stated = settings(bits, &format!(r#"{label}, "sym": true"#));
            assert_eq!(load(&gptq, &stated), layer.expected(), "{stated}");
            assert_eq!(load(&ordered, &stated), layer.expected(), "{stated}");
            for (sym, named) in [("", "no settings say that it is symmetric"), (r#", "sym": false"#, "not symmetric")] {
                let config = settings(bits, &format!("{label}{sym}"));
                let error = gptq.weight(Some(&config)).expect_err(&config).to_string();
                assert!(error.contains("qzeros") && error.contains(named), "{config}: {error}");
            }
        }
        // Without it, nothing states the code width.
        let error =
            gptq.weight(Some(r#"{"quant_method": "gptq", "sym": true}"#)).expect_err("of any width").to_string();
        assert!(error.contains("no qzeros") && error.contains("no settings say which"), "{error}");
    }
    let layer = symmetric(4);
    let awq = layer.awq().without("qzeros");
    let config = |rest: &str| format!(r#"{{"quant_method": "awq", "bits": 4, "group_size": 32{rest}}}"#);
    for rest in [r#", "zero_point": false"#, r#", "sym": true"#, r#", "zero_point": false, "sym": null"#] {
        assert_eq!(load(&awq, &config(rest)), layer.expected(), "{rest}");
    }
    for rest in ["", r#", "zero_point": true"#, r#", "zero_point": true, "sym": true"#, r#", "sym": false"#] {
        let error = awq.weight(Some(&config(rest))).expect_err(rest).to_string();
        assert!(error.contains("qzeros") && error.contains("symmetric"), "{rest}: {error}");
    }
    // Stored zero points take precedence.
    let layer = Layer::in_groups_of(40, 96, 4, 32);
    assert_eq!(load(&layer.awq(), &config(r#", "zero_point": true"#)), layer.expected());
}

#[test]
fn groups_of_any_size_need_no_g_idx() {
    for bits in WIDTHS {
        for (k, group) in [(96, 16), (64, 8), (96, 24), (160, 40), (96, 48), (120, 60), (320, 80), (100, 32), (96, 5)] {
            let layer = Layer::in_groups_of(32, k, bits, group);
            // Whole words of codes.
            if k * bits % 32 != 0 {
                continue;
            }
            let config = |group: i64| {
                format!(r#"{{"quant_method": "gptq", "bits": {bits}, "group_size": {group}, "sym": false}}"#)
            };
            let weight = layer.gptq(1).weight(Some(&config(group as i64))).expect("loads");
            assert_eq!((weight.n(), weight.k()), (32, k), "{bits} bits, K {k}, group {group}");
            assert_eq!(values(&weight), layer.expected(), "{bits} bits, K {k}, group {group}");
        }
    }
    for (k, group) in [(96, 16), (64, 8), (96, 24)] {
        let layer = Layer::in_groups_of(32, k, 4, group);
        let config = format!(r#"{{"quant_method": "awq", "bits": 4, "group_size": {group}, "version": "gemm"}}"#);
        assert_eq!(load(&layer.awq(), &config), layer.expected(), "AWQ, K {k}, group {group}");
    }
    // Groups are refused if padding would grow the weight too much.
    let layer = Layer::in_groups_of(32, 96, 4, 2);
    let error = layer.gptq(1).weight(Some(r#"{"quant_method": "gptq", "group_size": 2}"#)).expect_err("too uneven");
    assert!(error.to_string().contains("cannot be stored"), "{error}");
}

/// The column order that `desc_act` promises is only in `g_idx`.
#[test]
fn act_order_needs_its_g_idx() {
    let layer = Layer::in_groups_of(32, 96, 4, 32);
    let config = |rest: &str| settings(4, &format!(r#", "sym": false, "desc_act": {rest}"#));
    let error = layer.gptq(1).weight(Some(&config("true"))).expect_err("no order").to_string();
    assert!(error.contains("`desc_act` is true") && error.contains("no g_idx"), "{error}");
    assert_eq!(load(&layer.gptq(1), &config(r#"true, "static_groups": true"#)), layer.expected());
    assert_eq!(load(&layer.gptq(1), &config("false")), layer.expected());
    let one = Layer::in_groups_of(32, 32, 4, 32);
    assert_eq!(load(&one.gptq(1), &config("true")), one.expected());
}
