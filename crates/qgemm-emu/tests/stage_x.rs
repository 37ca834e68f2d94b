//! The launch that copies activations for matrix instructions: what it writes, bit for bit, and nothing else.

use qgemm_api::{Context, DType, Error, HostWeight, NO_COLUMN, Plan, Problem, XRounding};
use qgemm_cuda::{StageLaunch, launch_of};
use qgemm_emu::{Access, Geometry, Region, device_address, launch_spec};
use qgemm_hal::{Buffer, GemmArgs, HalError, LaunchPlan, StagedX, TileConfig, WeightArgs};
use qgemm_testkit::{Rounding, rounded};

const GROUP: usize = 32;
const POISON: u8 = 0xff;

/// How X lies in memory and what the weight asks of its columns.
#[derive(Clone, Copy, Debug, Default)]
struct Way {
    transposed: bool,
    /// Elements between stored rows.
    gap: usize,
    /// Columns are gathered.
    permuted: bool,
}

const WAYS: [Way; 6] = [
    Way { transposed: false, gap: 0, permuted: false },
    Way { transposed: false, gap: 3, permuted: false },
    Way { transposed: true, gap: 0, permuted: false },
    Way { transposed: true, gap: 5, permuted: true },
    Way { transposed: false, gap: 0, permuted: true },
    Way { transposed: false, gap: 1, permuted: true },
];

/// A launch with its operands on the host.
struct Job {
    ctx: Context,
    launch: StageLaunch,
    starts_early: bool,
    /// The logical matrix.
    x: Vec<f32>,
    stored_x: Vec<u8>,
    /// Column of the copy → column of X.
    order: Vec<u32>,
    permuted: bool,
}

impl Job {
    /// `None` when the plan reads X as it lies. The weight is four features of 4-bit groups.
    fn new(ctx: &Context, [m, k]: [usize; 2], x_dtype: DType, rounding: XRounding, way: Way) -> Option<Self> {
        let (plan, stored_k) = plan(ctx, [m, k], x_dtype, rounding, way);
        let config = staged_config(ctx, &plan)?;
        let staged_plan = LaunchPlan {
            config,
            m_tiles: (m as u32).div_ceil(config.tile_m),
            k_steps: (stored_k as u32).div_ceil(config.tile_k),
            splits: 1,
            ..*plan.launch().unwrap()
        };
        let launch = launch_of("gemm", plan.op(), &staged_plan, ctx.info()).unwrap();
        let x = activations(m, k, x_dtype);
        let (rows, columns) = if way.transposed { (k, m) } else { (m, k) };
        let mut stored = vec![f32::NAN; rows * (columns + way.gap)];
        for row in 0..rows {
            for column in 0..columns {
                let logical = if way.transposed { column * k + row } else { row * k + column };
                stored[row * (columns + way.gap) + column] = x[logical];
            }
        }
        let staging = launch.staging.unwrap();
        let mut order = if way.permuted { k_order(k) } else { (0..k as u32).collect() };
        assert_eq!(order.len(), stored_k);
        order.resize(staging.layout.columns, NO_COLUMN);
        Some(Self {
            ctx: ctx.clone(),
            launch: staging,
            starts_early: launch.starts_early,
            x,
            stored_x: x_dtype.encode(&stored),
            order,
            permuted: way.permuted,
        })
    }

    /// The workspace afterwards, which held nothing but poison.
    fn run(&self) -> Result<Vec<u8>, HalError> {
        let Self { ctx, launch, starts_early, .. } = self;
        let device = &**ctx.device();
        let upload = |bytes: &[u8]| ctx.upload(bytes).unwrap();
        let (x, mut workspace) = (upload(&self.stored_x), upload(&vec![POISON; self.workspace_bytes()]));
        let order = upload(&self.order.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>());
        let mut nothing = ctx.allocate(16).unwrap();
        let weight = ctx.allocate(16).unwrap();
        let region = |name, buffer: &Buffer, access| Region {
            name,
            start: device_address(device, buffer.into()).unwrap() as usize,
            len: buffer.len(),
            access,
        };
        let mut regions = vec![region("x", &x, Access::Read), region("the workspace", &workspace, Access::Write)];
        regions.extend(self.permuted.then(|| region("the column order", &order, Access::Weight)));
        let args = GemmArgs {
            x: (&x).into(),
            w: WeightArgs { data: (&weight).into(), row_scale: None, k_order: self.permuted.then(|| (&order).into()) },
            c: None,
            bias: None,
            residual: None,
            token_scale: None,
            d: (&mut nothing).into(),
            workspace: Some((&mut workspace).into()),
        };
        let params = launch.params(&args, |view, _| device_address(device, view)).unwrap();
        let geometry = Geometry {
            blocks: launch.geometry.grid,
            threads: launch.geometry.threads,
            shared_bytes: launch.geometry.shared_bytes,
            params: bytemuck::bytes_of(&params),
            starts_early: *starts_early,
        };
        // SAFETY: the parameter is the kernel's; the buffers live to the end of this function, and only this launch uses
        // them.
        unsafe { launch_spec(device, &launch.spec, geometry, &regions)? };
        Ok(ctx.download(&workspace).unwrap())
    }

    fn workspace_bytes(&self) -> usize {
        self.launch.layout.factors + self.launch.layout.rows * 4
    }

    fn check(&self, what: &str) {
        let Self { launch, order, .. } = self;
        let (StagedX { dtype, scaled }, layout, m) = (launch.staged, launch.layout, launch.tokens);
        let mut written = self.run().unwrap_or_else(|e| panic!("{what}: {e}"));
        let k = self.x.len() / m;
        let used = rounded(&self.x, k, Rounding::Staged(launch.staged));
        let factors = DType::F32.decode(&written[layout.factors..][..m * 4]);
        for token in 0..m {
            let factor = if scaled { factors[token] } else { 1.0 };
            let bytes = &written[layout.x + token * layout.columns * 2..][..layout.columns * 2];
            for (column, &source) in order.iter().enumerate() {
                let expected = if source == NO_COLUMN { 0.0 } else { used[token * k + source as usize] };
                let staged = dtype.read(bytes, column);
                let got = f64::from(staged) * f64::from(factor);
                let same = got == expected || got.is_nan() && expected.is_nan();
                assert!(same, "{what}: token {token}, column {column} is {got:e} and not {expected:e}");
                let finite = source == NO_COLUMN || self.x[token * k + source as usize].is_finite();
                assert_eq!(staged.is_finite(), finite, "{what}: token {token}, column {column} is {staged}");
            }
        }
        written[layout.x..][..m * layout.columns * 2].fill(POISON);
        if scaled {
            written[layout.factors..][..m * 4].fill(POISON);
        }
        assert_eq!(written.iter().position(|&byte| byte != POISON), None, "{what}: more was written than the copy");
    }
}

/// Tokens of every magnitude, with zeros, infinities, NaN and subnormal numbers among them.
fn activations(m: usize, k: usize, dtype: DType) -> Vec<f32> {
    let noise = |i: usize| ((i * 2_654_435_761 % 4_294_967_296) as f32 / 4_294_967_296.0 - 0.5) * 3.0;
    let value = |i: usize| {
        let (token, column) = (i / k, i % k);
        match (token % 9, dtype) {
            (0, _) => noise(i),
            (1, _) => 0.0,
            (2, _) if column == k / 2 => f32::INFINITY,
            (3, _) if column == k - 1 => f32::NAN,
            (2 | 3, _) | (_, DType::F16) => noise(i) * 100.0,
            (4, _) => noise(i) * 1e30,
            (5, _) => noise(i) * 1e-30,
            // Subnormal numbers and nothing else; then beside the largest ones.
            (6, _) => noise(i) * 1e-39,
            (7, _) => [f32::MAX, f32::MIN, 1.0, f32::from_bits(1)][column % 4],
            _ => [noise(i), noise(i) * 1e-6, noise(i) * 1e5, 0.0][column % 4],
        }
    };
    dtype.decode(&dtype.encode(&(0..m * k).map(value).collect::<Vec<_>>()))
}

/// A permutation of `k` columns, the last group not full.
fn k_order(k: usize) -> Vec<u32> {
    let stride = (k / 2..).find(|&s| gcd(s.max(1), k) == 1).unwrap_or(1);
    let mut order: Vec<u32> = (0..k).map(|i| (i * stride % k) as u32).collect();
    order.resize(k.next_multiple_of(GROUP), NO_COLUMN);
    order
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn plan(ctx: &Context, [m, k]: [usize; 2], x_dtype: DType, rounding: XRounding, way: Way) -> (Plan, usize) {
    let stored_k = if way.permuted { k.next_multiple_of(GROUP) } else { k };
    let format: qgemm_api::Format = "int4_g32".parse().unwrap();
    let blocks = vec![0u8; 4 * format.row_bytes(stored_k)];
    let host = match way.permuted {
        false => HostWeight::new(format, 4, k, blocks.into()),
        true => HostWeight::with_k_order(format, 4, k, blocks.into(), k_order(k)),
    };
    let weight = ctx.load(&host.unwrap()).unwrap();
    let stored_row = if way.transposed { m } else { k };
    let mut problem = Problem::new(&weight, m)
        .x_dtype(x_dtype)
        .x_rounding(rounding)
        .x_row_stride((stored_row + way.gap) as u64)
        .d_dtype(DType::F32)
        .family("gemm");
    if way.transposed {
        problem = problem.x_transposed();
    }
    (ctx.plan(&problem).unwrap(), stored_k)
}

/// The first configuration of `gemm` that takes a copy, which for problems as small as these is not the fastest.
fn staged_config(ctx: &Context, plan: &Plan) -> Option<TileConfig> {
    let gemm = ctx.device().families().iter().find(|family| family.name() == "gemm").unwrap();
    gemm.candidates(plan.op(), ctx.info()).into_iter().find(|config| config.staged_x.is_some())
}

/// `None`, and a note, without a C++ compiler.
fn open(test: &str, device: &str) -> Option<Context> {
    match Context::open(device) {
        Ok(ctx) => Some(ctx),
        Err(Error::Hal(why @ HalError::NoDevice { .. })) => {
            qgemm_testkit::skipped(test, &why.to_string());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn the_copy_holds_the_rounded_activations_and_nothing_else_is_written() {
    for device in ["emu:sm75", "emu:sm120"] {
        let Some(ctx) = open("the_copy_holds_the_rounded_activations_and_nothing_else_is_written", device) else {
            return;
        };
        let mut copies = 0;
        for way in WAYS {
            for (x_dtype, rounding) in
                DType::ALL.into_iter().flat_map(|x| [(x, XRounding::F16), (x, XRounding::BF16), (x, XRounding::Exact)])
            {
                // A thread has no group, one, and several (more than 4096 columns); tokens fill no block of eight.
                for shape in [[19, 5], [9, 160], [10, 4200]] {
                    let what = format!("{device}: {x_dtype} {rounding:?} {shape:?} {way:?}");
                    if let Some(job) = Job::new(&ctx, shape, x_dtype, rounding, way) {
                        job.check(&what);
                        copies += 1;
                    }
                }
            }
        }
        // f32 under two choices (one without bf16 instructions), bf16 under two or three, f16 where columns are gathered.
        assert!(copies >= 3 * 6 * 2, "{device}: {copies} copies");
    }
}

#[test]
fn rows_too_long_for_shared_memory_are_read_twice() {
    let Some(ctx) = open("rows_too_long_for_shared_memory_are_read_twice", "emu:sm75") else { return };
    for way in [WAYS[0], WAYS[4]] {
        // 64 KiB are all that Turing has.
        let job = Job::new(&ctx, [1, 16_500], DType::F32, XRounding::F16, way).unwrap();
        assert!(job.launch.geometry.shared_bytes < 1024, "{:?}", job.launch);
        job.check("a long row");
    }
}

#[test]
fn which_plans_copy_activations() {
    let staged = |device, x_dtype, rounding, way| {
        let ctx = open("which_plans_copy_activations", device)?;
        let (plan, _) = plan(&ctx, [40, 256], x_dtype, rounding, way);
        Some(staged_config(&ctx, &plan).and_then(|config| config.staged_x))
    };
    let f16 = |scaled| Some(StagedX { dtype: DType::F16, scaled });
    let bf16 = Some(StagedX { dtype: DType::BF16, scaled: false });
    let (plain, unaligned, transposed, permuted) = (WAYS[0], WAYS[1], WAYS[2], WAYS[4]);
    let cases = [
        ("emu:sm80", DType::F32, XRounding::F16, plain, f16(true)),
        ("emu:sm80", DType::F32, XRounding::BF16, plain, bf16),
        ("emu:sm75", DType::F32, XRounding::BF16, plain, None),
        ("emu:sm80", DType::F32, XRounding::Exact, plain, None),
        ("emu:sm80", DType::F16, XRounding::F16, plain, None),
        ("emu:sm80", DType::F16, XRounding::F16, unaligned, f16(false)),
        ("emu:sm75", DType::F16, XRounding::F16, unaligned, None),
        ("emu:sm80", DType::F16, XRounding::Exact, transposed, f16(false)),
        ("emu:sm80", DType::BF16, XRounding::F16, permuted, bf16),
        ("emu:sm75", DType::BF16, XRounding::F16, plain, f16(true)),
        ("emu:sm75", DType::BF16, XRounding::Exact, plain, None),
    ];
    for (device, x_dtype, rounding, way, expected) in cases {
        let Some(got) = staged(device, x_dtype, rounding, way) else { return };
        assert_eq!(got, expected, "{device}: {x_dtype} {rounding:?} {way:?}");
    }
}
