//! CPU families against an f64 computation for every format, and
//! tests of reproducible bits.

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::Arc;

use qgemm_cpu::{CpuDevice, GEMM, GEMM_INT8};
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{
    DType, Encoding, Format, HostWeight, NO_COLUMN, QuantizedActivations, ScaleSpan, XFormat, quantize_matrix,
};
use qgemm_hal::{
    Activation, Buffer, CheckedGemm, Dense, Device, Family, GemmOperand, HalError, LaunchPlan, LaunchSequence, Math,
    Operands, SimdLevel, TileConfig, WorkspaceLayout, XPrecision,
};
use qgemm_testkit::WeightKind;

/// Reproducible values in −1..1.
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Weight with more than one chunk of columns, ragged if the format allows it.
/// Formats without a quantizer have random codes.
fn weight(format: Format, n: usize) -> HostWeight {
    let k = if format.ragged_k || matches!(format.encoding, Encoding::Plain(_)) { 549 } else { 768 };
    if format.quantize_blocks.is_none() && format.quantize_matrix.is_none() {
        return qgemm_testkit::weight(WeightKind::Raw, format, n, k, None, 1).expect("K is whole blocks");
    }
    let quantized = quantize_matrix(&noise(n * k, 1), n, k, format).expect("formats quantize noise");
    assert_eq!(quantized.used, format);
    quantized.weight
}

/// Operands in host memory. X is `[m, k]` row-major and contiguous
/// unless a test changes `op.x`.
struct Problem {
    family: &'static dyn Family<CheckedGemm>,
    op: CheckedGemm,
    /// Layout of X.
    layout: Dense,
    weight: HostWeight,
    x: Vec<f32>,
    c: Vec<f32>,
    bias: Vec<f32>,
}

impl Problem {
    fn new(weight: HostWeight, m: usize, x_dtype: DType) -> Self {
        let (n, k) = (weight.n(), weight.k());
        let dense = |dtype, columns| Dense { dtype, row_stride: columns as u64, col_stride: 1, aligned16: false };
        let layout = dense(x_dtype, k);
        let op = CheckedGemm {
            m,
            stored_rows: n,
            out_features: n,
            gated: false,
            k,
            stored_k: weight.stored_k(),
            format: weight.format(),
            class: FragmentLayout::Simd16,
            row_scale: weight.row_scale().is_some(),
            k_order: weight.k_order().is_some(),
            weight_fits_f16: weight.fits_f16(),
            x: layout.into(),
            norm: None,
            x_precision: XPrecision::default(),
            d: dense(DType::F32, n),
            c: None,
            bias: None,
            token_scale: false,
            residual: None,
            segments: Vec::new(),
            residual_in_d: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            batch_invariant: false,
        };
        let x = x_dtype.decode(&x_dtype.encode(&noise(m * k, 2)));
        Self { family: &GEMM, op, layout, weight, x, c: Vec::new(), bias: Vec::new() }
    }

    /// Problem with 8-bit activations.
    fn quantized(self) -> Self {
        Self { family: &GEMM_INT8, ..self }
    }

    /// Problem with this layout of X.
    fn with_x(mut self, layout: Dense) -> Self {
        self.layout = layout;
        self.op.x = layout.into();
        self
    }

    /// X as multiplied by the config.
    fn x_used(&self, device: &dyn Device) -> Vec<f32> {
        match self.family.configs(&self.op, device.info()).expect("supported")[0].x_format.desc().scale_span {
            ScaleSpan::Block(block) => {
                let row = |row: &[f32]| QuantizedActivations::new(row, block, block).dequantize(row.len());
                self.x.chunks(self.op.k).flat_map(row).collect()
            }
            _ => self.x.clone(),
        }
    }

    /// Position of (row, column) in a dense operand, in elements.
    fn at(layout: &Dense, row: usize, column: usize) -> usize {
        row * layout.row_stride as usize + column * layout.col_stride as usize
    }

    /// Expected D, and the magnitude that errors are relative to.
    fn expected(&self, device: &dyn Device) -> Vec<(f64, f64)> {
        let op = &self.op;
        let rows: Vec<Vec<f32>> = (0..op.out_features).map(|j| self.weight.dequantize_row(j)).collect();
        let x = self.x_used(device);
        let element = |i: usize, j: usize| {
            let products = (0..op.k).map(|k| f64::from(rows[j][k]) * f64::from(x[Self::at(&self.layout, i, k)]));
            let (sum, squares) = products.fold((0.0, 0.0), |(s, q), p| (s + p, q + p * p));
            let c = op.c.map_or(0.0, |c| f64::from(op.beta) * f64::from(self.c[Self::at(&c, i, j)]));
            let bias = op.bias.map_or(0.0, |_| f64::from(self.bias[j]));
            (f64::from(op.alpha) * sum + c + bias, squares)
        };
        (0..op.m).flat_map(|i| (0..op.out_features).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
    }

    fn packed(&self) -> Vec<u8> {
        PackedLayout::new(self.op.format, self.op.class).expect("a layout").pack(&self.weight)
    }

    /// Bytes of D; `0xff` where not written.
    fn run(&self, device: &dyn Device) -> Vec<u8> {
        let config = self.family.configs(&self.op, device.info()).expect("supported")[0];
        self.run_as(config, device)
    }

    /// Bytes of D with this config.
    fn run_as(&self, config: TileConfig, device: &dyn Device) -> Vec<u8> {
        let (op, family) = (&self.op, self.family);
        let upload = |bytes: &[u8]| {
            let mut buffer = device.allocate(bytes.len(), "test").expect("memory");
            device.upload(&device.default_stream(), bytes, (&mut buffer).into()).expect("fits");
            buffer
        };
        let words = |order: &[u32]| order.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>();
        let x = upload(&self.layout.dtype.encode(&self.x));
        let data = upload(&self.packed());
        let row_scale = self.weight.row_scale().map(|s| upload(&DType::F32.encode(s)));
        let k_order = self.weight.k_order().map(|o| upload(&words(o)));
        let c = op.c.map(|c| upload(&c.dtype.encode(&self.c)));
        let bias = op.bias.map(|dtype| upload(&dtype.encode(&self.bias)));
        let d_len = (Self::at(&op.d, op.m - 1, op.out_features - 1) + 1) * op.d.dtype.bytes();
        let mut d = upload(&vec![0xff; d_len]);
        let sequence = prepare_as(config, family, op, device);
        assert_eq!(sequence.name(), op.kernel_name(family.name()));
        fn view(buffer: &Option<Buffer>) -> Option<qgemm_hal::BufferRef<'_>> {
            buffer.as_ref().map(Into::into)
        }
        let mut operands = Operands::new();
        operands.read(GemmOperand::X, (&x).into());
        operands.read(GemmOperand::W, (&data).into());
        operands.read_if_any(GemmOperand::RowScale, view(&row_scale));
        operands.read_if_any(GemmOperand::KOrder, view(&k_order));
        operands.read_if_any(GemmOperand::C, view(&c));
        operands.read_if_any(GemmOperand::Bias, view(&bias));
        operands.write(GemmOperand::D, (&mut d).into());
        sequence.run(&device.default_stream(), operands).expect("launches");
        d.raw().check_guards().expect("nothing outside D is written");
        let mut bytes = vec![0; d_len];
        device.download(&device.default_stream(), (&d).into(), &mut bytes).expect("fits");
        bytes
    }

    /// Runs and compares. `limit` bounds the relative squared error.
    fn check(&self, device: &dyn Device, limit: f64) {
        let bytes = self.run(device);
        let (mut error, mut result, mut terms) = (0.0, 0.0, 0.0);
        for (e, (expected, squares)) in self.expected(device).into_iter().enumerate() {
            let at = Self::at(&self.op.d, e / self.op.out_features, e % self.op.out_features);
            let got = f64::from(self.op.d.dtype.read(&bytes, at));
            error += (got - expected).powi(2);
            result += expected * expected;
            terms += squares;
        }
        let nmse = error / f64::max(result, terms);
        assert!(nmse <= limit, "{}, {} tokens: NMSE {nmse:e}", self.op.kernel_name(self.family.name()), self.op.m);
    }
}

/// Launch sequence of the family's first config.
fn prepare(family: &dyn Family<CheckedGemm>, op: &CheckedGemm, device: &dyn Device) -> LaunchSequence {
    prepare_as(family.configs(op, device.info()).expect("supported")[0], family, op, device)
}

/// Launch sequence of a config.
fn prepare_as(
    config: TileConfig,
    family: &dyn Family<CheckedGemm>,
    op: &CheckedGemm,
    device: &dyn Device,
) -> LaunchSequence {
    let tiles = |len: usize, tile: u32| len.div_ceil(tile as usize) as u32;
    let (n_tiles, m_tiles) = (tiles(op.stored_rows, config.tile_n), tiles(op.m, config.tile_m));
    let (k_tiles, grid) = (tiles(op.stored_k, config.tile_k), [n_tiles, m_tiles, 1]);
    let workspace = WorkspaceLayout::split(1, 0, 0).expect("nothing is kept in it");
    let plan =
        LaunchPlan { config, n_tiles, m_tiles, k_tiles, splits: 1, stream_k: None, grid, workspace, estimate: 0.0 };
    family.prepare(device, op, &plan).expect("prepares")
}

#[test]
fn every_format_and_activation_type_matches_f64() {
    let device = CpuDevice::new();
    for format in Format::all() {
        let weight = weight(format, 19);
        for x_dtype in DType::ALL {
            for m in [1, 3, 4, 6] {
                let problem = Problem::new(weight.clone(), m, x_dtype);
                problem.check(&device, 1e-12);
            }
        }
    }
}

#[test]
fn outputs_are_rounded_once() {
    let device = CpuDevice::new();
    for (dtype, limit) in [(DType::F16, 2.4e-7), (DType::BF16, 1.6e-5)] {
        let mut problem = Problem::new(weight("q4_k".parse().expect("a format"), 40), 4, DType::F16);
        problem.op.d.dtype = dtype;
        problem.check(&device, limit);
    }
}

#[test]
fn alpha_beta_bias_strides_and_transposed_x() {
    let device = CpuDevice::new();
    for format in ["q6_k", "int4_g128", "fp8_e4m3", "bf16"] {
        let weight = weight(format.parse().expect("a format"), 21);
        for (m, transposed) in [(1, false), (3, true), (4, false), (37, true), (131, false)] {
            let (n, k) = (weight.n(), weight.k());
            let mut problem = Problem::new(weight.clone(), m, DType::F16);
            let wide = |dtype, columns: usize| Dense {
                dtype,
                row_stride: columns as u64 + 3,
                col_stride: 1,
                aligned16: false,
            };
            let x = match transposed {
                true => Dense { row_stride: 1, col_stride: m as u64 + 2, ..problem.layout },
                false => wide(DType::F16, k),
            };
            problem = problem.with_x(x);
            problem.op.d = wide(DType::F32, n);
            problem.op.c = Some(wide(DType::BF16, n));
            problem.op.bias = Some(DType::F16);
            problem.op.alpha = -0.75;
            problem.op.beta = 1.5;
            // Gaps between rows are NaN and must not be read.
            let strided = |layout: &Dense, rows, columns, seed| {
                let mut values = vec![f32::NAN; Problem::at(layout, rows - 1, columns - 1) + 1];
                for (i, value) in noise(rows * columns, seed).into_iter().enumerate() {
                    let at = Problem::at(layout, i / columns, i % columns);
                    values[at] = layout.dtype.read(&layout.dtype.encode(&[value]), 0);
                }
                values
            };
            problem.x = strided(&problem.layout, m, k, 3);
            problem.c = strided(&problem.op.c.expect("set above"), m, n, 4);
            problem.bias = DType::F16.decode(&DType::F16.encode(&noise(n, 5)));
            problem.check(&device, 1e-12);
            let bytes = problem.run(&device);
            let gaps = (0..m - 1).flat_map(|i| (n..n + 3).map(move |j| i * (n + 3) + j));
            for at in gaps {
                assert_eq!(bytes[at * 4..][..4], [0xff; 4], "element {at} lies between rows of D");
            }
        }
    }
}

#[test]
fn absent_columns_of_act_order_are_not_multiplied() {
    let device = CpuDevice::new();
    for format in ["int4_g32", "int3_g64"] {
        let format: Format = format.parse().expect("a format");
        let (n, k, stored) = (11, 600, 640);
        // Stored columns in reverse order, with 40 empty positions.
        let order: Vec<u32> =
            (0..stored).map(|i| if i % 16 == 7 { NO_COLUMN } else { (k - 1 - (i - (i + 8) / 16)) as u32 }).collect();
        // Empty positions hold weights, which must not count.
        let plain = quantize_matrix(&noise(n * stored, 6), n, stored, format).expect("quantizes").weight;
        let blocks = plain.blocks().to_vec().into();
        let weight = HostWeight::with_k_order(format, n, k, blocks, order).expect("a permutation");
        for m in [1, 4, 9] {
            let problem = Problem::new(weight.clone(), m, DType::F16);
            problem.check(&device, 1e-12);
        }
    }
}

#[test]
fn nothing_is_left_over_from_an_earlier_launch() {
    let device = CpuDevice::new();
    let format: Format = "f32".parse().expect("a format");
    // Small enough for this thread. The first launch fills its scratch memory with NaN.
    let nan = HostWeight::new(format, 8, 512, DType::F32.encode(&[f32::NAN; 8 * 512]).into()).expect("a weight");
    let ragged = quantize_matrix(&noise(5 * 37, 1), 5, 37, format).expect("exact").weight;
    for m in [1, 4] {
        let mut problem = Problem::new(nan.clone(), m, DType::F32);
        let bytes = problem.run(&device);
        assert!(DType::F32.decode(&bytes).iter().all(|v| v.is_nan()), "NaN weights give NaN");
        problem.x.fill(f32::NAN);
        problem.run(&device);
        Problem::new(ragged.clone(), m, DType::F32).check(&device, 1e-12);
    }
}

/// CPU device of every SIMD level.
fn of_every_level() -> Vec<CpuDevice> {
    let devices = SimdLevel::ALL.into_iter().filter_map(|level| CpuDevice::new().with_simd(level).ok());
    let devices: Vec<CpuDevice> = devices.collect();
    assert!(!devices.is_empty(), "every processor has the scalar level");
    devices
}

#[test]
fn quantized_tokens_are_multiplied_alike_at_every_simd_level() {
    let devices = of_every_level();
    for format in Format::all() {
        let refused =
            GEMM_INT8.configs(&Problem::new(weight(format, 19), 1, DType::F32).op, devices[0].info()).is_err();
        let float = matches!(format.encoding, Encoding::Plain(_) | Encoding::E4M3 | Encoding::E5M2);
        assert_eq!(refused, float, "{format}");
        if refused {
            continue;
        }
        for m in [1, 3, 11, 40] {
            let problem = Problem::new(weight(format, 83), m, DType::F16).quantized();
            for device in &devices {
                problem.check(device, 1e-11);
            }
        }
    }
}

#[test]
fn activations_are_quantized_by_permission_only() {
    let device = CpuDevice::new();
    let mut op = Problem::new(weight("q4_0".parse().expect("a format"), 19), 1, DType::F32).op;
    for precision in XPrecision::ALL {
        op.x_precision = precision;
        let allowed = precision.allows_q8();
        assert_eq!(GEMM_INT8.configs(&op, device.info()).is_ok(), allowed, "{precision:?}");
        assert!(GEMM.configs(&op, device.info()).is_ok(), "{precision:?}");
    }
}

#[test]
fn quantized_x_is_refused_with_a_reason() {
    let device = CpuDevice::new();
    let mut op = Problem::new(weight("q4_0".parse().expect("a format"), 19), 1, DType::F32).op;
    op.x.format = XFormat::Q8_0;
    for &family in device.catalog().gemm {
        let why = family.configs(&op, device.info()).expect_err("it reads plain numbers").why;
        assert!(why.contains("q8_0"), "{}: {why}", family.name());
    }
}

#[test]
fn configurations_have_identities_of_their_own() {
    let device = CpuDevice::new();
    for (format, m) in Format::all().flat_map(|format| [1, 20, 33, 500].map(|m| (format, m))) {
        let op = Problem::new(weight(format, 19), m, DType::BF16).op;
        let mut ids = HashSet::new();
        for family in device.catalog().gemm {
            for config in family.configs(&op, device.info()).unwrap_or_default() {
                let id = config.kernel_id(format);
                assert_eq!(id.to_string().parse().as_ref(), Ok(&id));
                assert!(ids.insert(id), "{id} twice");
                let expected = match config.math {
                    Math::DotI8 => format.activation_format(),
                    _ => XFormat::Plain(DType::BF16),
                };
                assert_eq!(config.x_format, expected, "{id}");
                assert_ne!(family.source_hash(&op, &config), 0);
            }
        }
        assert!(!ids.is_empty());
    }
}

#[test]
fn a_sequence_is_one_step_with_the_plans_identity() {
    let device = CpuDevice::new();
    let op = Problem::new(weight("q4_0".parse().expect("a format"), 70), 3, DType::F16).op;
    let sequence = prepare(&GEMM_INT8, &op, &device);
    let config = GEMM_INT8.configs(&op, device.info()).expect("supported")[0];
    let [step] = sequence.steps() else { panic!("{sequence}") };
    assert_eq!(*step.kernel_id(), config.kernel_id(op.format));
    assert_eq!(step.geometry().grid, [2, 1, 1]);
    assert!(step.kernel_id().to_string().starts_with("gemm:gemm_int8:-:main_loop=simd16_int8,w=q4_0,x=q8_0,"));
}

#[test]
fn small_integers_are_exact_at_every_simd_level() {
    let devices = of_every_level();
    let (n, k) = (35, 1024);
    let integers = |len, seed| noise(len, seed).into_iter().map(|v| (v * 8.0).round()).collect::<Vec<f32>>();
    let weight = quantize_matrix(&integers(n * k, 7), n, k, "f16".parse().expect("a format")).expect("exact").weight;
    for m in [1, 2, 5, 130] {
        let mut problem = Problem::new(weight.clone(), m, DType::BF16);
        problem.x = integers(m * k, 8);
        for device in &devices {
            problem.check(device, 0.0);
        }
    }
}

#[test]
fn bits_are_the_same_along_whichever_axis_threads_share() {
    let pooled = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        CpuDevice::new().with_pool(Arc::new(pool))
    };
    let devices = [pooled(1), pooled(2), pooled(5)];
    let families: [&'static dyn Family<CheckedGemm>; 2] = [&GEMM, &GEMM_INT8];
    let noise_of = |n: usize, k: usize| {
        quantize_matrix(&noise(n * k, 1), n, k, "q4_0".parse().expect("a format")).expect("quantizes").weight
    };
    // K is split in two, except for the last shape. Panels: shared by tokens, loaded
    // together, alone. Blocks: fewer and more than threads.
    for (n, k, ms) in [(40, 4608, [1, 3, 40, 131]), (130, 4096, [1, 2, 30, 260]), (700, 96, [1, 9, 37, 300])] {
        let weight = noise_of(n, k);
        for (family, m) in families.into_iter().flat_map(|family| ms.map(|m| (family, m))) {
            let mut problem = Problem::new(weight.clone(), m, DType::F32);
            problem.family = family;
            problem.check(&devices[0], 1e-11);
            let alone = problem.run(&devices[0]);
            for device in &devices {
                let configs = family.configs(&problem.op, device.info()).expect("supported");
                let threads: HashSet<u32> = configs.iter().map(|config| config.threads).collect();
                assert_eq!(threads, HashSet::from([1, device.info().units]));
                for config in configs {
                    // Also panel sizes that no config has.
                    for tile_m in [config.tile_m, 24, 5] {
                        let bytes = problem.run_as(TileConfig { tile_m, ..config }, device);
                        let what = format!("{} {m} x {n} x {k}, {} threads", family.name(), config.threads);
                        assert!(bytes == alone, "{what}, panels of {tile_m}");
                    }
                }
            }
        }
    }
}

#[test]
fn panels_are_of_even_size() {
    let device = CpuDevice::new();
    let weight = weight("q8_0".parse().expect("a format"), 600);
    for (m, expected) in [(256, 256), (257, 132), (400, 204), (513, 180), (4096, 256), (1, 1)] {
        let op = Problem::new(weight.clone(), m, DType::F32).op;
        let configs = GEMM_INT8.configs(&op, device.info()).expect("supported");
        assert_eq!(configs[0].tile_m, expected, "{m} tokens");
    }
}

#[test]
fn a_rows_bits_depend_on_neither_batch_nor_threads() {
    let pooled = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        CpuDevice::new().with_pool(Arc::new(pool))
    };
    let devices = [CpuDevice::new(), pooled(1), pooled(3)];
    assert_eq!(devices[2].info().units, 3);
    let m = 133;
    let families: [&'static dyn Family<CheckedGemm>; 2] = [&GEMM, &GEMM_INT8];
    for (family, format) in families.into_iter().flat_map(|family| ["q5_k", "q4_0"].map(|format| (family, format))) {
        let mut all = Problem::new(weight(format.parse().expect("a format"), 300), m, DType::F32);
        all.family = family;
        let whole = all.run(&devices[0]);
        let x = std::mem::take(&mut all.x);
        for device in &devices {
            for (first, m) in [(0, 133), (0, 1), (131, 2), (40, 4), (40, 9), (3, 129)] {
                let (n, k) = (all.op.out_features, all.op.k);
                let mut part = Problem::new(all.weight.clone(), m, DType::F32);
                part.family = family;
                part.x = x[first * k..(first + m) * k].to_vec();
                let same = part.run(device) == whole[first * n * 4..][..m * n * 4];
                assert!(same, "{} of {format}: {m} tokens from {first}", family.name());
            }
        }
    }
}

#[test]
fn operands_that_are_too_short_are_errors_and_leave_d_alone() {
    let device = CpuDevice::new();
    let problem = Problem::new(weight("q8_0".parse().expect("a format"), 5), 2, DType::F32);
    let sequence = prepare(&GEMM, &problem.op, &device);
    let sizes = [2 * 768 * 4, problem.packed().len(), 2 * 5 * 4];
    for short in 0..3 {
        let [x, w, mut d] =
            std::array::from_fn(|i| device.allocate(sizes[i] - usize::from(i == short), "test").expect("memory"));
        device.fill(&device.default_stream(), (&mut d).into(), 0xff).expect("fits");
        let mut operands = Operands::new();
        operands.read(GemmOperand::X, (&x).into());
        operands.read(GemmOperand::W, (&w).into());
        operands.write(GemmOperand::D, (&mut d).into());
        let error = sequence.run(&device.default_stream(), operands).expect_err("one byte is missing");
        let name = ["x", "the weight", "d"][short];
        assert!(matches!(error, HalError::OutOfBounds { what, .. } if what == name), "{error}");
        let mut bytes = vec![0; d.len()];
        device.download(&device.default_stream(), (&d).into(), &mut bytes).expect("fits");
        assert!(bytes.iter().all(|&b| b == 0xff));
    }
}

#[test]
fn the_callers_memory_is_used_in_place() {
    let device = CpuDevice::new();
    let mut owned = [1u8; 64];
    // SAFETY: `owned` outlives the buffer and is not touched meanwhile.
    let mut buffer = unsafe { qgemm_cpu::wrap(NonNull::from(&mut owned[..]).cast(), 64) };
    device.fill(&device.default_stream(), buffer.slice_mut(8..16).expect("in range"), 7).expect("fits");
    drop(buffer);
    assert_eq!((owned[7], owned[8], owned[15], owned[16]), (1, 7, 7, 1));
}

#[test]
fn the_device_tells_what_it_is() {
    let device = qgemm_cpu::open(0).expect("always there");
    let info = device.info();
    assert!(info.units > 0 && info.bandwidth > 0.0 && info.rate(qgemm_hal::Math::FmaF32).is_some());
    assert_eq!(info.arch, SimdLevel::detect().name());
    assert!(matches!(qgemm_cpu::open(1), Err(HalError::NoDevice { .. })));
    for (operation, families) in device.catalog().operations() {
        let products: &[&str] = &["gemm", "gemm_int8"];
        let own: &[&str] = &[operation.name];
        let is_product = ["gemm", "experts"].contains(&operation.name);
        assert_eq!(families, if is_product { products } else { own }, "{}", operation.name);
    }
}
