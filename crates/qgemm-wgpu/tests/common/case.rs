//! Random problem and its expected result.

use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, Encoding, Format, HostWeight, NO_COLUMN, ScaleType};
use qgemm_hal::{
    Activation, Buffer, CheckedGemm, Dense, Device, GemmOperand, LaunchPlan, Operands, TileConfig, WorkspaceLayout,
    XPrecision,
};
use qgemm_testkit::{Rounding, rounded};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::{download, upload};

/// Padding around every operand in bytes. A multiple of only 4, so that no
/// operand starts where its buffer does.
const PAD: usize = 12;
/// Padding around W in bytes, which is read in 16-byte vectors.
const W_PAD: usize = 48;
pub const POISON: u8 = 0xff;

/// Operands on the host.
pub struct Case {
    pub op: CheckedGemm,
    pub weight: HostWeight,
    pub x: Vec<u8>,
    pub c: Vec<u8>,
    pub bias: Vec<u8>,
}

/// Unusual properties of a problem.
#[derive(Clone, Copy, Default)]
pub struct Options {
    pub transposed_x: bool,
    pub gaps: bool,
    pub c: Option<DType>,
    pub bias: Option<DType>,
    pub k_order: bool,
    pub integers: bool,
}

/// Blocks of `n` rows of `k` values.
fn random_rows(format: Format, n: usize, k: usize, rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = random_blocks(format, n * format.blocks_per_row(k), rng);
    let shared = format.scale_planes.iter().map(|plane| plane.rows).max().unwrap_or(1);
    for row in 0..n {
        // Rows of a shared scale have copies of it.
        let (from, to) = (row / shared * shared, row);
        for block in 0..format.blocks_per_row(k) {
            let at = |row: usize| format.row_offset(row, k) + block * format.block_bytes;
            for scale in format.float_scales.iter().filter(|_| shared > 1) {
                bytes.copy_within(at(from) + scale.offset..at(from) + format.block_bytes, at(to) + scale.offset);
            }
        }
    }
    bytes
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
        if let Some(largest) = format.largest_zero_point() {
            block[format.block_bytes - 1] %= largest;
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
        // Shuffled order with one hole at the front and two at the end.
        let mut order: Vec<u32> = (0..k as u32).collect();
        (1..k).rev().for_each(|i| order.swap(i, rng.random_range(0..=i)));
        order.insert(0, NO_COLUMN);
        order.extend([NO_COLUMN; 2]);
        let blocks = random_rows(format, n, order.len(), rng);
        HostWeight::with_k_order(format, n, k, blocks.into(), order)
    } else {
        HostWeight::new(format, n, k, random_rows(format, n, k, rng).into())
    };
    let weight = weight.expect("well formed");
    if format.row_scale {
        let scales = (0..n).map(|_| rng.random_range(0.1..2.0)).collect();
        return weight.with_row_scale(scales).expect("n finite scales");
    }
    weight
}

impl Case {
    pub fn new(format: Format, [m, n, k]: [usize; 3], x: DType, d: DType, options: Options, seed: u64) -> Self {
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
            stored_rows: n,
            out_features: n,
            gated: false,
            k,
            stored_k: weight.stored_k(),
            format,
            class: FragmentLayout::Simd16,
            row_scale: weight.row_scale().is_some(),
            k_order: weight.k_order().is_some(),
            weight_fits_f16: weight.fits_f16(),
            x: x.into(),
            norm: None,
            x_precision: XPrecision::default(),
            d: dense(d, n),
            c: options.c.map(|dtype| dense(dtype, n)),
            bias: options.bias,
            token_scale: false,
            residual: None,
            segments: Vec::new(),
            residual_in_d: false,
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

    /// Element type of X.
    pub fn x_dtype(&self) -> DType {
        self.op.x.format.plain().expect("X is plain")
    }

    /// Expected D of `config`, row-major, and ΣΣ w²x².
    fn oracle(&self, config: &TileConfig) -> (Vec<f64>, f64) {
        let (op, dtype) = (&self.op, self.x_dtype());
        let at = |m, k| m * op.x.row_stride as usize + k * op.x.col_stride as usize;
        let x: Vec<f32> = (0..op.m * op.k).map(|i| dtype.read(&self.x, at(i / op.k, i % op.k))).collect();
        let rounding = Rounding::of(config, dtype, self.weight.k_order()).expect("a format that the oracle knows");
        let x = rounded(&x, op.k, rounding);
        let x: Vec<&[f64]> = x.chunks(op.k).collect();
        let (mut out, mut squares) = (vec![0.0; op.m * op.out_features], 0.0);
        for n in 0..op.out_features {
            let w: Vec<f64> = self.weight.dequantize_row(n).into_iter().map(f64::from).collect();
            for m in 0..op.m {
                let products = || w.iter().zip(x[m]).map(|(w, x)| w * x);
                squares += products().map(|p| p * p).sum::<f64>();
                let mut value = f64::from(op.alpha) * products().sum::<f64>();
                if let Some(c) = op.c {
                    value += f64::from(op.beta) * f64::from(c.dtype.read(&self.c, m * c.row_stride as usize + n));
                }
                if let Some(dtype) = op.bias {
                    value += f64::from(dtype.read(&self.bias, n));
                }
                out[m * op.out_features + n] = value;
            }
        }
        (out, squares)
    }

    /// D from the kernel of `config`: all bytes from the first to the
    /// last row, gaps included.
    pub fn run(&self, device: &dyn Device, family: usize, config: TileConfig) -> Vec<u8> {
        let op = &self.op;
        let plan = plan(op, config);
        let sequence = device.catalog().gemm[family].prepare(device, op, &plan).expect("supported");
        assert!(sequence.name().ends_with(&format!("_nt_{}_{}", op.format, op.x.format)), "{}", sequence.name());
        let last = sequence.steps().last().expect("the product");
        assert_eq!(*last.kernel_id(), config.kernel_id(op.format));
        let padded = |bytes: &[u8]| upload(device, &[&[POISON; PAD], bytes, &[POISON; PAD]].concat());
        let x = padded(&self.x);
        let layout = PackedLayout::new(op.format, op.class).expect("prepacked");
        let w = upload(device, &[&[POISON; W_PAD], &layout.pack(&self.weight)[..], &[POISON; W_PAD]].concat());
        let row_scale = self.weight.row_scale().map(|s| padded(&DType::F32.encode(s)));
        let k_order =
            self.weight.k_order().map(|o| padded(&o.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<_>>()));
        let c = op.c.map(|_| padded(&self.c));
        let bias = op.bias.map(|_| padded(&self.bias));
        let len = ((op.m - 1) * op.d.row_stride as usize + op.out_features) * op.d.dtype.bytes();
        let mut d = upload(device, &vec![POISON; len + 2 * PAD]);
        let mut workspace = (plan.workspace.bytes > 0).then(|| upload(device, &vec![0; plan.workspace.bytes]));
        let inner = |buffer: &Buffer| PAD..buffer.len() - PAD;
        let mut operands = Operands::new();
        let given = [
            (GemmOperand::RowScale, &row_scale),
            (GemmOperand::KOrder, &k_order),
            (GemmOperand::C, &c),
            (GemmOperand::Bias, &bias),
        ];
        for (operand, buffer) in given {
            operands.read_if_any(operand, buffer.as_ref().map(|b| b.slice(inner(b)).expect("inside")));
        }
        operands.read(GemmOperand::X, x.slice(inner(&x)).expect("inside"));
        operands.read(GemmOperand::W, w.slice(W_PAD..w.len() - W_PAD).expect("inside"));
        let d_range = inner(&d);
        operands.write(GemmOperand::D, d.slice_mut(d_range).expect("inside"));
        if let Some(workspace) = &mut workspace {
            operands.write(GemmOperand::Workspace, workspace.into());
        }
        sequence.run(&device.default_stream(), operands).expect("launches");
        let all = download(device, &d);
        assert!(all[..PAD].iter().chain(&all[len + PAD..]).all(|&b| b == POISON), "wrote outside D");
        all[PAD..len + PAD].to_vec()
    }

    /// Runs every config of every family that serves the
    /// case. Returns their number.
    pub fn check_all(&self, device: &dyn Device) -> usize {
        let most = 8;
        (0..device.catalog().gemm.len()).flat_map(|family| (0..most).map(move |turn| (family, turn))).fold(
            0,
            |runs, at| {
                let (family, turn) = at;
                let there = self.configs(device, family).len() > turn;
                if there {
                    self.check_family(device, family, turn, false);
                }
                runs + usize::from(there)
            },
        )
    }

    /// Runs one config of every family that serves the case, in rotation, because
    /// a software adapter compiles slowly.
    pub fn check(&self, device: &dyn Device, turn: usize, exact: bool) {
        (0..device.catalog().gemm.len()).for_each(|family| self.check_family(device, family, turn, exact));
    }

    /// Configs of one family. Empty if it does not serve the case.
    pub fn configs(&self, device: &dyn Device, index: usize) -> Vec<TileConfig> {
        device.catalog().gemm[index].configs(&self.op, device.info()).unwrap_or_default()
    }

    /// Runs one config of one family, if it serves the case.
    pub fn check_family(&self, device: &dyn Device, index: usize, turn: usize, exact: bool) {
        let op = &self.op;
        let configs = self.configs(device, index);
        let Some(&config) = configs.get(turn % configs.len().max(1)) else { return };
        let (expected, squares) = self.oracle(&config);
        let what = format!(
            "{} {}x{} of {}, {}x{}x{}, {} to {}",
            config.family,
            config.tile_n,
            config.tile_m,
            op.format,
            op.m,
            op.out_features,
            op.k,
            op.x.format,
            op.d.dtype
        );
        let bytes = self.run(device, index, config);
        let rounds = config.rounded_weights.is_some();
        self.compare(&bytes, &expected, squares, if rounds { ROUNDED } else { EXACT }, exact && !rounds, &what);
        assert!(self.run(device, index, config) == bytes, "{what}: a second run differs");
    }

    /// Compares the bytes of D with the expected result, and gaps with the poison.
    fn compare(&self, bytes: &[u8], expected: &[f64], squares: f64, limit: f64, exact: bool, what: &str) {
        let op = &self.op;
        let mut error = 0.0;
        for m in 0..op.m {
            let row = m * op.d.row_stride as usize;
            for n in 0..op.out_features {
                let got = f64::from(op.d.dtype.read(bytes, row + n));
                let want = expected[m * op.out_features + n];
                assert!(got.is_finite(), "{what}: D[{m}, {n}] = {got}, expected {want}");
                assert!(!exact || got == want, "{what}: D[{m}, {n}] = {got}, expected exactly {want}");
                error += (got - want).powi(2);
            }
            let width = op.d.dtype.bytes();
            let gap = (row + op.out_features) * width..((row + op.d.row_stride as usize) * width).min(bytes.len());
            assert!(bytes[gap].iter().all(|&b| b == POISON), "{what}: wrote behind row {m}");
        }
        let error = error / expected.iter().map(|y| y * y).sum::<f64>().max(squares).max(f64::MIN_POSITIVE);
        // The remaining error is the rounding of D, half a unit in the last place.
        let limit = match op.d.dtype {
            DType::F32 => limit,
            DType::F16 => limit + 2f64.powi(-22),
            DType::BF16 => limit + 2f64.powi(-16),
        };
        assert!(error <= limit, "{what}: error {error:e}, limit {limit:e}");
    }
}

/// Error of pure f32 arithmetic.
const EXACT: f64 = 1e-11;
/// Error with f16 weights: half a unit in the last place, squared.
const ROUNDED: f64 = 2.4e-7;

/// Single launch of `config` for all of `op`.
pub fn plan(op: &CheckedGemm, config: TileConfig) -> LaunchPlan {
    let n_tiles = (op.stored_rows as u32).div_ceil(config.tile_n);
    let m_tiles = (op.m as u32).div_ceil(config.tile_m);
    let k_tiles = (op.stored_k as u32).div_ceil(config.tile_k);
    let workspace = WorkspaceLayout::split(1, 0, 0).and_then(|layout| layout.with_x(&config, m_tiles, k_tiles));
    LaunchPlan {
        config,
        n_tiles,
        m_tiles,
        k_tiles,
        splits: 1,
        stream_k: None,
        grid: [n_tiles, m_tiles, 1],
        workspace: workspace.expect("small"),
        estimate: 0.0,
    }
}
