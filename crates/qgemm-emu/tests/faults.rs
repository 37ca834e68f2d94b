//! Faults that a GPU hides. Each kernel of `faults/` has one mistake in a marked line,
//! and the emulator must find exactly that.
//!
//! Without the mistake, the kernel must run cleanly and compute the right numbers.

use std::env;
use std::path::PathBuf;

use qgemm_cuda::{CACHE_VARIABLE, KernelSpec, Target, build};
use qgemm_emu::FaultKind::{self, *};
use qgemm_emu::{Access, Region, set_block_order};
use qgemm_hal::{Buffer, BufferRef, Device, HalError};

/// Input words of kernels, and maximum results.
const WORDS: usize = 64;
/// CTA orders for repaired kernels.
const ORDERS: u64 = 8;

/// Kernel with a mistake.
struct Planted {
    kind: FaultKind,
    /// CTA and thread that the message must name. No thread if several are involved.
    block: u32,
    thread: Option<u32>,
    /// Other text of the message.
    what: &'static str,
    /// Results of the repaired kernel.
    expected: fn(&[u32]) -> Vec<u32>,
    variant: u32,
    /// Whether its instructions exist on the variant's chip only.
    specific: bool,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    starts_early: bool,
}

impl Planted {
    fn new(
        kind: FaultKind,
        thread: impl Into<Option<u32>>,
        what: &'static str,
        expected: fn(&[u32]) -> Vec<u32>,
    ) -> Self {
        Self {
            kind,
            block: 0,
            thread: thread.into(),
            what,
            expected,
            variant: 80,
            specific: false,
            blocks: 1,
            threads: 32,
            shared_bytes: 0,
            starts_early: false,
        }
    }

    fn variant(self, variant: u32) -> Self {
        Self { variant, ..self }
    }

    /// Kernel with instructions that later chips lack.
    fn chip(self, variant: u32) -> Self {
        Self { variant, specific: true, ..self }
    }

    fn threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }

    fn shared_bytes(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }

    /// CTA that shows the fault, when `blocks` CTAs run one after another.
    fn in_block(self, block: u32, blocks: u32) -> Self {
        Self { block, blocks, ..self }
    }

    fn starts_early(self) -> Self {
        Self { starts_early: true, ..self }
    }
}

/// Kernel of `faults/`.
struct Kernel {
    /// `faults/race_write_write.cu`.
    entry: &'static str,
    text: &'static str,
    planted: Planted,
}

macro_rules! faults {
    ($($name:ident: $planted:expr,)*) => {
        /// All kernels.
        fn kernels() -> Vec<Kernel> {
            vec![$({
                let entry = concat!("faults/", stringify!($name), ".cu");
                Kernel { entry, text: include_str!(concat!("faults/", stringify!($name), ".cu")), planted: $planted }
            }),*]
        }

        $(#[test]
        fn $name() {
            let entry = concat!("faults/", stringify!($name), ".cu");
            kernels().iter().find(|kernel| kernel.entry == entry).unwrap().check();
        })*
    };
}

faults! {
    global_read_past_end: Planted::new(
        OutOfBounds, 63, "reads 4 bytes at offset 256 of the numbers, which is 256 bytes long",
        |x| (0..64).map(|i| x[(i + 1) % 64]).collect(),
    ).threads(64),
    global_write_before_start: Planted::new(
        OutOfBounds, 0, "writes 4 bytes at offset -4 of the results", |x| x[1..32].to_vec(),
    ),
    global_misaligned: Planted::new(
        Misaligned, 0, "reads 16 bytes at offset 4 of the numbers",
        |x| x[..32].chunks(4).map(|four| four.iter().fold(0, |sum, &v| v.wrapping_add(sum))).collect(),
    ).threads(8),
    global_race: Planted::new(
        Race, 1, "writes offset 0 of the results, which thread 0 wrote", |x| x[..32].iter().copied().step_by(2).collect(),
    ),
    global_write_after_read: Planted::new(
        Race, 31, "writes offset 0 of the counter, which thread 0 read", |_| vec![0; 32],
    ),
    write_to_input: Planted::new(
        ReadOnly, 0, "writes offset 0 of the numbers", |x| x[..32].iter().map(|v| v * 2).collect(),
    ),
    read_only_path: Planted::new(
        BadOperand, 0, "reads the results by ld.global.nc, while this launch writes it",
        |x| x[..32].iter().map(|v| (v + 1) * 2).collect(),
    ),
    shared_out_of_bounds: Planted::new(
        OutOfBounds, 63, "writes 4 bytes at offset 256 of 256 bytes of shared memory", |x| x.to_vec(),
    ).threads(64).shared_bytes(256),
    shared_misaligned: Planted::new(
        Misaligned, 0, "reads 8 bytes at offset 4 of shared memory",
        |x| x[..32].chunks(2).map(|pair| pair[0] + pair[1]).collect(),
    ).shared_bytes(128),
    shared_unwritten: Planted::new(
        Unwritten, 31, "shared memory at offset 120 was not written in this block",
        |x| (0..32).map(|i| x[i ^ 1]).collect(),
    ).shared_bytes(128).in_block(1, 2),
    race_write_write: Planted::new(
        Race, 1, "writes shared memory at offset 0, which thread 0 wrote",
        |x| (0..32).map(|i| x[i / 2 * 2]).collect(),
    ).shared_bytes(128),
    race_read_after_write: Planted::new(
        Race, 1, "reads shared memory at offset 0, which thread 0 wrote",
        |x| (0..64).map(|i| x[0] + i).collect(),
    ).threads(64).shared_bytes(4),
    race_write_after_read: Planted::new(
        Race, 0, "writes shared memory at offset 0, which thread 63 read",
        |x| (0..64).map(|i| x[(i + 1) % 64]).collect(),
    ).threads(64).shared_bytes(256),
    half_a_warp_multiplies: Planted::new(
        Divergence, None, "threads 0-15 wait for their warp", |_| (16..48).collect(),
    ),
    exchange_in_divergent_loop: Planted::new(
        Divergence, None, "threads 0 have ended; threads 1-31 wait for their warp",
        |x| vec![x[..32].iter().sum(); 32],
    ),
    lanes_part_ways: Planted::new(
        Divergence, 31, "lane 0 is in shfl_xor at faults/lanes_part_ways.cu:",
        |x| (0..32).map(|i| x[i ^ 2]).collect(),
    ),
    ldmatrix_misaligned: Planted::new(
        Misaligned, 1, "ldmatrix reads 16 bytes at offset 8 of shared memory", |x| x[..32].to_vec(),
    ).variant(75).shared_bytes(128),
    ldmatrix_outside: Planted::new(
        OutOfBounds, 8, "ldmatrix reads 16 bytes at offset 128 of 128 bytes", |x| x[..32].to_vec(),
    ).variant(75).shared_bytes(128),
    barrier_after_return: Planted::new(
        Deadlock, None, "threads 0-31 wait at barrier 0 for 64 threads",
        |x| (0..64).map(|i| x[i ^ 1]).collect(),
    ).threads(64).shared_bytes(256),
    barrier_of_too_many: Planted::new(
        Deadlock, None, "threads 0-31 wait at barrier 1 for 64 threads",
        |x| (0..32).map(|i| x[i ^ 1]).collect(),
    ).threads(64).shared_bytes(256),
    mbarrier_never_fills: Planted::new(
        Deadlock, None, "threads 0-31 wait for phase 0 of the mbarrier at offset 0, which wants 1 of 33 threads",
        |x| (0..32).map(|i| x[i ^ 1]).collect(),
    ).variant(90).shared_bytes(8 + 128),
    registers_never_given_back: Planted::new(
        Deadlock, None, "wait for 120 registers each: 8 are free of 96 for each of 640", |x| x.to_vec(),
    ).chip(90).threads(640),
    arrival_before_write: Planted::new(
        Race, 63, "reads shared memory at offset 124, which thread 31 wrote", |x| x[..32].to_vec(),
    ).threads(64).shared_bytes(128),
    copy_not_waited_for: Planted::new(
        InFlight, 0, "reads shared memory at offset 0 before the copy was waited for",
        |x| x.chunks(4).map(|four| four[0] ^ four[3]).collect(),
    ).threads(16).shared_bytes(256),
    copy_of_another_thread: Planted::new(
        Race, 1, "reads shared memory at offset 0, which thread 0 wrote",
        |x| (0..32usize).map(|i| x[i.saturating_sub(1)]).collect(),
    ).shared_bytes(128),
    partial_sums_unwritten: Planted::new(
        Unwritten, 30, "offset 504 of the partial sums was not written by this launch", sum_of_four_blocks,
    ).shared_bytes(4).in_block(2, 4),
    release_before_barrier: Planted::new(
        UnorderedBlocks, 31, "which thread 31 of block number 0 wrote: no release there is acquired here", sum_of_four_blocks,
    ).shared_bytes(4).in_block(3, 4),
    relaxed_release: Planted::new(
        UnorderedBlocks, 30, "which thread 30 of block number 0 wrote: no release there is acquired here", sum_of_four_blocks,
    ).shared_bytes(4).in_block(3, 4),
    relaxed_acquire: Planted::new(
        UnorderedBlocks, 30, "which thread 30 of block number 0 wrote: no release there is acquired here", sum_of_four_blocks,
    ).shared_bytes(4).in_block(3, 4),
    exchange_orders_nothing: Planted::new(
        UnorderedBlocks, 30, "which thread 30 of block number 0 wrote: no release there is acquired here", sum_of_four_blocks,
    ).in_block(3, 4),
    counter_read_plainly: Planted::new(
        UnorderedBlocks, 0, "reads offset 0 of the counter, which thread 0 of block number 0 changed atomically",
        |x| x[..4].to_vec(),
    ).threads(1).in_block(1, 4),
    too_early: Planted::new(
        TooEarly, 0, "reads the numbers", |x| x[..32].to_vec(),
    ).variant(90).starts_early(),
    endless_spin: Planted::new(
        Endless, 0, "accesses to memory without waiting for another thread", |x| x[..4].to_vec(),
    ).threads(1).in_block(0, 4),
    endless_votes: Planted::new(
        Endless, 0, "has waited for other threads",
        |x| vec![x[..32].iter().enumerate().map(|(i, v)| (v % 2) << i).sum(); 32],
    ),
}

fn sum_of_four_blocks(x: &[u32]) -> Vec<u32> {
    x[..32].iter().map(|v| 4 * v + 6).collect()
}

fn numbers() -> Vec<u32> {
    (0..WORDS as u32).map(|i| i.wrapping_mul(0x9e37_79b9) >> 12).collect()
}

impl Kernel {
    /// Kernel with its mistake, or repaired.
    fn spec(&self, repaired: bool) -> KernelSpec {
        let variant = self.planted.variant;
        KernelSpec {
            name: format!("{} for sm{variant}{}", self.entry, if repaired { ", repaired" } else { "" }),
            entry: self.entry,
            text: self.text,
            symbol: "planted",
            prelude: format!(
                "#define QG_VARIANT {variant}\n#define QG_FIXED {}\n{}",
                u32::from(repaired),
                include_str!("faults/params.cuh")
            ),
            arch_specific: self.planted.specific,
        }
    }

    /// GPU target, which may be newer than the variant.
    fn target(&self) -> Target {
        Target::Ptx { arch: self.planted.variant, specific: self.planted.specific }
    }

    /// Marked line: `faults/race_write_write.cu:10`.
    fn marked(&self) -> String {
        let lines = (1..).zip(self.text.lines()).filter(|(_, line)| line.ends_with("// FAULT"));
        let lines: Vec<usize> = lines.map(|(number, _)| number).collect();
        assert_eq!(lines.len(), 1, "{} has one line with the mark", self.entry);
        format!("{}:{}", self.entry, lines[0])
    }

    fn check(&self) {
        let planted = &self.planted;
        let device = match qgemm_emu::open(planted.variant) {
            Ok(device) => device,
            Err(why @ HalError::NoDevice { .. }) => return qgemm_testkit::skipped(self.entry, &why.to_string()),
            Err(other) => panic!("{other}"),
        };
        set_block_order(&*device, 0).unwrap();
        let (kernel, fault) = match self.emulate(&*device, false) {
            Err(HalError::KernelFault { kernel, fault, .. }) => (kernel, fault),
            Err(other) => panic!("{other}"),
            Ok(results) => panic!("nothing was found; the results are {results:?}"),
        };
        assert_eq!(kernel, self.spec(false).name);
        let thread = planted.thread.map_or_else(String::new, |thread| format!(", thread {thread}"));
        let (line, kind) = (self.marked(), planted.kind.text());
        let start = format!("{line}: {kind}: block ({}, 0, 0){thread}: ", planted.block);
        assert!(fault.starts_with(&start), "{fault}\nexpected {start}");
        assert!(fault.contains(planted.what), "{fault}\nexpected {}", planted.what);

        // The device keeps working.
        let expected = (planted.expected)(&numbers());
        for order in 0..ORDERS {
            set_block_order(&*device, order).unwrap();
            let results = self.emulate(&*device, true).unwrap();
            assert_eq!(results[..expected.len()], expected, "order {order}");
        }
    }

    fn emulate(&self, device: &dyn Device, repaired: bool) -> Result<Vec<u32>, HalError> {
        let Planted { blocks, threads, shared_bytes, starts_early, .. } = self.planted;
        let operands = Operands::new(device, blocks)?;
        let params = operands.addresses(|view| qgemm_emu::device_address(device, view))?;
        let region = |i: usize, name, buffer: &Buffer, access| Region {
            name,
            start: params[i] as usize,
            len: buffer.len(),
            access,
        };
        let regions = [
            region(0, "the numbers", &operands.numbers, Access::Read),
            region(1, "the results", &operands.results, Access::Write),
            region(2, "the partial sums", &operands.partials, Access::Write),
            region(3, "the counter", &operands.counter, Access::ReadWrite),
        ];
        let params = bytemuck::bytes_of(&params);
        let geometry = qgemm_emu::Geometry { blocks: [blocks, 1, 1], threads, shared_bytes, params, starts_early };
        // SAFETY: `Params` in `faults/params.cuh` is four addresses; the operands live to
        // the end of this function, and only this launch uses them.
        unsafe { qgemm_emu::launch_spec(device, &self.spec(repaired), geometry, &regions) }?;
        operands.results(device)
    }

    /// Runs the repaired kernel on a GPU.
    fn run(&self, device: &dyn Device) -> Result<Vec<u32>, HalError> {
        let Planted { blocks, threads, shared_bytes, .. } = self.planted;
        let operands = Operands::new(device, blocks)?;
        let params = operands.addresses(|view| qgemm_cuda::device_address(device, view))?;
        let geometry = qgemm_cuda::Geometry { grid: [blocks, 1, 1], threads, shared_bytes };
        let (spec, stream) = (self.spec(true), device.default_stream());
        // SAFETY: `Params` in `faults/params.cuh` is four addresses; the emulator has
        // found that the repaired kernel stays within the operands, which live until the
        // results have been waited for.
        unsafe {
            let params = bytemuck::bytes_of(&params);
            qgemm_cuda::launch_spec(device, &stream, &spec, Some(self.target()), geometry, params)?;
        }
        operands.results(device)
    }
}

/// Operands of a kernel of `faults/`.
struct Operands {
    numbers: Buffer,
    results: Buffer,
    partials: Buffer,
    counter: Buffer,
}

impl Operands {
    fn new(device: &dyn Device, blocks: u32) -> Result<Self, HalError> {
        let mut operands = Self {
            numbers: device.allocate(WORDS * 4, "the numbers")?,
            results: device.allocate(WORDS * 4, "the results")?,
            partials: device.allocate(blocks as usize * 128, "the partial sums")?,
            counter: device.allocate(4, "the counter")?,
        };
        let stream = device.default_stream();
        device.fill(&stream, (&mut operands.counter).into(), 0)?;
        device.upload(&stream, bytemuck::cast_slice(&numbers()), (&mut operands.numbers).into())?;
        Ok(operands)
    }

    /// Kernel parameter.
    fn addresses(&self, of: impl Fn(BufferRef<'_>) -> Result<u64, HalError>) -> Result<[u64; 4], HalError> {
        let Self { numbers, results, partials, counter } = self;
        Ok([of(numbers.into())?, of(results.into())?, of(partials.into())?, of(counter.into())?])
    }

    fn results(&self, device: &dyn Device) -> Result<Vec<u32>, HalError> {
        let mut words = vec![0u32; WORDS];
        device.download(&device.default_stream(), (&self.results).into(), bytemuck::cast_slice_mut(&mut words))?;
        Ok(words)
    }
}

#[test]
fn the_kernels_compile_for_a_gpu() {
    if let Err(why) = build::compiler() {
        return qgemm_testkit::skipped("the_kernels_compile_for_a_gpu", &why.to_string());
    }
    // A user's cache may be copied to a machine without this compiler.
    let temporary = tempfile::tempdir().unwrap();
    let cache = env::var_os(CACHE_VARIABLE).map_or_else(|| temporary.path().into(), PathBuf::from);
    for kernel in kernels() {
        for repaired in [false, true] {
            let built = build::compile(&cache, &kernel.spec(repaired), kernel.target());
            built.unwrap_or_else(|e| panic!("{}: {e}", kernel.entry));
        }
    }
}

#[test]
fn repaired_kernels_compute_the_same_on_a_gpu() {
    let device = match qgemm_cuda::open(0) {
        Ok(device) => device,
        Err(why @ HalError::NoDevice { .. }) => {
            return qgemm_testkit::skipped("repaired_kernels_compute_the_same_on_a_gpu", &why.to_string());
        }
        Err(other) => panic!("{other}"),
    };
    for kernel in kernels() {
        let Planted { variant: least, specific, .. } = kernel.planted;
        let runs = |number: u32| if specific { number == least } else { number >= least };
        if !device.info().variant.is_some_and(|variant| runs(variant.number())) {
            qgemm_testkit::skipped(kernel.entry, &format!("the GPU is {}", device.info().arch));
            continue;
        }
        let expected = (kernel.planted.expected)(&numbers());
        let results = kernel.run(&*device).unwrap_or_else(|e| panic!("{}: {e}", kernel.entry));
        assert_eq!(results[..expected.len()], expected, "{}", kernel.entry);
    }
}
