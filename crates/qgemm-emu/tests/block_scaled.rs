//! FP4 weights times FP4 activations on the emulated block-scaled instructions. No GPU at hand has them: the models
//! rest on a plain reading of the PTX ISA's tables, and this says that kernel, layout and models agree with the formats.

use half::{bf16, f16};
use qgemm_cuda::{BlockScaledParams, Geometry, block_scaled_geometry, block_scaled_spec};
use qgemm_emu::{Access, Region};
use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_formats::{DType, Format, HostWeight};
use qgemm_hal::abi::{self, CudaGemmShape, GemmPointers, TileSchedule, dtype_code};
use qgemm_hal::{Buffer, Device, Variant};

/// Shapes (m, n, k): one tile, edges along each dimension, several tiles and stages.
const SHAPES: [(usize, usize, usize); 5] = [(1, 1, 32), (5, 16, 96), (33, 70, 320), (8, 130, 544), (40, 17, 64)];
/// More of them for formats whose last block may be cut off: odd rows, rows within a block.
const RAGGED_SHAPES: [(usize, usize, usize); 3] = [(3, 20, 7), (9, 33, 33), (34, 65, 525)];

/// What the epilogue adds, and in which type the result is.
#[derive(Clone, Copy, Debug)]
struct Epilogue {
    d: DType,
    alpha: f32,
    beta: f32,
    with_c: bool,
    with_bias: bool,
}

const EPILOGUES: [Epilogue; 3] = [
    Epilogue { d: DType::F32, alpha: 1.0, beta: 0.0, with_c: false, with_bias: false },
    Epilogue { d: DType::F16, alpha: 0.25, beta: 2.0, with_c: true, with_bias: true },
    Epilogue { d: DType::BF16, alpha: -0.5, beta: 0.0, with_c: false, with_bias: true },
];

#[test]
fn products_of_two_fp4_matrices_are_right() {
    let device = match qgemm_emu::open(Variant::Sm120.number()) {
        Ok(device) => device,
        Err(why) => return qgemm_testkit::skipped("products_of_two_fp4_matrices_are_right", &why.to_string()),
    };
    let formats: Vec<_> = Format::all().filter(|f| block_scaled_spec(*f).is_some()).collect();
    assert_eq!(formats.len(), 2);
    for format in formats {
        let ragged = if format.ragged_k { RAGGED_SHAPES.as_slice() } else { &[] };
        for (i, &(m, n, k)) in SHAPES.iter().chain(ragged).enumerate() {
            let problem = Problem::new(format, m, n, k, EPILOGUES[i % EPILOGUES.len()]);
            problem.check(&problem.run(&*device));
        }
    }
}

/// Operands of one product. C and the bias are f32, and rows of C and D are longer than n.
struct Problem {
    w: HostWeight,
    x: HostWeight,
    epilogue: Epilogue,
    c: Vec<f32>,
    bias: Vec<f32>,
    row: usize,
}

impl Problem {
    fn new(format: Format, m: usize, n: usize, k: usize, epilogue: Epilogue) -> Self {
        let mut random = Random(((m * 1000 + n) * 1000 + k) as u64);
        let row = n + 3;
        let mut w = random.matrix(format, n, k);
        if format.row_scale {
            w = w.with_row_scale((0..n).map(|i| 0.5 + i as f32 / 64.0).collect()).expect("finite");
        }
        let x = random.matrix(format, m, k);
        let mut floats = |len: usize| (0..len).map(|_| random.byte() as f32 / 16.0 - 8.0).collect();
        Self { w, x, epilogue, c: floats(m * row), bias: floats(n), row }
    }

    fn run(&self, device: &dyn Device) -> Vec<f64> {
        let Epilogue { d: dtype, alpha, beta, with_c, with_bias } = self.epilogue;
        let (m, n, k) = (self.x.n(), self.w.n(), self.w.k());
        let format = self.w.format();
        let layout = PackedLayout::new(format, PackClass::T).expect("a layout");
        let (codes, scales) = unpack(&self.x);
        let mut operands = Operands { device, buffers: Vec::new(), regions: Vec::new() };
        let w = operands.add("w", &layout.pack(&self.w), Access::Weight);
        let x = operands.add("x", &codes, Access::Read);
        let x_scales = operands.add("the scales of x", &scales, Access::Read);
        let row_scale = self.w.row_scale().map(|s| operands.add("row scales", bytemuck::cast_slice(s), Access::Read));
        let c = with_c.then(|| operands.add("c", bytemuck::cast_slice(&self.c), Access::Read));
        let bias = with_bias.then(|| operands.add("the bias", bytemuck::cast_slice(&self.bias), Access::Read));
        // All bits set is no number in every type.
        let d_bytes = m * self.row * dtype.bytes();
        let d = operands.add("d", &vec![0xff; d_bytes], Access::Write);

        let flag = |present: bool, flag: u32| if present { flag } else { 0 };
        let x_row = codes.len() / m;
        let params = BlockScaledParams {
            shape: CudaGemmShape {
                m: m as u32,
                stored_rows: n as u32,
                out_features: n as u32,
                k: k as u32,
                stored_k: self.w.stored_k() as u32,
                flags: flag(row_scale.is_some(), abi::FLAG_ROW_SCALE)
                    | flag(with_c, abi::FLAG_C)
                    | flag(with_bias, abi::FLAG_BIAS)
                    | flag(x_row.is_multiple_of(16), abi::FLAG_X_ALIGNED16),
                alpha,
                beta,
                k_tiles: layout.k_slabs(self.w.stored_k()) as u32,
                splits: 1,
                d_dtype: dtype_code(dtype),
                ..CudaGemmShape::default()
            },
            at: GemmPointers {
                x,
                w,
                row_scale: row_scale.unwrap_or(0),
                c: c.unwrap_or(0),
                bias: bias.unwrap_or(0),
                d,
                x_row: x_row as u64,
                c_row: self.row as u64,
                d_row: self.row as u64,
                ..GemmPointers::default()
            },
            tiles: TileSchedule::default(),
            x_scales,
            x_scale_row: (scales.len() / m) as u64,
        };
        let Geometry { grid: blocks, threads, shared_bytes } = block_scaled_geometry(m as u32, n as u32);
        let params = bytemuck::bytes_of(&params);
        let geometry = qgemm_emu::Geometry { blocks, threads, shared_bytes, params, starts_early: true };
        let spec = block_scaled_spec(format).expect("a kernel");
        // SAFETY: `BlockScaledParams` is the kernel's parameter, and nothing else uses the operands.
        unsafe { qgemm_emu::launch_spec(device, &spec, geometry, &operands.regions) }.expect("no fault");
        decode(dtype, &operands.contents("d"))
    }

    /// Compares with the product in f64 of what the formats say the blocks stand for.
    fn check(&self, got: &[f64]) {
        let Epilogue { d: dtype, alpha, beta, with_c, with_bias } = self.epilogue;
        let (m, n, k) = (self.x.n(), self.w.n(), self.w.k());
        let x_rows: Vec<_> = (0..m).map(|i| self.x.dequantize_row(i)).collect();
        for feature in 0..n {
            let w_row = self.w.dequantize_row(feature);
            for (token, x_row) in x_rows.iter().enumerate() {
                let at = token * self.row + feature;
                let products = (0..k).map(|i| f64::from(w_row[i]) * f64::from(x_row[i]) * f64::from(alpha));
                let added = if with_c { f64::from(beta) * f64::from(self.c[at]) } else { 0.0 }
                    + if with_bias { f64::from(self.bias[feature]) } else { 0.0 };
                let (sum, size) = products.fold((added, added.abs()), |(s, z), p| (s + p, z + p.abs()));
                // Rounded to f32 after each instruction and in the epilogue, to the result's type once.
                let limit = size * 1e-6 + sum.abs() * rounding(dtype);
                let what = format!("{} {m}x{n}x{k} {:?}, token {token}", self.w.format(), self.epilogue);
                assert!((got[at] - sum).abs() <= limit, "{what}, feature {feature}: {}, expected {sum}", got[at]);
            }
        }
        for (at, value) in got.iter().enumerate().filter(|(at, _)| at % self.row >= n) {
            assert!(value.is_nan(), "written beyond n at {at}: {value}");
        }
    }
}

/// Buffers of a launch and what it may do with them.
struct Operands<'a> {
    device: &'a dyn Device,
    buffers: Vec<Buffer>,
    regions: Vec<Region>,
}

impl Operands<'_> {
    /// The address of a copy of `bytes`.
    fn add(&mut self, name: &'static str, bytes: &[u8], access: Access) -> u64 {
        let stream = self.device.default_stream();
        let mut buffer = self.device.allocate(bytes.len(), name).expect("memory");
        self.device.upload(&stream, bytes, (&mut buffer).into()).expect("a copy");
        let address = qgemm_emu::device_address(self.device, (&buffer).into()).expect("an address");
        self.regions.push(Region { name, start: address as usize, len: bytes.len(), access });
        self.buffers.push(buffer);
        address
    }

    fn contents(&self, name: &str) -> Vec<u8> {
        let place = self.regions.iter().position(|r| r.name == name).expect("an operand");
        let mut bytes = vec![0; self.buffers[place].len()];
        let stream = self.device.default_stream();
        self.device.download(&stream, (&self.buffers[place]).into(), &mut bytes).expect("a copy");
        bytes
    }
}

/// Codes `[m][⌈k / 2⌉]` and scales `[m][blocks]` of quantized rows. The nibble after an odd row's last is not zero.
fn unpack(x: &HostWeight) -> (Vec<u8>, Vec<u8>) {
    let f = x.format();
    let (mut all_codes, mut all_scales) = (Vec::new(), Vec::new());
    for row in 0..x.n() {
        let blocks = x.row(row).chunks_exact(f.block_bytes);
        let mut row_codes = Vec::new();
        for block in blocks {
            let mut codes = vec![0; f.block_len];
            let mut scale = [0];
            (f.unpack_block)(block, &mut codes, &mut scale);
            row_codes.extend(codes);
            all_scales.push(scale[0]);
        }
        row_codes.truncate(x.k().next_multiple_of(2));
        all_codes.extend(row_codes.chunks_exact(2).map(|pair| (pair[0] | pair[1] << 4) as u8));
    }
    (all_codes, all_scales)
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let halves = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()).collect(),
        DType::F16 => halves().map(|bits| f16::from_bits(bits).to_f64()).collect(),
        DType::BF16 => halves().map(|bits| bf16::from_bits(bits).to_f64()).collect(),
    }
}

/// Half a unit in the last place, relative.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 0.0,
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
    }
}

/// A small generator of the same numbers everywhere.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }

    /// Rows of blocks with any codes and scales around 1.
    fn matrix(&mut self, format: Format, rows: usize, k: usize) -> HostWeight {
        let mut blocks: Vec<u8> = (0..format.row_offset(rows, k)).map(|_| self.byte()).collect();
        let scale = format.float_scales[0];
        for block in blocks.chunks_exact_mut(format.block_bytes) {
            // E8M0 counts binades, E4M3 eighths of them.
            block[scale.offset] = match scale.kind {
                qgemm_formats::ScaleType::E8M0 => 122 + block[scale.offset] % 11,
                _ => 0x20 + block[scale.offset] % 0x30,
            };
        }
        HostWeight::new(format, rows, k, blocks.into()).expect("a matrix")
    }
}
