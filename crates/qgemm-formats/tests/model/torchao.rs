//! torchao layers, made by the definitions of its classes
//! (version 0.18.0). Tiles are those of PyTorch's
//! `_convert_weight_to_int4pack` for CUDA.

use crate::checkpoint::{Checkpoint, Numbers, values};
use half::bf16;
use qgemm_formats::FormatError;
use safetensors::tensor::Dtype::{BF16, F8_E4M3, F32, I8, I32, U8};

/// An int4 layer: codes from −8, and scales and zeros by row
/// and group.
struct Int4 {
    n: usize,
    k: usize,
    group: usize,
    codes: Vec<i32>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
}

impl Int4 {
    fn new([n, k]: [usize; 2], group: usize) -> Self {
        let mut numbers = Numbers::new((n * k + group) as u64);
        let groups = k / group;
        let codes = (0..n * k).map(|_| numbers.below(16) as i32 - 8).collect();
        // Eight bits of a bf16 mantissa, over some powers of two.
        let mut number = |exponent: i32| {
            let mantissa = 128 + numbers.below(128) as i32;
            bf16::from_f32(mantissa as f32 * 2f32.powi(exponent - numbers.below(6) as i32)).to_f32()
        };
        let scales = (0..n * groups).map(|_| number(-14)).collect();
        let zeros = (0..n * groups).map(|i| if i % 3 == 0 { -number(-12) } else { number(-12) }).collect();
        Self { n, k, group, codes, scales, zeros }
    }

    fn values(&self) -> Vec<f32> {
        let group = |i: usize| i / self.k * (self.k / self.group) + i % self.k / self.group;
        (0..self.n * self.k).map(|i| self.codes[i] as f32 * self.scales[group(i)] + self.zeros[group(i)]).collect()
    }

    fn nibble(&self, row: usize, column: usize) -> u32 {
        if row < self.n && column < self.k { (self.codes[row * self.k + column] + 8) as u32 } else { 0 }
    }

    /// Numbers `[groups, rows]` of padded rows and columns.
    fn transposed(&self, numbers: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
        let groups = self.k / self.group;
        let of = |group: usize, row: usize| {
            if row < self.n && group < groups { numbers[row * groups + group] } else { 0.0 }
        };
        (0..columns / self.group).flat_map(|group| (0..rows).map(move |row| of(group, row))).collect()
    }

    fn metadata(&self, class: &str) -> String {
        let Self { n, k, group, .. } = self;
        format!(r#"{{"_type": "{class}", "_data": {{"block_size": [1, {group}], "shape": [{n}, {k}]}}}}"#)
    }

    fn rows(&self) -> Checkpoint {
        let (n, k) = (self.n, self.k);
        let byte = |i: usize| (self.codes[2 * i] & 0xf | self.codes[2 * i + 1] << 4) as u8;
        let of = |numbers| bf16_bytes(&self.transposed(numbers, [n, k]));
        Checkpoint::default()
            .add("layer._weight_qdata", I8, &[n, k / 2], (0..n * k / 2).map(byte).collect())
            .add("layer._weight_scale", BF16, &[k / self.group, n], of(&self.scales))
            .add("layer._weight_zero_point", BF16, &[k / self.group, n], of(&self.zeros))
            .describe("layer.weight", &self.metadata("Int4Tensor"))
    }

    fn tiles(&self, inner: usize, columns: usize) -> Checkpoint {
        let rows = self.n.next_multiple_of(8);
        let (tiles, outer) = (rows / 8, columns / (16 * inner));
        let mut words = Vec::new();
        for (tile, at) in (0..tiles).flat_map(|tile| (0..outer).map(move |at| (tile, at))) {
            for (lane, pair) in (0..32).flat_map(|lane| (0..inner / 2).map(move |pair| (lane, pair))) {
                let row = tile * 8 + lane / 4;
                let first = (at * inner + 2 * pair) * 16 + lane % 4 * 2;
                let columns: [usize; 4] = std::array::from_fn(|i| first + 8 * i);
                let nibbles = columns.into_iter().chain(columns.map(|column| column + 1));
                let word = nibbles.enumerate().fold(0, |word, (i, column)| word | self.nibble(row, column) << (4 * i));
                words.extend(word.to_le_bytes());
            }
        }
        let padded = [rows, columns];
        let (scales, zeros) = (self.transposed(&self.scales, padded), self.transposed(&self.zeros, padded));
        let pairs: Vec<f32> = scales.into_iter().zip(zeros).flat_map(|(scale, zero)| [scale, zero]).collect();
        Checkpoint::default()
            .add("layer._weight_qdata", I32, &[tiles, outer, 32, inner / 2], words)
            .add("layer._weight_scale_and_zero", BF16, &[columns / self.group, rows, 2], bf16_bytes(&pairs))
            .describe("layer.weight", &self.metadata("Int4TilePackedTo4dTensor"))
    }
}

fn bf16_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|&number| bf16::from_f32(number).to_le_bytes()).collect()
}

#[test]
fn int4_has_the_values_of_its_codes() {
    for (shape, group, format) in [
        ([8, 128], 32, "centered4_g32"),
        ([13, 256], 64, "centered4_g64"),
        ([5, 384], 128, "centered4_g64"),
        ([24, 96], 96, "centered4_g32"),
    ] {
        let layer = Int4::new(shape, group);
        let columns = shape[1].next_multiple_of(128);
        let mut checkpoints = vec![layer.rows()];
        if columns.is_multiple_of(group) {
            checkpoints.extend([2, 4, 8].map(|inner| layer.tiles(inner, columns)));
            checkpoints.push(layer.tiles(8, columns + 3 * 128));
        }
        for (i, checkpoint) in checkpoints.iter().enumerate() {
            let weight = checkpoint.weight(None).unwrap_or_else(|error| panic!("{shape:?} {i}: {error}"));
            assert_eq!((weight.format().name, weight.n(), weight.k()), (format, shape[0], shape[1]), "{i}");
            assert_eq!(values(&weight), layer.values(), "{shape:?}, {i}");
        }
    }
}

#[test]
fn int4_experts_are_a_stack() {
    let (first, second) = (Int4::new([8, 128], 64), Int4 { zeros: vec![0.5; 16], ..Int4::new([8, 128], 64) });
    let models = [first.rows().open(None), second.rows().open(None)];
    let byte = |layer: &Int4, i: usize| (layer.codes[2 * i] & 0xf | layer.codes[2 * i + 1] << 4) as u8;
    let codes = [&first, &second].iter().flat_map(|layer| (0..8 * 64).map(|i| byte(layer, i))).collect();
    let of = |number: fn(&Int4) -> &[f32]| {
        [&first, &second].iter().flat_map(|layer| bf16_bytes(&layer.transposed(number(layer), [8, 128]))).collect()
    };
    let stack = Checkpoint::default()
        .add("layer._weight_qdata", U8, &[2, 8, 64], codes)
        .add("layer._weight_scale", BF16, &[2, 2, 8], of(|layer| &layer.scales))
        .add("layer._weight_zero_point", BF16, &[2, 2, 8], of(|layer| &layer.zeros))
        .describe(
            "layer.weight",
            r#"{"_type": "Int4Tensor", "_data": {"block_size": [1, 1, 64], "shape": [2, 8, 128]}}"#,
        )
        .open(None);
    for (matrix, model) in models.iter().enumerate() {
        let expected = model.weight("layer").expect("loads");
        assert_eq!(values(&stack.stacked_weight("layer", matrix).expect("loads")), values(&expected), "{matrix}");
    }
}

#[test]
fn bytes_have_scales_of_rows_or_groups() {
    let codes: Vec<u8> = (0..4 * 64u32).map(|i| (i * 37 % 255) as u8).collect();
    let scales = [0.5f32, 0.25, 2.0, 1.0];
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let int8 = || {
        Checkpoint::default().add("layer._weight_qdata", I8, &[4, 64], codes.clone()).add(
            "layer._weight_scale",
            F32,
            &[4, 1],
            bytes(&scales),
        )
    };
    let expected = |zero: i32| -> Vec<f32> {
        (0..4 * 64).map(|i| scales[i / 64] * (i32::from(codes[i] as i8) - zero) as f32).collect()
    };
    let class = r#"{"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}"#;
    for checkpoint in [int8(), int8().describe("layer.weight", class)] {
        assert_eq!(values(&checkpoint.weight(None).expect("loads")), expected(0));
    }
    let zeros = int8().add("layer._weight_zero_point", I8, &[4, 1], vec![3; 4]).describe("layer.weight", class);
    assert_eq!(values(&zeros.weight(None).expect("loads")), expected(3));
    let static_x = int8().add_f32("layer._weight_act_quant_scale", &[1], &[1.0]).describe("layer.weight", class);
    assert!(static_x.weight(None).is_ok());

    let float8 = Checkpoint::default()
        .add("layer._weight_qdata", F8_E4M3, &[4, 32], vec![0x38; 128])
        .add("layer._weight_scale", F32, &[4, 1], bytes(&scales))
        .describe("layer.weight", r#"{"_type": "Float8Tensor", "_data": {"block_size": [1, 32]}}"#);
    let weight = float8.weight(None).expect("loads");
    assert_eq!((weight.format().name, values(&weight)[32], values(&weight)[64]), ("fp8_e4m3", 0.25, 2.0));

    let intx = |bits: usize, codes: Vec<u8>| {
        Checkpoint::default()
            .add("layer._weight_qdata", I8, &[2, 64], codes)
            .add("layer._weight_scale", BF16, &[2, 2], bf16_bytes(&scales))
            .add("layer._weight_zero_point", I8, &[2, 2], vec![1, 0, 0xff, 1])
            .describe(
                "layer.weight",
                &format!(
                    r#"{{"_type": "IntxUnpackedToInt8Tensor", "_data": {{"block_size": [1, 32],
                    "target_dtype": {{"_type": "torch.dtype", "_data": "int{bits}"}}}}}}"#
                ),
            )
    };
    for (bits, format) in [(2, "int2_g32"), (3, "int3_g32"), (4, "int4_g32"), (5, "int8_g32"), (8, "int8_g32")] {
        let middle = 1i32 << (bits - 1);
        let codes: Vec<u8> = (0..128).map(|i| (i * 7 % (2 * middle) - middle) as u8).collect();
        let weight = intx(bits as usize, codes.clone()).weight(None).unwrap_or_else(|error| panic!("{bits}: {error}"));
        assert_eq!(weight.format().name, format);
        let expected = (0..128).map(|i| scales[i / 32] * (i32::from(codes[i] as i8) - [1, 0, -1, 1][i / 32]) as f32);
        assert_eq!(values(&weight), expected.collect::<Vec<f32>>(), "{bits}");
    }
    let error = intx(4, vec![100; 128]).weight(None).expect_err("beyond 4 bits").to_string();
    assert!(error.contains("100") && error.contains("-8..8"), "{error}");
}

#[test]
fn contradictions_are_refused_with_both_facts() {
    let layer = || Int4::new([8, 128], 64);
    let rows = |class: &str, data: &str| {
        layer().rows().describe("layer.weight", &format!(r#"{{"_type": "{class}", "_data": {{{data}}}}}"#))
    };
    let data = r#""block_size": [1, 64], "shape": [8, 128]"#;
    let tiles = |data: &str| {
        let class = "Int4TilePackedTo4dTensor";
        layer().tiles(8, 128).describe("layer.weight", &format!(r#"{{"_type": "{class}", "_data": {{{data}}}}}"#))
    };
    for (checkpoint, expected) in [
        (rows("Float8Tensor", data), &["Float8Tensor", "I8"][..]),
        (rows("Int4TilePackedTo4dTensor", data), &["Int4TilePackedTo4dTensor", "I8"]),
        (rows("NVFP4Tensor", data), &["torchao NVFP4Tensor", "not supported"]),
        (rows("Int4Tensor", r#""block_size": [1, 64], "shape": [8, 256]"#), &["[8, 64]", "[8, 256]"]),
        (rows("Int4Tensor", r#""block_size": [1, 32], "shape": [8, 128]"#), &["expected shape [4, 8]", "[2, 8]"]),
        (rows("Int4Tensor", r#""block_size": [2, 64], "shape": [8, 128]"#), &["`block_size`"]),
        (rows("Int4Tensor", r#""block_size": [1, 0], "shape": [8, 128]"#), &["`block_size`"]),
        (rows("Int4Tensor", r#""block_size": [1, 16], "shape": [8, 128]"#), &["groups of 16"]),
        (rows("Int4Tensor", data).without("zero_point"), &["layer._weight_zero_point"]),
        (rows("Int4Tensor", data).add_f32("layer._weight_act_pre_scale", &[128], &[1.0; 128]), &["act_pre_scale"]),
        (layer().rows().describe("layer.weight", "{"), &["metadata"]),
        (tiles(r#""block_size": [1, 64], "shape": [17, 128]"#), &["[1, 1, 32, 4]", "[17, 128]"]),
        (tiles(r#""block_size": [1, 64], "shape": [8, 4096]"#), &["[1, 1, 32, 4]", "[8, 4096]"]),
        (tiles(r#""block_size": [1, 64], "shape": [4294967296, 4294967296]"#), &["4294967296"]),
        (tiles(r#""block_size": [1, 32], "shape": [8, 128]"#), &["expected shape [4, 8, 2]"]),
    ] {
        let error = checkpoint.weight(None).expect_err(expected[0]).to_string();
        assert!(expected.iter().all(|fact| error.contains(fact)), "{expected:?}: {error}");
    }
    let far = Int4 {
        scales: vec![1.0, 1e-9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        ..layer()
    };
    let error = far.rows().weight(None).expect_err("far apart");
    assert!(matches!(&error, FormatError::UnsupportedFile { what, .. } if what.contains("row 0, group 1")), "{error}");
}
