//! compressed-tensors pack-quantized layers, and MXFP4 in rows of codes.

use half::bf16;
use qgemm_formats::{FormatError, HostWeight};
use safetensors::tensor::Dtype::{self, BF16, F8_E8M0, I8, I32, I64, U8};

use crate::checkpoint::{Checkpoint, Numbers, values};

/// A made layer: signed codes and zero points,
/// and scales by row and group.
struct Layer {
    n: usize,
    k: usize,
    bits: usize,
    codes: Vec<i32>,
    groups: usize,
    zeros: Vec<i32>,
    scales: Vec<f32>,
    /// Codes of a word in older files, where none straddles two.
    whole: bool,
}

impl Layer {
    fn new([n, k]: [usize; 2], bits: usize, groups: usize, is_symmetric: bool) -> Self {
        let mut numbers = Numbers::new((n * k * bits + groups) as u64);
        let mut code = || numbers.below(1 << bits) as i32 - (1 << (bits - 1));
        let codes = (0..n * k).map(|_| code()).collect();
        let zeros = (0..n * groups).map(|_| if is_symmetric { 0 } else { code() }).collect();
        let scales = (0..n * groups).map(|i| 2f32.powi((i % 5) as i32 - 4)).collect();
        Self { n, k, bits, codes, groups, zeros, scales, whole: false }
    }

    /// Fields of `bits` bits in 32-bit words.
    fn pack(&self, codes: impl Iterator<Item = i32>) -> Vec<u32> {
        let mut bits = Vec::new();
        for (i, code) in codes.enumerate() {
            if self.whole && i % (32 / self.bits) == 0 {
                bits.resize(i / (32 / self.bits) * 32, false);
            }
            let unsigned = code + (1 << (self.bits - 1));
            bits.extend((0..self.bits).map(|bit| unsigned >> bit & 1 == 1));
        }
        bits.resize(bits.len().next_multiple_of(32), false);
        bits.chunks(32).map(|word| word.iter().rev().fold(0, |word, &bit| word << 1 | u32::from(bit))).collect()
    }

    fn checkpoint(&self) -> Checkpoint {
        let rows: Vec<Vec<u32>> = self.codes.chunks(self.k).map(|row| self.pack(row.iter().copied())).collect();
        let words = rows[0].len();
        let column = |group: usize| self.pack((0..self.n).map(|row| self.zeros[row * self.groups + group]));
        let columns: Vec<Vec<u32>> = (0..self.groups).map(column).collect();
        let zeros: Vec<u32> = (0..columns[0].len()).flat_map(|at| columns.iter().map(move |c| c[at])).collect();
        let scales: Vec<u8> = self.scales.iter().flat_map(|&s| bf16::from_f32(s).to_le_bytes()).collect();
        let shape: Vec<u8> = [self.n as i64, self.k as i64].iter().flat_map(|d| d.to_le_bytes()).collect();
        let checkpoint = Checkpoint::default()
            .add("layer.weight_packed", I32, &[self.n, words], bytes(&rows.concat()))
            .add("layer.weight_scale", BF16, &[self.n, self.groups], scales)
            .add("layer.weight_shape", I64, &[2], shape);
        match self.zeros.iter().all(|&zero| zero == 0) {
            true => checkpoint,
            false => checkpoint.add("layer.weight_zero_point", I32, &[columns[0].len(), self.groups], bytes(&zeros)),
        }
    }

    /// Values, with the group of each input feature by `group_of`.
    fn values(&self, group_of: impl Fn(usize) -> usize) -> Vec<f32> {
        let value = |i: usize| {
            let group = i / self.k * self.groups + group_of(i % self.k);
            self.scales[group] * (self.codes[i] - self.zeros[group]) as f32
        };
        (0..self.n * self.k).map(value).collect()
    }

    fn config(&self, weights: &str) -> String {
        format!(
            r#"{{"quantization_config": {{"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups":
            {{"group_0": {{"targets": ["Linear"], "weights": {{"num_bits": {}, "type": "int", {weights}}}}}}}}}}}"#,
            self.bits
        )
    }
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn packed_layers_have_the_values_of_their_codes() {
    for bits in [2, 3, 4, 8] {
        for (shape, groups) in [([8, 128], 4), ([40, 256], 2), ([5, 96], 1), ([33, 64], 1)] {
            for (is_symmetric, whole) in [(true, false), (false, false), (true, true)] {
                let layer = Layer { whole, ..Layer::new(shape, bits, groups, is_symmetric) };
                let size = shape[1] / groups;
                let config =
                    layer.config(&format!(r#""strategy": "group", "group_size": {size}, "symmetric": {is_symmetric}"#));
                let what = format!("{bits} bits, {shape:?}, {groups} groups, {is_symmetric}, {whole}");
                for config in [Some(config.as_str()), None] {
                    let weight = match (layer.checkpoint().weight(config), config) {
                        (Ok(weight), _) => weight,
                        // Without settings, several widths may fit.
                        (Err(error), None) if error.to_string().contains("no settings say which") => continue,
                        (Err(error), _) => panic!("{what}: {error}"),
                    };
                    assert_eq!((weight.n(), weight.k()), (shape[0], shape[1]), "{what}");
                    assert_eq!(values(&weight), layer.values(|k| k / size), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_scale_of_a_channel_or_of_the_tensor_is_one_group() {
    let layer = Layer::new([6, 64], 8, 1, true);
    let channel = layer.config(r#""strategy": "channel", "group_size": null, "symmetric": true"#);
    assert_eq!(values(&layer.checkpoint().weight(Some(&channel)).expect("loads")), layer.values(|_| 0));
    let scale = bf16::from_f32(0.5).to_le_bytes().to_vec();
    let tensor = layer.checkpoint().without("weight_scale").add("layer.weight_scale", BF16, &[1], scale);
    let expected: Vec<f32> = layer.codes.iter().map(|&code| 0.5 * code as f32).collect();
    let config = layer.config(r#""strategy": "tensor""#);
    assert_eq!(values(&tensor.weight(Some(&config)).expect("loads")), expected);
}

#[test]
fn act_order_follows_its_groups() {
    let layer = Layer::new([8, 128], 4, 4, true);
    let g_idx: Vec<u32> = (0..128).map(|k| k % 4).collect();
    let config = layer.config(r#""strategy": "group", "group_size": 32, "symmetric": true, "actorder": "group""#);
    let ordered = layer.checkpoint().add("layer.weight_g_idx", I32, &[128], bytes(&g_idx));
    assert_eq!(values(&ordered.weight(Some(&config)).expect("loads")), layer.values(|k| k % 4));
    // The value of layers without act-order.
    let unset = layer.checkpoint().add("layer.weight_g_idx", I32, &[128], bytes(&[u32::MAX; 128]));
    assert_eq!(values(&unset.weight(Some(&config)).expect("loads")), layer.values(|k| k / 32));
}

#[test]
fn stacks_of_packed_experts_are_layers() {
    let layer = Layer::new([8, 64], 4, 2, true);
    let (words, scales) = (vec![0x7654_3210u32; 2 * 8 * 8], vec![bf16::from_f32(2.0); 2 * 8 * 2]);
    let shape: Vec<u8> = [2i64, 8, 64].iter().flat_map(|d| d.to_le_bytes()).collect();
    let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let checkpoint = Checkpoint::default()
        .add("experts.up.weight_packed", I32, &[2, 8, 8], bytes(&words))
        .add("experts.up.weight_scale", BF16, &[2, 8, 2], scales)
        .add("experts.up.weight_shape", I64, &[3], shape);
    let config = layer.config(r#""strategy": "group", "group_size": 32, "symmetric": true"#);
    let model = checkpoint.open(Some(&config));
    let weight: HostWeight = model.stacked_weight("experts.up", 1).expect("loads");
    let expected: Vec<f32> = (0..8 * 64).map(|i| 2.0 * ((i % 8) as f32 - 8.0)).collect();
    assert_eq!(values(&weight), expected);
}

#[test]
fn settings_and_tensors_that_disagree_are_refused() {
    let symmetric = Layer::new([8, 128], 4, 4, true);
    let offset = Layer::new([8, 128], 4, 4, false);
    let of = |layer: &Layer, weights: &str| layer.checkpoint().weight(Some(&layer.config(weights)));
    let expect = |result: Result<HostWeight, FormatError>, texts: &[&str]| {
        let error = result.expect_err("refused").to_string();
        assert!(texts.iter().all(|text| error.contains(text)), "{error}");
    };
    expect(of(&symmetric, r#""group_size": 64"#), &["groups of 64", "`group_size` 64 of `group_0`", "for 4"]);
    expect(of(&symmetric, r#""group_size": 32, "symmetric": false"#), &["layer.weight_zero_point"]);
    expect(of(&offset, r#""group_size": 32, "symmetric": true"#), &["zero points other than 0", "symmetric"]);
    let other = Layer { bits: 8, ..Layer::new([8, 128], 4, 4, true) };
    let config = other.config(r#""group_size": 32"#);
    expect(symmetric.checkpoint().weight(Some(&config)), &["fit [4] bits", "`num_bits` 8 of `group_0`"]);
    let six = Layer { bits: 6, ..Layer::new([8, 128], 4, 4, true) };
    expect(symmetric.checkpoint().weight(Some(&six.config(r#""group_size": 32"#))), &["int6"]);
    let without_shape = symmetric.checkpoint().without("weight_shape");
    expect(without_shape.weight(None), &["layer.weight_shape"]);
    for shape in [[0i64, 128], [-8, 128], [8, i64::MAX], [8, 129], [9, 128]] {
        let shape: Vec<u8> = shape.iter().flat_map(|d| d.to_le_bytes()).collect();
        let checkpoint = symmetric.checkpoint().without("weight_shape").add("layer.weight_shape", I64, &[2], shape);
        checkpoint.weight(None).expect_err("refused");
    }
}

/// MXFP4 in rows: names and types of codes and scales by writer.
const MXFP4: [(&str, [&str; 2], [Dtype; 2]); 4] = [
    ("compressed-tensors", ["layer.weight_packed", "layer.weight_scale"], [U8, U8]),
    ("Quark, ModelOpt", ["layer.weight", "layer.weight_scale"], [U8, U8]),
    ("E8M0", ["layer.weight", "layer.weight_scale"], [U8, F8_E8M0]),
    ("DeepSeek V4", ["layer.weight", "layer.scale"], [I8, F8_E8M0]),
];

#[test]
fn mxfp4_in_rows_of_codes_loads() {
    const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut numbers = Numbers::new(7);
    let codes: Vec<u8> = (0..3 * 64).map(|_| numbers.below(16) as u8).collect();
    let scales: Vec<u8> = (0..3 * 2).map(|i| 120 + i as u8).collect();
    let packed: Vec<u8> = codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
    let value = |(i, &code): (usize, &u8)| {
        let sign = if code < 8 { 1.0 } else { -1.0 };
        sign * FP4[usize::from(code % 8)] * 2f32.powi(i32::from(scales[i / 32]) - 127)
    };
    let expected: Vec<f32> = codes.iter().enumerate().map(value).collect();
    for (writer, [of_codes, of_scales], [code_type, scale_type]) in MXFP4 {
        let checkpoint = Checkpoint::default().add(of_codes, code_type, &[3, 32], packed.clone()).add(
            of_scales,
            scale_type,
            &[3, 2],
            scales.clone(),
        );
        let weight = checkpoint.weight(None).unwrap_or_else(|error| panic!("{writer}: {error}"));
        assert_eq!((weight.format().name, weight.n(), weight.k()), ("mxfp4", 3, 64), "{writer}");
        assert_eq!(values(&weight), expected, "{writer}");
    }
    let stack = Checkpoint::default().add("experts.down_proj", U8, &[3, 1, 32], packed).add(
        "experts.down_proj_weight_scale",
        U8,
        &[3, 1, 2],
        scales.clone(),
    );
    let expert = stack.open(None).stacked_weight("experts.down_proj", 2).expect("loads");
    assert_eq!(values(&expert), expected[128..]);
}
