//! `convert` on an adapter, bit-exact against the host.

mod common;

use std::sync::Arc;

use common::{adapter, download, upload};
use qgemm_formats::{DType, NO_COLUMN};
use qgemm_hal::{
    BufferMut, CheckedConvert, ConvertOperand, ConvertPlan, Dense, Device, Family, HalError, Operands, Unsupported,
};
use qgemm_wgpu::wgpu;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const POISON: u8 = 0xa5;

/// Layout of X and D.
#[derive(Clone, Copy, Debug, Default)]
struct Layout {
    /// Gaps between rows of X, and between rows of D, in elements.
    gaps: (usize, usize),
    transposed: bool,
    /// Offset of D's first row in elements.
    d_offset: usize,
    /// Whether D is declared with 16-byte aligned rows.
    d_aligned16: bool,
    gathers: bool,
    row_factors: bool,
}

struct Case {
    op: CheckedConvert,
    x: Vec<u8>,
    order: Vec<u32>,
    d_offset: usize,
}

/// Numbers of any magnitude, including hard cases of conversions.
fn any_number(rng: &mut StdRng) -> f32 {
    const ODD: [f32; 16] = [
        0.0,
        -0.0,
        65504.0,
        65519.99,
        65520.0,
        -1e9,
        5.9e-8,
        2.9e-8,
        1e-40,
        -1e-45,
        f32::MAX,
        f32::MIN,
        3.39e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    match rng.random_range(0..8) {
        0 => ODD[rng.random_range(0..ODD.len())],
        1 => f32::from_bits(rng.random()),
        2 => rng.random_range(-7e4..7e4),
        _ => rng.random_range(-2.0..2.0),
    }
}

impl Case {
    fn new([rows, columns, d_columns]: [usize; 3], x: DType, d: DType, layout: Layout, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let Layout { gaps, transposed, d_offset, d_aligned16, gathers, row_factors } = layout;
        let contiguous = Dense { dtype: x, row_stride: (columns + gaps.0) as u64, col_stride: 1, aligned16: false };
        let x = match transposed {
            true => Dense { row_stride: 1, col_stride: (rows + gaps.0) as u64, ..contiguous },
            false => Dense { aligned16: (contiguous.row_stride * x.bytes() as u64).is_multiple_of(16), ..contiguous },
        };
        let d = Dense { dtype: d, row_stride: (d_columns + gaps.1) as u64, col_stride: 1, aligned16: d_aligned16 };
        let elements = (rows + gaps.0) * (columns + gaps.0);
        // Some rows are entirely tiny. Factors must bring them into f16's range.
        let tiny = rng.random_range(0..3) == 0;
        let value = |_| if tiny { rng.random_range(-1e-38f32..1e-38) } else { any_number(&mut rng) };
        let values: Vec<f32> = (0..elements).map(value).collect();
        let column = |_| match rng.random_range(0..6) {
            0 => NO_COLUMN,
            1 => columns as u32,
            _ => rng.random_range(0..columns as u32),
        };
        let order = if gathers { (0..d_columns).map(column).collect() } else { Vec::new() };
        let op = CheckedConvert { rows, columns, d_columns, x, d, gathers, row_factors };
        Self { op, x: x.dtype.encode(&values), order, d_offset }
    }

    /// Expected rows of D, and their factors.
    fn expected(&self) -> (Vec<f32>, Vec<f32>) {
        let CheckedConvert { rows, columns, d_columns, x, d, gathers, row_factors } = self.op;
        let (mut out, mut factors) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let at = |column: usize| row * x.row_stride as usize + column * x.col_stride as usize;
            let values: Vec<f32> = (0..columns).map(|column| x.dtype.read(&self.x, at(column))).collect();
            let largest = values.iter().filter(|v| v.is_finite()).fold(0.0, |max, v| f64::max(max, v.abs().into()));
            let mut exponent = if row_factors { 126 } else { 0 };
            while row_factors && largest * 2f64.powi(exponent) >= 2f64.powi(15) {
                exponent -= 1;
            }
            factors.push(2f32.powi(-exponent));
            for column in 0..d_columns {
                let column = if gathers { self.order[column] as usize } else { column };
                let value = values.get(column).copied().unwrap_or(0.0);
                let scaled = if row_factors { (f64::from(value) * 2f64.powi(exponent)) as f32 } else { value };
                let largest_bf16 = f32::from_bits(0x7f7f_0000);
                out.push(match d.dtype {
                    DType::BF16 if scaled.is_finite() => scaled.clamp(-largest_bf16, largest_bf16),
                    _ => scaled,
                });
            }
        }
        (d.dtype.decode(&d.dtype.encode(&out)), factors)
    }

    fn family(device: &dyn Device) -> &'static dyn Family<CheckedConvert> {
        device.catalog().convert[0]
    }

    fn configs(&self, device: &dyn Device) -> Result<usize, Unsupported> {
        Self::family(device).configs(&self.op, device.info()).map(|configs| configs.len())
    }

    fn check(&self, device: &dyn Device, what: &str) {
        let (op, family) = (&self.op, Self::family(device));
        let config = family.configs(op, device.info()).expect("served")[0];
        let sequence = family.prepare(device, op, &ConvertPlan { config, estimate: 0.0 }).expect("prepared");
        let width = op.d.dtype.bytes();
        let row = |row: usize| (self.d_offset + row * op.d.row_stride as usize) * width;
        let view = row(0)..row(op.rows - 1) + op.d_columns * width;
        let x = upload(device, &self.x);
        let order: Vec<u8> = self.order.iter().flat_map(|column| column.to_le_bytes()).collect();
        let order = op.gathers.then(|| upload(device, &order));
        let mut d = upload(device, &vec![POISON; view.end + 22]);
        let mut factors = upload(device, &vec![POISON; (op.rows + 2) * 4]);
        let mut operands = Operands::new();
        operands.read(ConvertOperand::X, (&x).into());
        operands.read_if_any(ConvertOperand::Order, order.as_ref().map(|order| order.into()));
        operands.write(ConvertOperand::D, d.slice_mut(view).expect("inside"));
        if op.row_factors {
            operands.write(ConvertOperand::RowFactors, factors.slice_mut(4..4 + op.rows * 4).expect("inside"));
        }
        sequence.run(&device.default_stream(), operands).expect("launches");

        let (got, (expected, expected_factors)) = (download(device, &d), self.expected());
        let mut is_inside = vec![false; got.len()];
        for m in 0..op.rows {
            let bytes = row(m)..row(m) + op.d_columns * width;
            is_inside[bytes.clone()].fill(true);
            let expected = &expected[m * op.d_columns..][..op.d_columns];
            for (column, (got, expected)) in op.d.dtype.decode(&got[bytes]).iter().zip(expected).enumerate() {
                let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                assert!(same, "{what}: D[{m}, {column}] is {got:e}, expected {expected:e}");
            }
        }
        let spoiled = got.iter().zip(is_inside).position(|(&byte, inside)| !inside && byte != POISON);
        assert_eq!(spoiled, None, "{what}: a byte outside D's rows was written");
        let factors = download(device, &factors);
        let inner = if op.row_factors { DType::F32.decode(&factors[4..4 + op.rows * 4]) } else { Vec::new() };
        assert!(
            inner.iter().zip(&expected_factors).all(|(a, b)| a == b),
            "{what}: {inner:?}, not {expected_factors:?}"
        );
        let around = if op.row_factors { [&factors[..4], &factors[4 + op.rows * 4..]].concat() } else { factors };
        assert!(around.iter().all(|&byte| byte == POISON), "{what}: a byte outside the factors was written");
    }
}

/// All combinations of unusual properties. D cannot be
/// aligned if it has gaps.
fn layouts(d: DType) -> Vec<Layout> {
    let bit = |bits: u32, i: u32| bits >> i & 1 == 1;
    let all = (0..32).map(|bits| Layout {
        gaps: if bit(bits, 0) { (3, 5) } else { (0, 0) },
        transposed: bit(bits, 1),
        d_offset: if bit(bits, 2) { 3 } else { 0 },
        d_aligned16: false,
        gathers: bit(bits, 3),
        row_factors: bit(bits, 4),
    });
    all.filter(|layout| !layout.row_factors || d == DType::F16).collect()
}

#[test]
fn every_pair_of_types_in_every_layout() {
    let Some(device) = adapter() else { return };
    let sizes = [[1, 1, 1], [3, 7, 7], [5, 33, 40], [37, 19, 13], [2, 300, 301], [33, 64, 64]];
    for (x, d) in DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d))) {
        for (i, size) in sizes.into_iter().enumerate() {
            for layout in layouts(d) {
                let what = format!("{x} to {d}, {size:?}, {layout:?}");
                Case::new(size, x, d, layout, i as u64).check(&*device, &what);
            }
        }
    }
}

#[test]
fn rows_of_whole_vectors() {
    let Some(device) = adapter() else { return };
    for (x, d) in DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d))) {
        for (seed, [rows, columns, d_columns, gap]) in
            [[1, 8, 8, 0], [5, 30, 64, 0], [34, 64, 64, 8], [3, 2600, 2560, 16], [2, 8, 9, 7]].into_iter().enumerate()
        {
            for bits in 0..8 {
                let layout = Layout {
                    gaps: (0, gap),
                    transposed: bits & 1 != 0,
                    gathers: bits & 2 != 0,
                    row_factors: bits & 4 != 0 && d == DType::F16,
                    d_aligned16: true,
                    ..Layout::default()
                };
                let what = format!("{x} to {d}, {rows}x{columns}, {layout:?}");
                Case::new([rows, columns, d_columns], x, d, layout, seed as u64).check(&*device, &what);
            }
        }
    }
}

/// Caller's device with a binding limit of `limit` bytes, and qgemm on it.
fn callers(limit: u64) -> Option<(wgpu::Device, Arc<dyn Device>)> {
    adapter()?;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()));
    let adapter = adapter.expect("one was found");
    let required_limits = wgpu::Limits { max_storage_buffer_binding_size: limit, ..adapter.limits() };
    let required_features = wgpu::Features::IMMEDIATES;
    let descriptor = wgpu::DeviceDescriptor { required_features, required_limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("the adapter has them");
    let ours = qgemm_wgpu::from_device(&device, &queue).expect("has what kernels need");
    Some((device, ours))
}

#[test]
fn what_bindings_do_not_hold_takes_several_dispatches() {
    let Some((_, device)) = callers(4 << 10) else { return };
    let aligned = Layout { d_aligned16: true, ..Layout::default() };
    let odd = Layout { gaps: (1, 3), d_offset: 1, ..Layout::default() };
    let transposed = Layout { transposed: true, ..odd };
    for (size, layout) in [
        ([70, 320, 320], aligned),
        ([70, 320, 320], odd),
        ([70, 33, 33], transposed),
        ([3, 5000, 6000], aligned),
        ([3, 5000, 6000], odd),
        ([70, 320, 320], Layout { row_factors: true, ..aligned }),
        ([70, 320, 2500], Layout { gathers: true, ..odd }),
    ] {
        Case::new(size, DType::F32, DType::F16, layout, 3).check(&*device, &format!("{size:?}, {layout:?}"));
    }
    let long = Case::new([2, 5000, 5000], DType::F32, DType::F16, Layout { row_factors: true, ..aligned }, 3);
    let why = long.configs(&*device).expect_err("a row of 20 000 bytes").why;
    assert!(why.contains("in one dispatch"), "{why}");
}

#[test]
fn views_that_are_too_short_or_misaligned_are_refused() {
    let Some(device) = adapter() else { return };
    let layout = Layout { d_aligned16: true, ..Layout::default() };
    let case = Case::new([2, 8, 8], DType::F32, DType::F16, layout, 1);
    let family = Case::family(&*device);
    let config = family.configs(&case.op, device.info()).expect("served")[0];
    let sequence = family.prepare(&*device, &case.op, &ConvertPlan { config, estimate: 0.0 }).expect("prepared");
    let (x, mut d) = (upload(&*device, &case.x), upload(&*device, &[POISON; 64]));
    let run = |d: BufferMut<'_>| {
        let mut operands = Operands::new();
        operands.read(ConvertOperand::X, (&x).into());
        operands.write(ConvertOperand::D, d);
        sequence.run(&device.default_stream(), operands)
    };
    let error = run(d.slice_mut(0..31).expect("inside")).expect_err("a byte is missing");
    assert!(matches!(error, HalError::OutOfBounds { what: "d", end: 32, len: 31, .. }), "{error}");
    let error = run(d.slice_mut(8..40).expect("inside")).expect_err("no multiple of 16");
    assert!(matches!(error, HalError::Unsupported { .. }), "{error}");
    assert_eq!(download(&*device, &d), [POISON; 64]);
}

#[test]
fn parts_of_one_buffer_are_read_and_written() {
    let Some((theirs, device)) = callers(1 << 20) else { return };
    let case = Case::new([2, 8, 8], DType::F32, DType::F32, Layout { d_aligned16: true, ..Layout::default() }, 1);
    let family = Case::family(&*device);
    let config = family.configs(&case.op, device.info()).expect("served")[0];
    let sequence = family.prepare(&*device, &case.op, &ConvertPlan { config, estimate: 0.0 }).expect("prepared");
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
    let both =
        theirs.create_buffer(&wgpu::BufferDescriptor { label: None, size: 1024, usage, mapped_at_creation: false });
    let (mut x, mut d) = (
        qgemm_wgpu::wrap_buffer(&*device, &both).expect("usable"),
        qgemm_wgpu::wrap_buffer(&*device, &both).expect("usable"),
    );
    let stream = device.default_stream();
    device.upload(&stream, &[POISON; 1024], (&mut x).into()).expect("fits");
    device.upload(&stream, &case.x[..64], x.slice_mut(0..64).expect("inside")).expect("fits");
    let mut operands = Operands::new();
    operands.read(ConvertOperand::X, x.slice(0..64).expect("inside"));
    operands.write(ConvertOperand::D, d.slice_mut(512..576).expect("inside"));
    sequence.run(&stream, operands).expect("apart");
    let bytes = download(&*device, &x);
    assert_eq!((&bytes[..64], &bytes[512..576]), (&case.x[..64], &case.x[..64]));
    assert!(bytes[64..512].iter().chain(&bytes[576..]).all(|&byte| byte == POISON));
    case.check(&*device, "another launch");
}
