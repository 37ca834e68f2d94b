//! Kernels of the families: results do not depend on the CTA order, and
//! a fault in a template or included file is reported with its line.

use std::sync::Arc;

use qgemm_api::{Args, Context, DType, Error, Plan, Problem, Weight, quantize};
use qgemm_cuda::{Addresses, CudaOperation, KernelLaunch, source};
use qgemm_emu::{Access, Geometry, Region, device_address, launch_spec, set_block_order};
use qgemm_hal::{Buffer, GemmOperand, HalError, Kernel, LaunchPlan, Operands, Stream};

const ORDERS: u64 = 50;

/// Product with or without split-K.
struct Job {
    ctx: Context,
    weight: Weight,
    plan: Plan,
    m: usize,
}

impl Job {
    /// `None`, with a note, without a C++ compiler.
    fn new(test: &str, device: &str, family: &str, [m, n, k]: [usize; 3]) -> Option<Self> {
        let ctx = match Context::open(device) {
            Ok(ctx) => ctx,
            Err(Error::Hal(why @ HalError::NoDevice { .. })) => {
                qgemm_testkit::skipped(test, &why.to_string());
                return None;
            }
            Err(other) => panic!("{other}"),
        };
        let values: Vec<f32> = (0..n * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
        let (host, _) = quantize(&values, n, k, "q4_k".parse().unwrap()).unwrap();
        let weight = ctx.load(&host).unwrap();
        let problem = Problem::new(&weight, m).x_dtype(DType::F16).d_dtype(DType::F32).family(family);
        let plan = ctx.plan(&problem).unwrap();
        Some(Self { ctx, weight, plan, m })
    }

    fn x(&self) -> Buffer {
        let values: Vec<f32> = (0..self.m * self.weight.k()).map(|i| ((i * 13 % 89) as f32 - 44.0) / 32.0).collect();
        self.ctx.upload(&DType::F16.encode(&values)).unwrap()
    }

    fn d(&self) -> Buffer {
        self.ctx.allocate(self.m * self.weight.n() * 4).unwrap()
    }
}

/// Maximum CTAs per tile.
fn peers(launch: &LaunchPlan) -> u32 {
    let [x, y, z] = launch.grid;
    let places = (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])));
    places.flat_map(|place| launch.work_tiles(place)).map(|work| work.peers).max().unwrap()
}

#[test]
fn no_order_of_the_blocks_changes_a_bit() {
    for device in ["emu:sm70", "emu:sm80"] {
        for (family, m, n, k) in [("gemv", 1, 80, 2048), ("gemm", 9, 130, 4096)] {
            let Some(job) = Job::new("no_order_of_the_blocks_changes_a_bit", device, family, [m, n, k]) else {
                return;
            };
            let launch = job.plan.launch().unwrap();
            let tiles = launch.n_tiles * launch.m_tiles;
            let peers = peers(launch);
            assert!(peers > 2 && tiles > 1, "{family}: {peers} blocks a tile, {tiles} tiles: {launch:?}");
            let (x, stream) = (job.x(), job.ctx.default_stream());
            let mut workspace = job.ctx.workspace(job.plan.workspace_bytes()).unwrap();
            let mut first = None;
            for order in 0..ORDERS {
                set_block_order(&**job.ctx.device(), order).unwrap();
                let mut d = job.d();
                let args = Args::new(&x, &job.weight, &mut d).workspace(&mut workspace);
                job.plan.run(&stream, args).unwrap();
                let bits = job.ctx.download(&d).unwrap();
                let first = first.get_or_insert_with(|| bits.clone());
                assert!(*first == bits, "{device}, {family}: order {order} gives other bits than order 0");
            }
            let sums = DType::F32.decode(&first.unwrap());
            assert!(sums.iter().any(|v| v.abs() > 1.0), "{device}, {family}: the results are not zeros");
        }
    }
}

#[test]
fn faults_name_the_line_of_a_template_or_an_included_file() {
    // Operand that is shorter than stated, and the expected
    // location of the fault.
    let cases = [
        ("gemm", 2, "x", "mainloop/x_slice_ring.cuh", "cp_async_16_or_zeros(i < s.rows, target, source)"),
        ("gemm", 2, "the weight", "mainloop/w_warp_ring.cuh", "cp_async_16_stream(target + rt"),
        ("gemm", 2, "d", "epilogue/operands.cuh", "st_global_u"),
        ("gemv", 1, "x", "mainloop/x_group.cuh", "ld_global_v4(address + i * 16)"),
        ("gemv", 1, "the weight", "dequant/k_tile.cuh", "ld_global_stream_v4("),
        ("gemv", 1, "shared memory", "epilogue/sliced_k.cuh", "st_shared(&acc.value[token"),
    ];
    for (family, m, short, file, text) in cases {
        let test = "faults_name_the_line_of_a_template_or_an_included_file";
        let Some(job) = Job::new(test, "emu:sm80", family, [m, 512, 256]) else { return };
        let fault = fault_of(&job, short);
        let (site, _) = fault.split_once(": ").unwrap();
        let (named, line) = site.rsplit_once(':').unwrap();
        assert_eq!(named, file, "{fault}");
        let line = source::find(file).unwrap().lines().nth(line.parse::<usize>().unwrap() - 1).unwrap();
        assert!(line.contains(text), "{fault}: the line is {line:?}");
        assert!(fault.contains("access out of bounds") && fault.contains(short), "{fault}");
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

/// Fault when operand `short` is slightly too short.
fn fault_of(job: &Job, short: &str) -> String {
    let Job { ctx, weight, plan, .. } = job;
    let device = &**ctx.device();
    let plan = plan.launch().unwrap();
    assert_eq!(plan.workspace.bytes, 0, "{plan:?} needs a workspace");
    let mut launches: Vec<KernelLaunch> = Vec::new();
    job.plan
        .op()
        .sequence(plan, ctx.info(), &mut |launch| {
            launches.push(launch);
            Ok(Arc::new(NoKernel))
        })
        .unwrap();
    let [launch] = &launches[..] else { panic!("{launches:?}") };
    let (x, w, mut d) = (job.x(), ctx.allocate(weight.bytes()).unwrap(), job.d());
    let region = |name, buffer: &Buffer, access| {
        let start = device_address(device, buffer.into()).unwrap() as usize;
        Region { name, start, len: buffer.len() - if name == short { 16 } else { 0 }, access }
    };
    let regions =
        [region("x", &x, Access::Read), region("the weight", &w, Access::Weight), region("d", &d, Access::Write)];
    let mut operands = Operands::new();
    operands.read(GemmOperand::X, (&x).into());
    operands.read(GemmOperand::W, (&w).into());
    operands.write(GemmOperand::D, (&mut d).into());
    let places = Addresses {
        address: &|view, _| device_address(device, view),
        encode: &|_| unreachable!("made for an Ampere chip"),
    };
    let params = launch.params(&operands, &places).unwrap();
    let shared_bytes = launch.geometry.shared_bytes;
    let geometry = Geometry {
        blocks: launch.geometry.grid,
        threads: launch.geometry.threads,
        shared_bytes: if short == "shared memory" { shared_bytes - 32 } else { shared_bytes },
        params: params.as_bytes(),
        starts_early: launch.starts_early,
    };
    // SAFETY: the parameter is that of the families' kernels; the buffers live
    // to the end of this function, and only this launch uses them.
    match unsafe { launch_spec(device, &launch.spec, geometry, &regions) } {
        Err(HalError::KernelFault { fault, .. }) => fault,
        other => panic!("{short} is too short, and the launch gives {other:?}"),
    }
}
