//! Conversion kernels as X prologues: plans that have one, and rows beyond
//! shared memory. The conformance suite checks their results.

use qgemm_api::tuning::XPrologue;
use qgemm_api::{Context, DType, Error, HostWeight, NO_COLUMN, Problem, XFormat, XPrecision};
use qgemm_cuda::{CudaOperation, KernelLaunch};
use qgemm_hal::{CheckedConvert, ConvertPlan, Dense, HalError, Kernel, Operands, Operation, Stream};

const GROUP: usize = 32;

/// Layout of X and column order of the weight.
#[derive(Clone, Copy, Debug, Default)]
struct XLayout {
    transposed: bool,
    /// Gap between stored rows, in elements.
    gap: usize,
    /// Whether columns are gathered.
    permuted: bool,
}

/// Permutation of `k` columns. The last group is incomplete.
fn k_order(k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..k as u32).rev().collect();
    order.resize(k.next_multiple_of(GROUP), NO_COLUMN);
    order
}

/// X prologue of the first `gemm` config that has one, for 40
/// tokens and four features of 4-bit groups. `None`, with a note,
/// without a C++ compiler.
fn prologue(
    device: &str,
    x_dtype: DType,
    precision: XPrecision,
    layout: XLayout,
) -> Option<Option<(DType, XPrologue)>> {
    let ctx = open("which_plans_convert_x", device)?;
    let (m, k) = (40_usize, 256_usize);
    let stored_k = if layout.permuted { k.next_multiple_of(GROUP) } else { k };
    let format: qgemm_api::Format = "int4_g32".parse().unwrap();
    let blocks = vec![0u8; 4 * format.row_bytes(stored_k)];
    let host = match layout.permuted {
        false => HostWeight::new(format, 4, k, blocks.into()),
        true => HostWeight::with_k_order(format, 4, k, blocks.into(), k_order(k)),
    };
    let weight = ctx.load(&host.unwrap()).unwrap();
    let stored_row = if layout.transposed { m } else { k };
    let mut problem = Problem::new(&weight, m)
        .x_dtype(x_dtype)
        .x_precision(precision)
        .x_row_stride((stored_row + layout.gap) as u64)
        .d_dtype(DType::F32)
        .family("gemm");
    if layout.transposed {
        problem = problem.x_transposed();
    }
    let plan = ctx.plan(&problem).unwrap();
    let gemm = ctx.device().catalog().gemm.iter().find(|family| family.name() == "gemm").unwrap();
    let configs = gemm.configs(plan.op(), ctx.info()).unwrap();
    let converts = configs.into_iter().find(|config| config.x_prologue.is_some());
    Some(converts.map(|config| (config.x_format.plain().unwrap(), config.x_prologue.unwrap())))
}

/// Opened device. `None`, with a note, without a C++ compiler.
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
fn which_plans_convert_x() {
    let to = |dtype, row_factors| Some((dtype, XPrologue::Convert { row_factors }));
    let plain = XLayout::default();
    let unaligned = XLayout { gap: 3, ..plain };
    let transposed = XLayout { transposed: true, ..plain };
    let permuted = XLayout { permuted: true, ..plain };
    use DType::{BF16, F16, F32};
    let cases = [
        ("emu:sm80", F32, XPrecision::F16, plain, to(F16, true)),
        ("emu:sm80", F32, XPrecision::BF16, plain, to(BF16, false)),
        ("emu:sm75", F32, XPrecision::BF16, plain, None),
        ("emu:sm80", F32, XPrecision::Exact, plain, None),
        ("emu:sm80", F16, XPrecision::F16, plain, None),
        ("emu:sm80", F16, XPrecision::F16, unaligned, to(F16, false)),
        ("emu:sm75", F16, XPrecision::F16, unaligned, None),
        ("emu:sm80", F16, XPrecision::Exact, transposed, to(F16, false)),
        ("emu:sm80", BF16, XPrecision::F16, permuted, to(BF16, false)),
        ("emu:sm75", BF16, XPrecision::F16, plain, to(F16, true)),
        ("emu:sm75", BF16, XPrecision::Exact, plain, None),
    ];
    for (device, x_dtype, precision, layout, expected) in cases {
        let Some(got) = prologue(device, x_dtype, precision, layout) else { return };
        assert_eq!(got, expected, "{device}: {x_dtype} {precision:?} {layout:?}");
    }
}

#[test]
fn auto_takes_what_a_checkpoint_states_of_activations() {
    for device in ["emu:sm80", "emu:sm89", "emu:sm90"] {
        let Some(ctx) = open("auto_takes_what_a_checkpoint_states_of_activations", device) else { return };
        for format in ["fp8_e4m3_block128", "fp8_e5m2"] {
            let weight = ctx.describe_weight(format.parse().unwrap(), 14336, 4096).unwrap();
            let fastest = |weight: qgemm_api::DescribedWeight| {
                let candidates = ctx.candidates(&weight.problem(512).x_dtype(DType::F16)).unwrap();
                candidates[0].launch().config.x_format
            };
            let expected = if device == "emu:sm80" { DType::F16.into() } else { XFormat::E4M3Block };
            for stated in [XFormat::E4M3Token, XFormat::E4M3Block] {
                assert_eq!(fastest(weight.for_stated_x(stated)), expected, "{device} {format} {stated}");
            }
            let others = [weight, weight.for_stated_x(XFormat::E4M3Tensor)];
            assert!(others.into_iter().all(|weight| fastest(weight) == DType::F16.into()), "{device} {format}");
        }
    }
}

/// Placeholder kernel for tests of launches.
#[derive(Debug)]
struct NoKernel;

impl Kernel for NoKernel {
    fn launch(&self, _: &Stream, _: Operands<'_>) -> Result<(), HalError> {
        Ok(())
    }
}

#[test]
fn rows_that_are_read_twice_wait_in_shared_memory_where_they_fit() {
    let Some(ctx) = open("rows_that_are_read_twice_wait_in_shared_memory_where_they_fit", "emu:sm75") else { return };
    let shared_bytes = |columns: usize, row_factors: bool| {
        let (x, d) = (Dense::rows_of(DType::F32, columns), Dense::rows_of(DType::F16, columns));
        let op = CheckedConvert { rows: 1, columns, d_columns: columns, x, d, gathers: false, row_factors };
        let mut launches: Vec<KernelLaunch> = Vec::new();
        let plan = ConvertPlan { config: op.noop_config().unwrap(), estimate: 0.0 };
        op.sequence(&plan, ctx.info(), &mut |launch| {
            launches.push(launch);
            Ok(std::sync::Arc::new(NoKernel))
        })
        .unwrap();
        launches[0].geometry.shared_bytes as usize
    };
    assert!(shared_bytes(4096, true) >= 4096 * 4 && shared_bytes(4096, false) < 1024);
    // Turing has 64 KiB in all.
    assert!(shared_bytes(16_500, true) < 1024);
}
