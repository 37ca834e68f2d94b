//! `convert` against a scalar definition: every pair of types, layout and SIMD level.

use std::sync::Arc;

use qgemm_cpu::{CONVERT, CpuDevice};
use qgemm_formats::{DType, NO_COLUMN};
use qgemm_hal::{
    Buffer, CheckedConvert, ConvertOperand, ConvertPlan, Dense, Device, Family, HalError, Operands, SimdLevel,
};

/// Filler of bytes that must not be written.
const UNTOUCHED: u8 = 0xee;

/// Reproducible values of every magnitude and kind. Elements of X
/// outside its rows are NaN, too.
fn value(i: usize) -> f32 {
    let state = (i as u32).wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let word = ((state >> ((state >> 28) + 4)) ^ state).wrapping_mul(277_803_737);
    let size = [1.0, 3e4, 1e-5, 1e30, 1e-40][word as usize / 7 % 5];
    let fraction = ((word >> 8) as f32 / (1 << 23) as f32 - 1.0) * size;
    match word % 41 {
        0 => f32::NAN,
        1 => f32::INFINITY,
        2 => f32::NEG_INFINITY,
        3 => f32::MAX,
        4 => f32::MIN,
        5 => -0.0,
        _ => fraction,
    }
}

struct Problem {
    op: CheckedConvert,
    x: Vec<f32>,
    order: Vec<u32>,
}

/// Layout of X.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Rows,
    RowsWithGaps,
    EverySecondColumn,
    Transposed,
    TransposedWithGaps,
}

const LAYOUTS: [Layout; 5] =
    [Layout::Rows, Layout::RowsWithGaps, Layout::EverySecondColumn, Layout::Transposed, Layout::TransposedWithGaps];

impl Problem {
    fn new(types: [DType; 2], [rows, columns, d_columns]: [usize; 3], layout: Layout) -> Self {
        let (wide, tall) = (columns as u64, rows as u64);
        let (row_stride, col_stride) = match layout {
            Layout::Rows => (wide, 1),
            Layout::RowsWithGaps => (wide + 3, 1),
            Layout::EverySecondColumn => (2 * wide, 2),
            Layout::Transposed => (1, tall + 1),
            Layout::TransposedWithGaps => (3, 3 * tall),
        };
        let x = Dense { dtype: types[0], row_stride, col_stride, aligned16: false };
        let d = Dense { dtype: types[1], row_stride: d_columns as u64 + 5, col_stride: 1, aligned16: false };
        let op = CheckedConvert { rows, columns, d_columns, x, d, gathers: false, row_factors: false };
        let mut values = vec![f32::NAN; x.extent(rows, columns).expect("small") as usize];
        for (i, at) in (0..rows).flat_map(|r| (0..columns).map(move |c| Self::at(&x, r, c))).enumerate() {
            // A row of zeros and one of small numbers, for row factors.
            values[at] = match i / columns {
                2 => 0.0,
                4 => value(i) * 1e-38,
                _ => value(i),
            };
        }
        Self { op, x: types[0].decode(&types[0].encode(&values)), order: Vec::new() }
    }

    /// Adds a column order with missing columns.
    fn gathered(mut self) -> Self {
        self.op.gathers = true;
        let columns = self.op.columns;
        let column = |c: usize| if c % 7 == 3 { NO_COLUMN } else { ((c * 11 + 5) % columns) as u32 };
        self.order = (0..self.op.d_columns).map(column).collect();
        self
    }

    fn with_row_factors(mut self) -> Self {
        self.op.row_factors = true;
        self
    }

    fn at(layout: &Dense, row: usize, column: usize) -> usize {
        row * layout.row_stride as usize + column * layout.col_stride as usize
    }

    /// Power of two for a row, and its inverse, by trial.
    fn factor(&self, row: usize) -> [f64; 2] {
        if !self.op.row_factors {
            return [1.0; 2];
        }
        let values = (0..self.op.columns).map(|column| self.x[Self::at(&self.op.x, row, column)].abs());
        let largest = f64::from(values.filter(|v| v.is_finite()).fold(0.0, f32::max));
        let mut exponent = 126;
        while largest * 2f64.powi(exponent) >= 2f64.powi(15) {
            exponent -= 1;
        }
        [exponent, -exponent].map(|e| 2f64.powi(e))
    }

    /// Expected element of D, with the row multiplied by `factor`.
    fn expected(&self, row: usize, column: usize, factor: f64) -> f32 {
        let of_x = match self.op.gathers {
            true => self.order[column] as usize,
            false => column,
        };
        if of_x >= self.op.columns {
            return 0.0;
        }
        let value = (f64::from(self.x[Self::at(&self.op.x, row, of_x)]) * factor) as f32;
        let rounded = self.op.d.dtype.decode(&self.op.d.dtype.encode(&[value]))[0];
        match rounded.is_infinite() && value.is_finite() && self.op.d.dtype == DType::BF16 {
            true => f32::from_bits(0x7f7f_0000).copysign(value),
            false => rounded,
        }
    }

    /// Bytes of D, and row factors.
    fn run(&self, device: &dyn Device) -> (Vec<u8>, Vec<f32>) {
        let (op, stream) = (&self.op, device.default_stream());
        let upload = |bytes: &[u8]| {
            let mut buffer = device.allocate(bytes.len(), "test").expect("memory");
            device.upload(&stream, bytes, (&mut buffer).into()).expect("fits");
            buffer
        };
        let download = |buffer: &Buffer| {
            buffer.raw().check_guards().expect("nothing outside is written");
            let mut bytes = vec![0; buffer.len()];
            device.download(&stream, buffer.into(), &mut bytes).expect("fits");
            bytes
        };
        let x = upload(&op.x.dtype.encode(&self.x));
        let order = upload(&self.order.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>());
        let d_len = op.d.extent(op.rows, op.d_columns).expect("small") as usize * op.d.dtype.bytes();
        let mut d = upload(&vec![UNTOUCHED; d_len]);
        let mut factors = upload(&vec![UNTOUCHED; op.rows * 4]);
        let mut operands = Operands::new();
        operands.read(ConvertOperand::X, (&x).into());
        operands.read_if_any(ConvertOperand::Order, op.gathers.then(|| (&order).into()));
        operands.write(ConvertOperand::D, (&mut d).into());
        operands.write(ConvertOperand::RowFactors, (&mut factors).into());
        let sequence = CONVERT.prepare(device, op, &plan(op, device)).expect("prepares");
        sequence.run(&stream, operands).expect("launches");
        (download(&d), DType::F32.decode(&download(&factors)))
    }

    fn check(&self, devices: &[CpuDevice], what: &str) {
        let CheckedConvert { rows, d_columns, d, .. } = self.op;
        let factors_of_rows: Vec<[f64; 2]> = (0..rows).map(|row| self.factor(row)).collect();
        let places = (0..rows).flat_map(|row| (0..d_columns).map(move |column| (row, column)));
        let expected: Vec<f32> = places.map(|(r, c)| self.expected(r, c, factors_of_rows[r][0])).collect();
        for device in devices {
            let (bytes, factors) = self.run(device);
            let what = format!("{what} {:?} {}", self.op, device.info().arch);
            for (i, &expected) in expected.iter().enumerate() {
                let got = d.dtype.read(&bytes, Self::at(&d, i / d_columns, i % d_columns));
                let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
                assert!(same, "{what}: {got:e} for {expected:e} at {}, {}", i / d_columns, i % d_columns);
            }
            for row in 0..rows {
                let gap = &bytes[(row * d.row_stride as usize + d_columns) * d.dtype.bytes()..];
                let gap = &gap[..gap.len().min(5 * d.dtype.bytes())];
                assert!(gap.iter().all(|&byte| byte == UNTOUCHED), "{what}: beyond row {row}");
                let factor = if self.op.row_factors { factors_of_rows[row][1] as f32 } else { factors[0] };
                assert_eq!(factors[row].to_bits(), factor.to_bits(), "{what}: the factor of row {row}");
            }
        }
    }
}

fn plan(op: &CheckedConvert, device: &dyn Device) -> ConvertPlan {
    let config = CONVERT.configs(op, device.info()).expect("serves all")[0];
    ConvertPlan { config, estimate: 0.0 }
}

/// CPU device of every SIMD level.
fn of_every_level() -> Vec<CpuDevice> {
    SimdLevel::ALL.into_iter().filter_map(|level| CpuDevice::new().with_simd(level).ok()).collect()
}

fn pairs() -> impl Iterator<Item = [DType; 2]> {
    DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| [x, d]))
}

#[test]
fn every_pair_of_types_and_layout_at_every_simd_level() {
    let devices = of_every_level();
    // Odd sizes. D has fewer columns than X, as many, or more.
    let sizes = [[1, 1, 1], [3, 37, 37], [5, 1, 70], [7, 67, 130], [35, 131, 45]];
    for (types, layout) in pairs().flat_map(|types| LAYOUTS.map(|layout| (types, layout))) {
        for size in sizes {
            let problem = || Problem::new(types, size, layout);
            problem().check(&devices, "plain");
            problem().gathered().check(&devices, "gathered");
            problem().with_row_factors().check(&devices, "scaled");
            problem().gathered().with_row_factors().check(&devices, "gathered, scaled");
        }
    }
}

#[test]
fn large_matrices_are_the_work_of_all_threads() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("threads");
    let devices = [CpuDevice::new().with_pool(Arc::new(pool))];
    // Long rows become several tasks if they need no factors.
    for size in [[65, 1025, 1030], [2, 40_001, 40_007]] {
        for layout in LAYOUTS {
            let problem = || Problem::new([DType::F32, DType::BF16], size, layout);
            problem().check(&devices, "plain");
            problem().gathered().with_row_factors().check(&devices, "gathered, scaled");
        }
    }
}

#[test]
fn nothing_finite_becomes_infinite_in_bf16() {
    let mut problem = Problem::new([DType::F32, DType::BF16], [1, 6, 6], Layout::Rows);
    let least_infinite = f32::from_bits(0x7f7f_8000);
    problem.x = vec![f32::MAX, f32::MIN, least_infinite, -least_infinite, f32::INFINITY, f32::NEG_INFINITY];
    let (bytes, _) = problem.run(&CpuDevice::new());
    let largest = f32::from_bits(0x7f7f_0000);
    let expected = [largest, -largest, largest, -largest, f32::INFINITY, f32::NEG_INFINITY];
    assert_eq!(DType::BF16.decode(&bytes), expected);
}

#[test]
fn an_order_that_names_columns_beyond_x_reads_nothing_there() {
    let mut problem = Problem::new([DType::F16, DType::F32], [4, 9, 9], Layout::Transposed).gathered();
    for layout in LAYOUTS {
        problem.order[2] = 9;
        problem.order[5] = 1 << 31;
        problem.op.x = Problem::new([DType::F16, DType::F32], [4, 9, 9], layout).op.x;
        problem.x = vec![1.0; problem.op.x.extent(4, 9).expect("small") as usize];
        problem.check(&of_every_level(), "beyond");
    }
}

#[test]
fn operands_that_are_absent_or_too_short_are_errors_and_leave_d_alone() {
    let device = CpuDevice::new();
    let op = Problem::new([DType::F32, DType::F16], [2, 8, 8], Layout::Rows).gathered().with_row_factors().op;
    let sequence = CONVERT.prepare(&device, &op, &plan(&op, &device)).expect("prepares");
    let sizes = [2 * 8 * 4, 8 * 4, (8 + 5 + 8) * 2, 2 * 4];
    for (short, is_absent) in (0..4).flat_map(|short| [(short, false), (short, true)]) {
        let [x, order, mut d, mut factors] =
            std::array::from_fn(|i| device.allocate(sizes[i] - usize::from(i == short), "test").expect("memory"));
        device.fill(&device.default_stream(), (&mut d).into(), UNTOUCHED).expect("fits");
        let mut operands = Operands::new();
        let given = |i| i != short || !is_absent;
        operands.read_if_any(ConvertOperand::X, given(0).then(|| (&x).into()));
        operands.read_if_any(ConvertOperand::Order, given(1).then(|| (&order).into()));
        if given(2) {
            operands.write(ConvertOperand::D, (&mut d).into());
        }
        if given(3) {
            operands.write(ConvertOperand::RowFactors, (&mut factors).into());
        }
        let error = sequence.run(&device.default_stream(), operands).expect_err("something is missing");
        let name = ["x", "the column order", "d", "the row factors"][short];
        assert!(matches!(error, HalError::OutOfBounds { what, .. } if what == name), "{error}");
        let mut bytes = vec![0; d.len()];
        device.download(&device.default_stream(), (&d).into(), &mut bytes).expect("fits");
        assert!(bytes.iter().all(|&byte| byte == UNTOUCHED));
    }
}
