//! The suite of `matmul`: cases that every backend must pass.

use qgemm_formats::DType;
use qgemm_hal::{Activation, FactorFormat, MatmulLayout, XPrecision};

use super::case::{MatmulCase, MatmulStrides};
use crate::activations::ActivationKind;
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<MatmulCase>] = &[
    group("matmul_layouts", "by rows and by columns, every type of A and B", layouts),
    group("matmul_sizes", "from one value to more than a tile in every direction, and nothing to add up", sizes),
    group("matmul_exact", "small integers, whose sums are exact", exact),
    group("matmul_epilogue", "alpha, C, accumulation into D, bias and activations in every type", epilogue),
    group("matmul_batched", "batches with strides, shared factors, outputs side by side", batched),
    group("matmul_strides", "leading dimensions and unaligned operands", strides),
    group("matmul_special", "infinities, NaN, subnormal numbers, magnitudes far apart", special),
    group("matmul_slopes", "gradients by what an activation was applied to", slopes),
    group("matmul_gradients", "dW += dY^T X over many tokens, and dX", gradients),
    group("matmul_k_grouped", "products of parts of K, as gradients of experts' weights are", k_grouped),
    group("matmul_rows_grouped", "products of groups of rows, as gradients by experts' inputs are", rows_grouped),
    group("matmul_tf32", "factors in f32 that may be rounded to TF32", tf32),
    group("matmul_every_kernel", "every kernel that a plan has the choice of", every_kernel),
    group("matmul_bf16x3", "factors in f32 that may be split into two bf16 each", bf16x3),
    group("matmul_e4m3", "factors in E4M3, one or both, with a factor for all of each", e4m3),
    group(
        "matmul_e4m3_blocks",
        "factors in E4M3 with a scale for 128 values along K, whole and by parts of K",
        e4m3_blocks,
    ),
];

/// M, N and K around vectors, tiles of 64 and 128, and k-tiles of
/// 16 and 32.
const SIZES: [[usize; 3]; 20] = [
    [1, 1, 1],
    [1, 1, 0],
    [7, 5, 0],
    [1, 65, 33],
    [65, 1, 31],
    [2, 3, 200],
    [8, 8, 8],
    [16, 8, 16],
    [17, 9, 15],
    [33, 70, 64],
    [64, 64, 32],
    [63, 65, 96],
    [65, 63, 47],
    [127, 40, 129],
    [128, 128, 64],
    [129, 130, 65],
    [40, 257, 72],
    [200, 136, 40],
    [1, 520, 100],
    [300, 2, 90],
];

fn dtype(i: usize) -> DType {
    DType::ALL[i % DType::ALL.len()]
}

fn layout(i: usize) -> MatmulLayout {
    MatmulLayout::ALL[i % MatmulLayout::ALL.len()]
}

/// Sets one type for both factors, and a type for D.
fn typed(i: usize, case: MatmulCase) -> MatmulCase {
    MatmulCase { types: [dtype(i).into(); 2], d_dtype: dtype(i / 3), layout: layout(i), seed: i as u64, ..case }
}

fn layouts() -> Vec<MatmulCase> {
    let mut cases = Vec::new();
    for a in DType::ALL {
        for b in DType::ALL {
            for layout in MatmulLayout::ALL {
                let i = cases.len();
                // Mixed types have one path each; one type has a path per
                // layout.
                let shape = if a == b { [72, 136, 80] } else { [33, 40, 24] };
                let case =
                    MatmulCase { types: [a.into(), b.into()], d_dtype: dtype(i), layout, ..MatmulCase::new(shape) };
                cases.push(MatmulCase { seed: i as u64, ..case });
            }
        }
    }
    cases
}

fn sizes() -> Vec<MatmulCase> {
    let of = |(i, shape)| {
        let case = MatmulCase::new(shape);
        [typed(i, case), typed(i + 1, case), typed(5 * i + 2, case)]
    };
    SIZES.into_iter().enumerate().flat_map(of).collect()
}

fn exact() -> Vec<MatmulCase> {
    let mut cases = Vec::new();
    for shape in [[40, 24, 100], [130, 70, 64], [9, 140, 33]] {
        for layout in MatmulLayout::ALL {
            for dtype in DType::ALL {
                let case = MatmulCase { layout, seed: cases.len() as u64, ..MatmulCase::new(shape) };
                let case = MatmulCase { types: [dtype.into(); 2], ..case }.exact();
                cases.push(MatmulCase { alpha: 2.0, bias: Some(DType::F32), accumulate: Some(-3.0), ..case });
            }
        }
    }
    cases
}

fn epilogue() -> Vec<MatmulCase> {
    let mut cases = Vec::new();
    for (i, activation) in Activation::ALL.into_iter().enumerate() {
        for d_dtype in DType::ALL {
            let at = cases.len();
            let c = (at % 2 == 0).then(|| (0.5 - i as f32, dtype(at / 2)));
            cases.push(MatmulCase {
                d_dtype,
                activation,
                alpha: [1.0, -0.25, 3.0][at % 3],
                c,
                accumulate: if c.is_none() { Some(1.0) } else { None },
                bias: (at % 3 != 1).then(|| dtype(at)),
                ..typed(at, MatmulCase::new([[37, 50, 48], [70, 33, 20]][at % 2]))
            });
            cases.last_mut().into_iter().for_each(|case| case.d_dtype = d_dtype);
        }
    }
    // With factor 0, neither C nor the old D may be read.
    cases.push(MatmulCase { c: Some((0.0, DType::F32)), ..MatmulCase::new([9, 9, 9]) });
    cases.push(MatmulCase { accumulate: Some(0.0), ..MatmulCase::new([9, 9, 9]) });
    cases.push(MatmulCase { alpha: 0.0, c: Some((2.0, DType::F32)), ..MatmulCase::new([9, 9, 9]) });
    cases
}

fn slopes() -> Vec<MatmulCase> {
    let mut cases = Vec::new();
    for activation in Activation::ALL {
        for (z, shape) in DType::ALL.into_iter().zip([[37, 50, 48], [70, 136, 24], [5, 33, 200]]) {
            let i = cases.len();
            let case = typed(i, MatmulCase::new(shape));
            let bias = (i % 2 == 0).then(|| dtype(i));
            let strides = MatmulStrides { gaps: [0, 0, [0, 3, 8][i % 3]], ..MatmulStrides::default() };
            cases.push(MatmulCase { activation, slope: true, c: Some((1.0, z)), alpha: 0.5, bias, strides, ..case });
        }
    }
    cases
}

fn batched() -> Vec<MatmulCase> {
    let plain = MatmulStrides::default();
    let all = [
        plain,
        MatmulStrides { one_a: true, ..plain },
        MatmulStrides { one_b: true, between: 1, ..plain },
        MatmulStrides { one_a: true, one_b: true, one_c: true, ..plain },
        MatmulStrides { d_beside: true, gaps: [0, 0, 8], ..plain },
        MatmulStrides { between: 3, gaps: [8, 8, 3], ..plain },
    ];
    let mut cases = Vec::new();
    for strides in all {
        for (batch, shape) in [(2, [33, 24, 40]), (7, [5, 17, 16]), (70, [1, 3, 8])] {
            let i = cases.len();
            let c = (i % 2 == 0 && !strides.d_beside).then(|| (0.5, dtype(i / 2)));
            let accumulate = (strides.d_beside && i % 2 == 1).then_some(1.0);
            cases.push(MatmulCase { batch, strides, c, accumulate, ..typed(i, MatmulCase::new(shape)) });
        }
    }
    cases
}

fn strides() -> Vec<MatmulCase> {
    let plain = MatmulStrides::default();
    let all = [
        MatmulStrides { gaps: [8, 0, 0], ..plain },
        MatmulStrides { gaps: [0, 16, 8], ..plain },
        MatmulStrides { gaps: [1, 0, 0], ..plain },
        MatmulStrides { gaps: [0, 3, 0], ..plain },
        MatmulStrides { gaps: [0, 0, 5], ..plain },
        MatmulStrides { offset: 1, ..plain },
        MatmulStrides { offset: 3, gaps: [2, 5, 1], ..plain },
    ];
    let mut cases = Vec::new();
    for strides in all {
        for dtype in DType::ALL {
            for half in 0..2 {
                let i = cases.len();
                let layout = layout(i + half);
                let case = MatmulCase { layout, strides, seed: i as u64, ..MatmulCase::new([72, 40, 88]) };
                cases.push(MatmulCase { c: (i % 3 == 0).then_some((1.0, dtype)), ..case.of_type(dtype) });
            }
        }
    }
    cases
}

fn special() -> Vec<MatmulCase> {
    use ActivationKind as V;
    let mut cases = Vec::new();
    for values in [
        [V::NotFinite, V::Normal],
        [V::Normal, V::NotFinite],
        [V::Denormals, V::Normal],
        [V::Normal, V::Denormals],
        [V::Outliers, V::PositiveMean],
        [V::ConstantRows, V::AllEqual],
    ] {
        for dtype in DType::ALL {
            for shape in [[21, 30, 50], [70, 67, 64]] {
                let i = cases.len();
                let case = MatmulCase { values, layout: layout(i / 2), seed: i as u64, ..MatmulCase::new(shape) };
                cases.push(MatmulCase { d_dtype: DType::F32, ..case.of_type(dtype) });
            }
        }
    }
    for dtype in [DType::F32, DType::BF16] {
        let values = [V::MixedMagnitudes, V::Normal];
        cases.push(MatmulCase { values, ..MatmulCase::new([40, 33, 64]).of_type(dtype) });
    }
    cases
}

/// f32 factors that may be rounded to TF32.
fn tf32() -> Vec<MatmulCase> {
    rounded(XPrecision::Tf32)
}

/// f32 factors that may be split into two bf16: any alignment,
/// and values that overflow when rounded.
fn bf16x3() -> Vec<MatmulCase> {
    let mut cases = rounded(XPrecision::Bf16x3);
    for (i, layout) in MatmulLayout::ALL.into_iter().enumerate() {
        let strides = MatmulStrides { offset: 1 + i % 3, gaps: [i, 3 - i, i % 2], ..MatmulStrides::default() };
        let case = MatmulCase { layout, strides, seed: i as u64, ..MatmulCase::new([150, 130, 90 + i]) };
        cases.push(MatmulCase { operand_precision: XPrecision::Bf16x3, ..case });
    }
    // Sums of one sign, in which all errors add up.
    let values = [ActivationKind::PositiveMean, ActivationKind::AllEqual];
    cases.extend(values.map(|values| MatmulCase {
        values: [values; 2],
        operand_precision: XPrecision::Bf16x3,
        ..MatmulCase::new([40, 70, 3000])
    }));
    cases
}

/// E4M3 factors with every other format: all layouts and
/// alignments, per-tensor scales, K ranges, batches and NaN.
fn e4m3() -> Vec<MatmulCase> {
    use ActivationKind as V;
    const E4M3: FactorFormat = FactorFormat::E4M3;
    let mut cases: Vec<MatmulCase> = Vec::new();
    let plain = MatmulStrides::default();
    for layout in MatmulLayout::ALL {
        for shape in [[72, 136, 80], [132, 200, 300], [33, 65, 17], [16, 24, 5000], [7, 5, 0], [160, 48, 129]] {
            let i = cases.len();
            let values = [[V::Normal; 2], [V::SmallIntegers; 2], [V::NotFinite, V::Normal]][i % 3];
            let scales = [[None; 2], [Some(2.0), None], [None, Some(0.3)], [Some(-0.7), Some(11.0)]][i % 4];
            let strides = match i % 5 {
                1 => MatmulStrides { gaps: [8, 16, 0], ..plain },
                3 => MatmulStrides { gaps: [1, 3, 2], offset: 1 + i % 7, ..plain },
                _ => plain,
            };
            let case = MatmulCase { layout, values, scales, strides, seed: i as u64, ..MatmulCase::new(shape) };
            cases.push(MatmulCase { types: [E4M3; 2], d_dtype: dtype(i), ..case });
        }
        for other in DType::ALL {
            let i = cases.len();
            let types = if i.is_multiple_of(2) { [E4M3, other.into()] } else { [other.into(), E4M3] };
            let scales = if i.is_multiple_of(2) { [Some(0.5), None] } else { [None, Some(3.0)] };
            let case = MatmulCase { layout, types, scales, d_dtype: dtype(i), ..MatmulCase::new([40, 72, 50]) };
            cases.push(MatmulCase { values: [[V::Normal; 2], [V::SmallIntegers; 2]][i % 2], seed: i as u64, ..case });
        }
    }
    let both = MatmulCase { types: [E4M3; 2], ..MatmulCase::new([40, 48, 300]) };
    // NaN in both factors, magnitudes out of range on both sides,
    // and sums of one sign.
    for values in [[V::NotFinite, V::NotFinite], [V::MixedMagnitudes, V::Outliers], [V::ConstantRows, V::AllEqual]] {
        cases.push(MatmulCase { values, ..both });
    }
    let epilogue = MatmulCase { alpha: -0.25, bias: Some(DType::F32), activation: Activation::Silu, ..both };
    cases.push(MatmulCase { scales: [Some(0.1), Some(0.2)], c: Some((2.0, DType::F16)), batch: 3, ..epilogue });
    let shared = MatmulStrides { one_b: true, between: 2, ..plain };
    cases.push(MatmulCase { accumulate: Some(1.0), scales: [Some(4.0), Some(0.5)], batch: 5, strides: shared, ..both });
    for seed in 0..4 {
        let case = MatmulCase { scales: [Some(2.0), None], accumulate: Some(1.0), seed, ..both };
        cases.push(MatmulCase { shape: [72, 40, 700], ..case }.k_grouped(5));
    }
    cases
}

/// E4M3 factors with block scales: sizes around blocks and tiles,
/// any alignment, split-K, K ranges that begin and end inside
/// blocks, infinities and NaN.
fn e4m3_blocks() -> Vec<MatmulCase> {
    use ActivationKind as V;
    let plain = MatmulStrides::default();
    let of = MatmulCase { types: [FactorFormat::E4M3Block; 2], layout: MatmulLayout::Nt, ..MatmulCase::new([1, 1, 1]) };
    let mut cases: Vec<MatmulCase> = Vec::new();
    let shapes = [
        [72, 136, 80],
        [132, 200, 300],
        [33, 65, 17],
        [16, 24, 5000],
        [7, 5, 0],
        [160, 48, 129],
        [1, 1, 1],
        [1, 70, 128],
        [65, 1, 255],
        [64, 64, 256],
        [130, 130, 384],
        [40, 40, 2048],
    ];
    for shape in shapes {
        let i = cases.len();
        for (j, values) in [[V::Normal; 2], [V::SmallIntegers; 2]].into_iter().enumerate() {
            let strides = match (i + j) % 4 {
                1 => MatmulStrides { gaps: [16, 48, 0], ..plain },
                3 => MatmulStrides { gaps: [1, 3, 2], offset: 1 + i % 7, ..plain },
                _ => plain,
            };
            let accumulate = (i % 3 == 1).then_some(1.0);
            cases.push(MatmulCase { shape, values, strides, accumulate, d_dtype: dtype(i + j), seed: i as u64, ..of });
        }
    }
    let both = MatmulCase { shape: [40, 48, 300], ..of };
    for values in [
        [V::NotFinite, V::Normal],
        [V::Normal, V::NotFinite],
        [V::MixedMagnitudes, V::Outliers],
        [V::ConstantRows, V::AllEqual],
        [V::PositiveMean, V::PositiveMean],
    ] {
        cases.push(MatmulCase { values, ..both });
    }
    let epilogue = MatmulCase { alpha: -0.25, bias: Some(DType::F32), activation: Activation::Silu, ..both };
    cases.push(MatmulCase { c: Some((2.0, DType::F16)), ..epilogue });
    for seed in 0..4 {
        let grouped = MatmulCase { shape: [72, 40, 700], accumulate: (seed % 2 == 0).then_some(1.0), seed, ..of };
        cases.push(grouped.k_grouped(5));
        let aligned = MatmulStrides { gaps: [4, 20, 0], ..plain };
        cases.push(MatmulCase { shape: [150, 170, 700], strides: aligned, ..grouped }.k_grouped(5));
        let unaligned = MatmulStrides { gaps: [3, 5, 1], offset: 1, ..plain };
        cases.push(MatmulCase { shape: [130, 66, 1000], strides: unaligned, ..grouped.exact() }.k_grouped(7));
    }
    // Infinities and NaN stay in the K ranges that share their
    // block; and split K ranges.
    cases.push(MatmulCase { values: [V::NotFinite; 2], shape: [20, 24, 900], seed: 4, ..of }.k_grouped(6));
    let not_finite = MatmulStrides { gaps: [12, 12, 0], ..plain };
    cases.push(
        MatmulCase { values: [V::NotFinite; 2], shape: [20, 24, 900], strides: not_finite, seed: 4, ..of }.k_grouped(6),
    );
    for k in [9000, 9008] {
        cases.push(MatmulCase { shape: [40, 40, k], seed: 9, ..of }.k_grouped(3));
    }
    cases
}

/// f32 factors that may be rounded: every layout, aligned or not,
/// K ranges, infinities and NaN.
fn rounded(operand_precision: XPrecision) -> Vec<MatmulCase> {
    let allowed = |case: MatmulCase| MatmulCase { operand_precision, ..case };
    let mut cases: Vec<MatmulCase> = Vec::new();
    for (i, layout) in MatmulLayout::ALL.into_iter().enumerate() {
        for shape in [[40, 36, 64], [132, 200, 300], [16, 24, 5000], [33, 65, 17], [256, 128, 48]] {
            let values = [ActivationKind::Normal, ActivationKind::SmallIntegers][(cases.len() + i) % 2];
            let seed = cases.len() as u64;
            cases.push(allowed(MatmulCase { layout, values: [values; 2], seed, ..MatmulCase::new(shape) }));
        }
    }
    cases.push(allowed(MatmulCase { accumulate: Some(1.0), seed: 2, ..MatmulCase::new([72, 40, 700]) }.k_grouped(5)));
    for values in [ActivationKind::NotFinite, ActivationKind::MixedMagnitudes] {
        cases.push(allowed(MatmulCase { values: [values, ActivationKind::Normal], ..MatmulCase::new([40, 32, 64]) }));
    }
    cases
}

/// Every kernel that a plan may choose, including large tiles for
/// larger products.
/// TF32: every layout and alignment, sizes around tiles, all
/// epilogues, batches and K ranges.
/// E4M3: codes along K, and copies of other layouts.
fn every_kernel() -> Vec<MatmulCase> {
    use ActivationKind as V;
    let plain = MatmulStrides::default();
    let of = |case: MatmulCase| MatmulCase { operand_precision: XPrecision::Tf32, every_kernel: true, ..case };
    let mut cases = Vec::new();
    for (i, layout) in MatmulLayout::ALL.into_iter().enumerate() {
        let case = MatmulCase { layout, seed: i as u64, ..MatmulCase::new([129, 259, 100]) };
        cases.push(MatmulCase { bias: Some(DType::F32), alpha: -0.5, ..case });
        // Aligned in every layout; some kernels have a whole largest
        // tile.
        cases.push(MatmulCase { shape: [132, 264, 116], ..case });
        let gaps = [[0, 8, 4], [3, 1, 0], [4, 0, 8], [1, 12, 3]][i];
        let strides = MatmulStrides { gaps, offset: i, ..plain };
        let c = Some((2.0, dtype(i)));
        cases.push(MatmulCase { strides, c, d_dtype: dtype(i + 1), ..case.exact() });
        let strides = MatmulStrides { one_a: i % 2 == 1, one_b: i == 2, between: i, gaps: [i, 2 * i, 0], ..plain };
        cases.push(MatmulCase { batch: 3, strides, shape: [65, 72, 33], ..case });
    }
    cases.push(MatmulCase { activation: Activation::Silu, ..MatmulCase::new([40, 136, 1100]) });
    cases.push(MatmulCase { layout: MatmulLayout::Tt, accumulate: Some(1.0), ..MatmulCase::new([5, 3, 7]) });
    for values in [[V::NotFinite, V::Normal], [V::Normal, V::NotFinite], [V::MixedMagnitudes, V::Denormals]] {
        cases.push(MatmulCase { values, layout: layout(cases.len()), ..MatmulCase::new([70, 130, 64]) });
    }
    for (seed, values) in [V::Normal, V::NotFinite, V::Normal, V::SmallIntegers].into_iter().enumerate() {
        let case = MatmulCase { seed: seed as u64, values: [values; 2], ..MatmulCase::new([72, 40, 333]) };
        cases.push(MatmulCase { accumulate: (seed % 2 == 0).then_some(1.0), ..case }.k_grouped(4));
    }
    let codes =
        MatmulCase { types: [FactorFormat::E4M3; 2], layout: MatmulLayout::Nt, ..MatmulCase::new([129, 136, 320]) };
    cases.push(MatmulCase { alpha: -0.5, bias: Some(DType::F32), scales: [Some(2.0), Some(0.3)], ..codes });
    cases.push(MatmulCase { c: Some((2.0, DType::F16)), d_dtype: DType::BF16, ..codes }.exact());
    let strides = MatmulStrides { gaps: [16, 0, 3], one_b: true, between: 1, ..plain };
    cases.push(MatmulCase { batch: 3, strides, shape: [65, 72, 48], accumulate: Some(1.0), ..codes });
    for (i, layout) in MatmulLayout::ALL.into_iter().enumerate() {
        let strides = MatmulStrides { gaps: [[0; 3], [3, 16, 0], [16, 1, 1], [0, 5, 0]][i], offset: i % 2, ..plain };
        let batched = MatmulStrides { one_a: i % 2 == 1, one_b: i == 2, between: i, ..strides };
        let scales = [Some(0.5), None];
        cases.push(MatmulCase { layout, strides, scales, shape: [129, 71, 200 + 8 * i], ..codes }.exact());
        cases.push(MatmulCase { layout, strides: batched, batch: 3, shape: [66, 144, 333], ..codes });
    }
    let strides = MatmulStrides { gaps: [12, 12, 0], ..plain };
    for (i, values) in [V::PositiveMean, V::NotFinite, V::MixedMagnitudes].into_iter().enumerate() {
        cases.push(MatmulCase { values: [V::Normal, values], strides, shape: [70, 33, [1300, 20, 100][i]], ..codes });
    }
    cases.into_iter().map(of).collect()
}

/// Gradients of expert weights: K ranges of any length, in every
/// type, accumulated.
fn k_grouped() -> Vec<MatmulCase> {
    let shapes = [([40, 48, 300], 5), ([130, 72, 700], 3), ([8, 264, 65], 8), ([200, 136, 1], 2), ([1, 3, 90], 4)];
    let mut cases: Vec<MatmulCase> = Vec::new();
    for (i, dtype) in DType::ALL.into_iter().enumerate() {
        for (j, (shape, products)) in shapes.into_iter().enumerate() {
            for values in [ActivationKind::Normal, ActivationKind::SmallIntegers] {
                let seed = cases.len() as u64;
                let case = MatmulCase { types: [dtype.into(); 2], values: [values; 2], ..MatmulCase::new(shape) };
                let accumulate = ((i + j) % 2 == 0).then_some(1.0);
                cases.push(MatmulCase { accumulate, seed, ..case }.k_grouped(products));
            }
        }
    }
    // Infinities and NaN stay in their K range; and split K ranges.
    let bad = MatmulCase { values: [ActivationKind::NotFinite; 2], seed: 4, ..MatmulCase::new([70, 40, 150]) };
    cases.extend(DType::ALL.map(|dtype| bad.of_type(dtype).k_grouped(4)));
    let long = MatmulCase { seed: 9, ..MatmulCase::new([40, 40, 9000]) };
    cases.extend(DType::ALL.map(|dtype| MatmulCase { d_dtype: DType::F32, ..long.of_type(dtype) }.k_grouped(3)));
    cases
}

/// Row groups of any length, around tiles, in the types of
/// gradients, with all epilogues.
fn rows_grouped() -> Vec<MatmulCase> {
    let shapes = [([40, 48, 33], 5), ([300, 72, 70], 3), ([65, 264, 8], 40), ([1, 3, 90], 2), ([7, 5, 0], 3)];
    let mut cases: Vec<MatmulCase> = Vec::new();
    let types = DType::ALL.map(|dtype| [dtype; 2]).into_iter().chain([[DType::F16, DType::F32]]);
    for [a, b] in types {
        for (shape, products) in shapes {
            for layout in [MatmulLayout::Nt, MatmulLayout::Nn] {
                let i = cases.len();
                let values = [ActivationKind::Normal, ActivationKind::SmallIntegers][i / 2 % 2];
                let strides = match i % 3 {
                    0 => MatmulStrides::default(),
                    1 => MatmulStrides { gaps: [8, 16, 8], between: 8, ..MatmulStrides::default() },
                    _ => MatmulStrides { gaps: [3, 1, 5], offset: 1, ..MatmulStrides::default() },
                };
                let case = MatmulCase { types: [a.into(), b.into()], layout, strides, ..MatmulCase::new(shape) };
                let case = MatmulCase { values: [values; 2], d_dtype: dtype(i), seed: i as u64, ..case };
                let added = MatmulCase {
                    alpha: [1.0, -2.0][i % 2],
                    c: (i % 4 == 1).then_some((1.0, DType::F32)),
                    accumulate: (i % 4 == 2).then_some(1.0),
                    bias: (i % 5 == 3).then(|| dtype(i / 5)),
                    ..case
                };
                cases.push(added.rows_grouped(products));
            }
        }
    }
    // Infinities and NaN stay in their row and product.
    // More products than rows, and one product has all rows.
    let bad = MatmulCase {
        values: [ActivationKind::NotFinite; 2],
        layout: MatmulLayout::Nt,
        ..MatmulCase::new([70, 40, 64])
    };
    cases.extend(DType::ALL.map(|dtype| MatmulCase { seed: 2, ..bad.of_type(dtype) }.rows_grouped(4)));
    let many = MatmulCase { layout: MatmulLayout::Nt, ..MatmulCase::new([90, 24, 40]) };
    cases.extend((0..5).map(|seed| MatmulCase { seed, ..many.of_type(DType::F16) }.rows_grouped(300)));
    cases
}

fn gradients() -> Vec<MatmulCase> {
    let mut cases = Vec::new();
    for dtype in DType::ALL {
        // Output features, input features, tokens: dW += dY^T X.
        for shape in [[48, 40, 3000], [130, 72, 700]] {
            for (values, accumulate) in [(ActivationKind::Normal, 1.0), (ActivationKind::SmallIntegers, 1.0)] {
                cases.push(MatmulCase {
                    layout: MatmulLayout::Tn,
                    types: [dtype.into(); 2],
                    values: [values; 2],
                    accumulate: Some(accumulate),
                    seed: cases.len() as u64,
                    ..MatmulCase::new(shape)
                });
            }
        }
        // dX = dY W.
        let case = MatmulCase { layout: MatmulLayout::Nn, ..MatmulCase::new([40, 96, 600]) };
        cases.push(case.of_type(dtype));
        // Split-K in every layout.
        cases.extend(MatmulLayout::ALL.map(|layout| MatmulCase {
            layout,
            activation: Activation::Silu,
            bias: Some(DType::F32),
            ..MatmulCase::new([10, 20, 5001]).of_type(dtype)
        }));
    }
    cases
}
