//! Extreme values of every number in the public API. Each is refused with a typed
//! error, or planned and run.
//!
//! Debug builds panic on overflow, so that accepted values have not overflowed.

mod attention;
mod factors;
mod memory;
mod products;
mod rows;

use qgemm_api::{Context, Error, Experts, HostExperts, HostWeight, Weight, quantize};

/// Extreme counts of rows, tokens, heads and so on.
const COUNTS: [usize; 11] =
    [0, 1, 2, 3, 33, 1 << 31, u32::MAX as usize, 1 << 32, 1 << 62, usize::MAX / 2 + 1, usize::MAX];
/// Bytes of every operand, all zeros. Enough for small problems,
/// too short for larger ones.
const ROOM: usize = 1 << 16;

/// Zeroed operands of a run.
struct Room {
    ctx: Context,
    read: qgemm_api::Buffer,
    written: Vec<qgemm_api::Buffer>,
    workspace: qgemm_api::Workspace,
}

impl Room {
    fn new(ctx: &Context) -> Self {
        let buffer = || ctx.allocate(ROOM).expect("memory");
        let written = (0..5).map(|_| buffer()).collect();
        Self { ctx: ctx.clone(), read: buffer(), written, workspace: ctx.workspace(ROOM).expect("memory") }
    }
}

type Try = fn(&mut Room, usize) -> Result<(), Error>;
type Refused = fn(usize) -> bool;

/// Tries every count. Planning must refuse those in `refused`. A run may
/// find its operands too short.
fn try_counts(name: &str, numbers: &[usize], refused: Refused, attempt: Try) {
    let ctx = Context::open("cpu").expect("always there");
    let mut room = Room::new(&ctx);
    for &number in numbers {
        let result = match attempt(&mut room, number) {
            Err(Error::BufferTooShort { .. }) => Ok(()),
            other => other,
        };
        assert_eq!(result.is_err(), refused(number), "{name} = {number}: {result:?}");
    }
}

/// Whether a count exceeds the 32 bits of kernels.
fn beyond_32_bits(number: usize) -> bool {
    number > u32::MAX as usize
}

fn weight(ctx: &Context) -> Weight {
    ctx.load(&host()).expect("memory")
}

fn host() -> HostWeight {
    quantize(&[0.5; 32 * 32], 32, 32, "q8_0".parse().expect("a format")).expect("valid").0
}

fn experts(ctx: &Context) -> Experts {
    ctx.load_experts(&HostExperts::new(&[host(), host()]).expect("alike")).expect("memory")
}

fn stride_below(columns: usize) -> impl Fn(usize) -> bool {
    // Two rows: the second must start within the address space.
    move |stride| stride < columns || stride > (isize::MAX as usize) / 4 - columns
}

/// [`stride_below`] of 32 columns.
fn bad_stride(stride: usize) -> bool {
    stride_below(32)(stride)
}

/// Whether an alignment is no power of two, or below that of f32.
fn bad_alignment(bytes: usize) -> bool {
    !bytes.is_power_of_two() || bytes < 4
}

const ALIGNMENTS: [usize; 8] = [0, 1, 2, 3, 4, 48, 1 << 63, usize::MAX];

fn beyond_31_bits(number: usize) -> bool {
    number > i32::MAX as usize
}
