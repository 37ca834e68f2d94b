//! Every family, configuration and format on an adapter against the product in f64 of the decoded weights.

mod common;

use common::{adapter, download, upload};
use qgemm_formats::prepack::PackClass;
use qgemm_formats::{DType, Encoding, Format, HostWeight, NO_COLUMN, ScaleType};
use qgemm_hal::{
    Activation, CheckedGemm, Dense, Device, GemmArgs, HalError, LaunchPlan, TileConfig, WeightArgs, XRounding,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Bytes around every operand, not a multiple of anything but 4, so that no operand begins where its buffer does.
const PAD: usize = 12;
const POISON: u8 = 0xff;

/// Operands on the host.
struct Case {
    op: CheckedGemm,
    weight: HostWeight,
    x: Vec<u8>,
    c: Vec<u8>,
    bias: Vec<u8>,
}

/// What may be odd about a problem.
#[derive(Clone, Copy, Default)]
struct Options {
    transposed_x: bool,
    gaps: bool,
    c: Option<DType>,
    bias: Option<DType>,
    k_order: bool,
    integers: bool,
}

fn random_blocks(format: Format, blocks: usize, rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = vec![0u8; blocks * format.block_bytes];
    rng.fill(&mut bytes[..]);
    for block in bytes.chunks_exact_mut(format.block_bytes) {
        match format.encoding {
            Encoding::Plain(dtype) => dtype.write(block, 0, rng.random_range(-1.0..1.0)),
            // No infinities or NaN.
            Encoding::E4M3 | Encoding::E5M2 => block.iter_mut().for_each(|b| *b &= 0xbb),
            _ => {}
        }
        for scale in format.float_scales {
            let (at, value) = (scale.offset, rng.random_range(0.01f32..0.1));
            match scale.kind {
                ScaleType::F32 => DType::F32.write(&mut block[at..], 0, value),
                ScaleType::F16 => DType::F16.write(&mut block[at..], 0, value),
                ScaleType::E4M3 => block[at] = rng.random_range(0..0x50),
                ScaleType::E8M0 => block[at] = rng.random_range(118..130),
            }
        }
    }
    bytes
}

fn random_weight(format: Format, n: usize, k: usize, k_order: bool, rng: &mut StdRng) -> HostWeight {
    let weight = if k_order {
        // A shuffled order with a hole in front and two behind.
        let mut order: Vec<u32> = (0..k as u32).collect();
        (1..k).rev().for_each(|i| order.swap(i, rng.random_range(0..=i)));
        order.insert(0, NO_COLUMN);
        order.extend([NO_COLUMN; 2]);
        let blocks = random_blocks(format, n * format.blocks_per_row(order.len()), rng);
        HostWeight::with_k_order(format, n, k, blocks.into(), order)
    } else {
        HostWeight::new(format, n, k, random_blocks(format, n * format.blocks_per_row(k), rng).into())
    };
    let weight = weight.expect("well formed");
    if format.row_scale {
        let scales = (0..n).map(|_| rng.random_range(0.1..2.0)).collect();
        return weight.with_row_scale(scales).expect("n finite scales");
    }
    weight
}

impl Case {
    fn new(format: Format, [m, n, k]: [usize; 3], x: DType, d: DType, options: Options, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let weight = random_weight(format, n, k, options.k_order, &mut rng);
        let gap = if options.gaps { 3 } else { 0 };
        let dense = |dtype, columns: usize| Dense {
            dtype,
            row_stride: (columns + gap) as u64,
            col_stride: 1,
            aligned16: false,
        };
        let x = match options.transposed_x {
            true => Dense { row_stride: 1, col_stride: (m + gap) as u64, ..dense(x, k) },
            false => dense(x, k),
        };
        let mut values = |dtype: DType, count: usize| -> Vec<u8> {
            let value = |_| match options.integers {
                true => rng.random_range(-3i32..=3) as f32,
                false => rng.random_range(-1.0f32..1.5),
            };
            dtype.encode(&(0..count).map(value).collect::<Vec<_>>())
        };
        let op = CheckedGemm {
            m,
            n,
            features: n,
            gated: false,
            k,
            stored_k: weight.stored_k(),
            format,
            class: PackClass::Canonical,
            row_scale: weight.row_scale().is_some(),
            k_order: weight.k_order().is_some(),
            weight_fits_f16: weight.fits_f16(),
            x,
            x_rounding: XRounding::default(),
            d: dense(d, n),
            c: options.c.map(|dtype| dense(dtype, n)),
            bias: options.bias,
            token_scale: false,
            residual: None,
            alpha: if options.c.is_some() { 0.5 } else { 1.0 },
            beta: if options.c.is_some() { -1.5 } else { 0.0 },
            activation: Activation::Identity,
            batch_invariant: false,
        };
        let x = values(x.dtype, (m + gap) * (k + gap));
        let c = options.c.map_or(vec![], |dtype| values(dtype, m * (n + gap)));
        let bias = options.bias.map_or(vec![], |dtype| values(dtype, n));
        Self { op, weight, x, c, bias }
    }

    /// The expected D, row-major, and ΣΣ w²x².
    fn oracle(&self) -> (Vec<f64>, f64) {
        let op = &self.op;
        let x: Vec<Vec<f64>> = (0..op.m)
            .map(|m| {
                let at = |k| m * op.x.row_stride as usize + k * op.x.col_stride as usize;
                (0..op.k).map(|k| f64::from(op.x.dtype.read(&self.x, at(k)))).collect()
            })
            .collect();
        let (mut out, mut squares) = (vec![0.0; op.m * op.n], 0.0);
        for n in 0..op.n {
            let w: Vec<f64> = self.weight.dequantize_row(n).into_iter().map(f64::from).collect();
            for m in 0..op.m {
                let products = || w.iter().zip(&x[m]).map(|(w, x)| w * x);
                squares += products().map(|p| p * p).sum::<f64>();
                let mut value = f64::from(op.alpha) * products().sum::<f64>();
                if let Some(c) = op.c {
                    value += f64::from(op.beta) * f64::from(c.dtype.read(&self.c, m * c.row_stride as usize + n));
                }
                if let Some(dtype) = op.bias {
                    value += f64::from(dtype.read(&self.bias, n));
                }
                out[m * op.n + n] = value;
            }
        }
        (out, squares)
    }

    /// D as the kernel of `config` computes it: all bytes that D's rows span, gaps between rows included.
    fn run(&self, device: &dyn Device, family: usize, config: TileConfig) -> Vec<u8> {
        let op = &self.op;
        let kernel = device.families()[family].prepare(device, op, &plan(op, config)).expect("supported");
        assert!(kernel.name().ends_with(&format!("_nt_{}_{}", op.format, op.x.dtype)), "{}", kernel.name());
        let padded = |bytes: &[u8]| upload(device, &[&[POISON; PAD], bytes, &[POISON; PAD]].concat());
        let x = padded(&self.x);
        let w = padded(self.weight.blocks());
        let row_scale = self.weight.row_scale().map(|s| padded(&DType::F32.encode(s)));
        let k_order =
            self.weight.k_order().map(|o| padded(&o.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<_>>()));
        let c = op.c.map(|_| padded(&self.c));
        let bias = op.bias.map(|_| padded(&self.bias));
        let len = ((op.m - 1) * op.d.row_stride as usize + op.n) * op.d.dtype.bytes();
        let mut d = upload(device, &vec![POISON; len + 2 * PAD]);
        let inner = |buffer: &qgemm_hal::Buffer| PAD..buffer.len() - PAD;
        let view = |buffer: &'_ Option<qgemm_hal::Buffer>| buffer.as_ref().map(inner);
        let (scale_range, order_range, c_range, bias_range) = (view(&row_scale), view(&k_order), view(&c), view(&bias));
        let d_range = inner(&d);
        let args = GemmArgs {
            x: x.slice(inner(&x)).expect("inside"),
            w: WeightArgs {
                data: w.slice(inner(&w)).expect("inside"),
                row_scale: row_scale.as_ref().zip(scale_range).map(|(b, r)| b.slice(r).expect("inside")),
                k_order: k_order.as_ref().zip(order_range).map(|(b, r)| b.slice(r).expect("inside")),
            },
            c: c.as_ref().zip(c_range).map(|(b, r)| b.slice(r).expect("inside")),
            bias: bias.as_ref().zip(bias_range).map(|(b, r)| b.slice(r).expect("inside")),
            token_scale: None,
            residual: None,
            d: d.slice_mut(d_range).expect("inside"),
            workspace: None,
        };
        kernel.launch(&device.default_stream(), args).expect("launches");
        let all = download(device, &d);
        assert!(all[..PAD].iter().chain(&all[len + PAD..]).all(|&b| b == POISON), "wrote outside D");
        all[PAD..len + PAD].to_vec()
    }

    /// Runs every configuration of every family that serves the case; returns how many there were.
    fn check(&self, device: &dyn Device, exact: bool) -> usize {
        (0..device.families().len()).map(|index| self.check_family(device, index, exact)).sum()
    }

    /// Runs every configuration of one family, if it serves the case; returns how many there were.
    fn check_family(&self, device: &dyn Device, index: usize, exact: bool) -> usize {
        let (op, family) = (&self.op, device.families()[index]);
        if family.supports(op, device.info()).is_err() {
            return 0;
        }
        let (expected, squares) = self.oracle();
        let configs = family.candidates(op, device.info());
        for &config in &configs {
            let what = format!(
                "{} {}x{} of {}, {}x{}x{}, {} to {}",
                config.family, config.tile_n, config.tile_m, op.format, op.m, op.n, op.k, op.x.dtype, op.d.dtype
            );
            let bytes = self.run(device, index, config);
            self.compare(&bytes, &expected, squares, exact, &what);
            assert!(self.run(device, index, config) == bytes, "{what}: a second run differs");
        }
        configs.len()
    }

    /// Compares the bytes of D with what is expected, and what lies between its rows with the poison.
    fn compare(&self, bytes: &[u8], expected: &[f64], squares: f64, exact: bool, what: &str) {
        let op = &self.op;
        let mut error = 0.0;
        for m in 0..op.m {
            let row = m * op.d.row_stride as usize;
            for n in 0..op.n {
                let got = f64::from(op.d.dtype.read(bytes, row + n));
                let want = expected[m * op.n + n];
                assert!(got.is_finite(), "{what}: D[{m}, {n}] = {got}, expected {want}");
                assert!(!exact || got == want, "{what}: D[{m}, {n}] = {got}, expected exactly {want}");
                error += (got - want).powi(2);
            }
            let width = op.d.dtype.bytes();
            let gap = (row + op.n) * width..((row + op.d.row_stride as usize) * width).min(bytes.len());
            assert!(bytes[gap].iter().all(|&b| b == POISON), "{what}: wrote behind row {m}");
        }
        let error = error / expected.iter().map(|y| y * y).sum::<f64>().max(squares).max(f64::MIN_POSITIVE);
        // f32 arithmetic throughout: what remains is the rounding of D, by half a unit in the last place.
        let limit = match op.d.dtype {
            DType::F32 => 1e-11,
            DType::F16 => 2f64.powi(-22),
            DType::BF16 => 2f64.powi(-16),
        };
        assert!(error <= limit, "{what}: error {error:e}, limit {limit:e}");
    }
}

fn plan(op: &CheckedGemm, config: TileConfig) -> LaunchPlan {
    let n_tiles = (op.n as u32).div_ceil(config.tile_n);
    let m_tiles = (op.m as u32).div_ceil(config.tile_m);
    LaunchPlan {
        config,
        n_tiles,
        m_tiles,
        k_steps: (op.stored_k as u32).div_ceil(config.tile_k),
        splits: 1,
        stream_k: None,
        grid: [n_tiles, m_tiles, 1],
        workspace_bytes: 0,
        estimate: 0.0,
    }
}

/// A K of two blocks and a part where rows may be ragged.
fn some_k(format: Format) -> usize {
    match (format.block_len, format.ragged_k) {
        (1, _) => 83,
        (len, true) => 2 * len + len / 2 + 3,
        (len, false) => 2 * len,
    }
}

#[test]
fn every_format() {
    let Some(device) = adapter() else { return };
    for (i, format) in Format::all().enumerate() {
        // The types take turns; `every_type` has all of them.
        let (x, d) = (DType::ALL[i % 3], DType::ALL[(i / 3) % 3]);
        let mut runs = 0;
        for m in [1, 3, 5, 35] {
            let case = Case::new(format, [m, 37, some_k(format)], x, d, Options::default(), i as u64);
            runs += case.check(&*device, false);
        }
        assert_eq!(runs, 2 + 4 * 3, "{format}");
    }
}

#[test]
fn every_type() {
    let Some(device) = adapter() else { return };
    let format: Format = "q5_0".parse().expect("exists");
    for (i, (x, d)) in DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d))).enumerate() {
        for gaps in [false, true] {
            let other = DType::ALL[(i + i / 3) % 3];
            let options = Options { gaps, c: Some(other), bias: Some(d), ..Options::default() };
            for m in [2, 9] {
                Case::new(format, [m, 7, 96], x, d, options, i as u64).check(&*device, false);
            }
        }
    }
}

#[test]
fn orders_strides_and_epilogues() {
    let Some(device) = adapter() else { return };
    for (seed, name) in (1..).zip(["int4_g32", "int3_g128", "fp8_e4m3", "nvfp4", "f16"]) {
        let format: Format = name.parse().expect("exists");
        for bits in 0..32 {
            let bit = |i: u32| bits >> i & 1 == 1;
            let options = Options {
                transposed_x: bit(0),
                gaps: bit(1),
                c: bit(2).then_some(DType::F16),
                bias: bit(3).then_some(DType::BF16),
                k_order: bit(4) && format.ragged_k,
                integers: false,
            };
            let m = [1, 4, 6][bits as usize % 3];
            let case = Case::new(format, [m, 9, some_k(format)], DType::F16, DType::F16, options, seed);
            case.check(&*device, false);
        }
    }
}

#[test]
fn small_integers_are_exact() {
    let Some(device) = adapter() else { return };
    let options = Options { integers: true, bias: Some(DType::F32), ..Options::default() };
    for x in DType::ALL {
        for m in [1, 17] {
            let mut case = Case::new("f32".parse().expect("exists"), [m, 33, 301], x, DType::F32, options, 5);
            let mut rng = StdRng::seed_from_u64(6);
            let weights: Vec<f32> = (0..33 * 301).map(|_| rng.random_range(-7i32..=7) as f32).collect();
            let blocks = DType::F32.encode(&weights).into();
            case.weight = HostWeight::new(case.op.format, 33, 301, blocks).expect("well formed");
            case.check(&*device, true);
        }
    }
}

#[test]
fn scales_at_the_edges_of_their_range() {
    let Some(device) = adapter() else { return };
    // E8M0 exponents whose scale is denormal in f32 while the products are not, and the largest that is finite.
    for exponent in [0u8, 1, 2, 127, 244] {
        let format: Format = "mxfp4".parse().expect("exists");
        let mut case = Case::new(format, [2, 5, 64], DType::F32, DType::F32, Options::default(), 3);
        let mut blocks = case.weight.blocks().to_vec();
        for block in blocks.chunks_exact_mut(17) {
            block[0] = exponent;
            // Magnitudes of 6, twice the scale's 2^-128 twelvefold: normal numbers.
            block[1..].iter_mut().for_each(|b| *b |= 0x77);
        }
        case.weight = HostWeight::new(format, 5, 64, blocks.into()).expect("well formed");
        if exponent < 100 {
            // Keeps the products well above the smallest normal f32.
            let x: Vec<f32> = case.op.x.dtype.decode(&case.x).iter().map(|v| v * 1e12).collect();
            case.x = case.op.x.dtype.encode(&x);
        }
        case.check(&*device, false);
    }
    // Subnormal f16 scales.
    let format: Format = "q4_0".parse().expect("exists");
    let mut case = Case::new(format, [2, 5, 64], DType::F32, DType::F32, Options::default(), 3);
    let mut blocks = case.weight.blocks().to_vec();
    for (i, block) in blocks.chunks_exact_mut(18).enumerate() {
        block[..2].copy_from_slice(&(i as u16 * 37 + 1).to_le_bytes());
    }
    case.weight = HostWeight::new(format, 5, 64, blocks.into()).expect("well formed");
    case.check(&*device, false);
}

#[test]
fn halves_are_rounded_to_nearest_even() {
    let Some(device) = adapter() else { return };
    let mut values = vec![0.0, 1.0, 2049.0, 2051.0, 65519.0, 65520.0, -1e9, f32::INFINITY, 5.9e-8, 2.9e-8, 3e-8];
    let mut rng = StdRng::seed_from_u64(1);
    values.extend((0..500).map(|_| f32::from_bits(rng.random_range(0x2f80_0000u32..0x4780_0000))));
    let n = values.len();
    for d in [DType::F16, DType::BF16] {
        let mut case = Case::new("f32".parse().expect("exists"), [1, n, 1], DType::F32, d, Options::default(), 1);
        case.weight = HostWeight::new(case.op.format, n, 1, DType::F32.encode(&values).into()).expect("well formed");
        case.x = 1.0f32.to_le_bytes().to_vec();
        for (index, family) in device.families().iter().enumerate() {
            for config in family.candidates(&case.op, device.info()) {
                assert_eq!(case.run(&*device, index, config), d.encode(&values), "{} to {d}", config.family);
            }
        }
    }
}

#[test]
fn tiles_beyond_one_grid_dimension() {
    let Some(device) = adapter() else { return };
    // 65 535 tiles of 4 outputs and 6 outputs more.
    let n = 65_535 * 4 + 6;
    let case = Case::new("q4_0".parse().expect("exists"), [1, n, 32], DType::F32, DType::F16, Options::default(), 8);
    assert_eq!(case.check_family(&*device, 0, false), 1);
}

#[test]
fn what_cannot_be_served_is_refused() {
    let Some(device) = adapter() else { return };
    let case = Case::new("q4_0".parse().expect("exists"), [1, 8, 32], DType::F32, DType::F32, Options::default(), 1);
    let gemm = device.families()[1];
    let config = gemm.candidates(&case.op, device.info())[0];

    let n = device.info().max_buffer_bytes as usize / 18 + 1;
    let large = CheckedGemm { n, ..case.op.clone() };
    let why = gemm.supports(&large, device.info()).expect_err("too large a weight").why;
    assert!(why.contains("W takes") && why.contains("max_storage_buffer_binding_size"), "{why}");
    let error = gemm.prepare(&*device, &large, &plan(&large, config)).expect_err("too large a weight");
    assert!(matches!(error, HalError::Unsupported { .. }), "{error}");

    let packed = CheckedGemm { class: PackClass::T, ..case.op.clone() };
    assert!(gemm.supports(&packed, device.info()).is_err());

    let invariant = CheckedGemm { batch_invariant: true, ..case.op.clone() };
    assert!(device.families()[0].supports(&invariant, device.info()).is_err());
    assert!(gemm.supports(&invariant, device.info()).is_ok());

    let kernel = gemm.prepare(&*device, &case.op, &plan(&case.op, config)).expect("supported");
    let (x, w, mut d) = (upload(&*device, &case.x), upload(&*device, &[0; 17]), upload(&*device, &[POISON; 32]));
    let args = GemmArgs {
        x: (&x).into(),
        w: WeightArgs { data: (&w).into(), row_scale: None, k_order: None },
        c: None,
        bias: None,
        token_scale: None,
        residual: None,
        d: (&mut d).into(),
        workspace: None,
    };
    let error = kernel.launch(&device.default_stream(), args).expect_err("W is too short");
    assert!(matches!(error, HalError::OutOfBounds { what: "W", .. }), "{error}");
    assert_eq!(download(&*device, &d), [POISON; 32]);
}

#[test]
fn batch_invariant_rows_keep_their_bits() {
    let Some(device) = adapter() else { return };
    let format: Format = "q6_k".parse().expect("exists");
    let mut large = Case::new(format, [40, 33, 512], DType::F16, DType::F32, Options::default(), 4);
    large.op.batch_invariant = true;
    let gemm = device.families()[1];
    let row = 33 * 4;
    let mut bits = None;
    for m in [40, 7, 1] {
        large.op.m = m;
        for config in gemm.candidates(&large.op, device.info()) {
            let first = large.run(&*device, 1, config)[..row].to_vec();
            assert_eq!(bits.get_or_insert_with(|| first.clone()), &first, "{m} tokens, tile of {}", config.tile_m);
        }
    }
}
