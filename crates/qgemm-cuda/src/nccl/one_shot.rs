//! One-shot all-reduce over peer memory, for short messages.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result;
use qgemm_formats::DType;
use qgemm_hal::{Collective, Device, HalError, HostCommunicator, Message, Stream, Variant};

use super::peer_memory::{HANDLE_BYTES, HostWords, PeerMemory, enable_access};
use crate::driver::DeviceContext;
use crate::families::one_shot::{self, MOST_RANKS, OneShotParams, PACKET_BYTES, PACKET_MESSAGE, THREADS};
use crate::function::{Function, Start};
use crate::gpu::Gpu;

/// Variable with the longest message in bytes.
pub const ONE_SHOT_VARIABLE: &str = "QGEMM_ONE_SHOT";
/// Longest message by default, times the number of ranks: each
/// sends its message to all others. Measured on two H200, where
/// it takes 0.6 of NCCL's time.
const LONGEST: usize = 1 << 20;
/// Threads that every SM has room for: all packets of a message
/// wait at once.
const RESIDENT: usize = 512;
/// Words of the host (`HOST_STOP`, `HOST_FAILED` in the kernel).
const STOP: usize = 0;
const FAILED: usize = 1;

/// One rank's part: packets from all ranks, which they write.
#[derive(Debug)]
pub struct OneShot {
    context: Arc<DeviceContext>,
    function: Function,
    start: Start,
    /// All but D.
    params: OneShotParams,
    host: HostWords<2>,
    limit: Duration,
    /// Packets of all ranks.
    _memory: Vec<Arc<PeerMemory>>,
}

/// A rank's memory, before it knows that of the others.
struct Half {
    context: Arc<DeviceContext>,
    function: Function,
    start: Start,
    memory: Arc<PeerMemory>,
    host: HostWords<2>,
}

/// Bytes of a rank's memory, and where its parts begin.
#[derive(Clone, Copy)]
struct Layout {
    packets: usize,
    calls: usize,
    failed: usize,
    bytes: usize,
}

impl Layout {
    /// Two slots of packets from each rank, a counter for each packet, and a
    /// word.
    fn new(longest: usize, world: usize) -> Self {
        let packets = longest.div_ceil(PACKET_MESSAGE).next_multiple_of(THREADS as usize);
        let calls = 2 * world * packets * PACKET_BYTES;
        let failed = calls + packets * size_of::<u32>();
        Self { packets, calls, failed, bytes: failed + size_of::<u32>() }
    }
}

/// Longest message that a device of a group can send, by the user's
/// setting. 0 for none.
fn longest(units: u32, world: usize) -> usize {
    if !(2..=MOST_RANKS).contains(&world) {
        return 0;
    }
    let wanted = std::env::var(ONE_SHOT_VARIABLE).ok().and_then(|text| {
        let number = text.trim().parse();
        number.inspect_err(|_| tracing::warn!(text, "{ONE_SHOT_VARIABLE} is no number of bytes")).ok()
    });
    wanted.unwrap_or(LONGEST / world).min(units as usize * RESIDENT * PACKET_MESSAGE)
}

impl Half {
    fn new(device: &dyn Device, layout: Layout) -> Result<Self, HalError> {
        let gpu = Gpu::of(device)?;
        let (context, variant) = (gpu.context(), gpu.chip().variant);
        Ok(Self {
            context: Arc::clone(context),
            function: gpu.kernel(&one_shot::spec(variant))?,
            // The kernel calls `griddepcontrol_wait` itself.
            start: if variant >= Variant::Sm90 { Start::Early } else { Start::InOrder },
            memory: Arc::new(PeerMemory::allocate(context, layout.bytes)?),
            host: HostWords::allocate(context)?,
        })
    }

    fn with(self, layout: Layout, rank: usize, memory: Vec<Arc<PeerMemory>>, limit: Duration) -> OneShot {
        let own = self.memory.address();
        let params = OneShotParams {
            d: 0,
            count: 0,
            slots: std::array::from_fn(|rank| memory.get(rank).map_or(0, |memory| memory.address())),
            calls: own + layout.calls as u64,
            failed: own + layout.failed as u64,
            host: self.host.address(),
            limit: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
            dtype: 0,
            rank: rank as u32,
            ranks: memory.len() as u32,
            packets: layout.packets as u32,
        };
        let Self { context, function, start, host, .. } = self;
        OneShot { context, function, start, params, host, limit, _memory: memory }
    }
}

/// One-shot all-reduces of devices of this process. `None` where a
/// device cannot access another's memory.
pub fn of_devices(devices: &[Arc<dyn Device>], limit: Duration) -> Result<Option<Vec<OneShot>>, HalError> {
    let world = devices.len();
    let longest = devices.iter().map(|device| longest(device.info().units, world)).min().unwrap_or(0);
    if longest == 0 {
        return Ok(None);
    }
    for (rank, device) in devices.iter().enumerate() {
        for (_, peer) in devices.iter().enumerate().filter(|(other, _)| *other != rank) {
            if !enable_access(Gpu::of(&**device)?.context(), Gpu::of(&**peer)?.context())? {
                return Ok(None);
            }
        }
    }
    let layout = Layout::new(longest, world);
    let halves = devices.iter().map(|device| Half::new(&**device, layout)).collect::<Result<Vec<_>, _>>()?;
    let memory: Vec<_> = halves.iter().map(|half| Arc::clone(&half.memory)).collect();
    let ranks = halves.into_iter().enumerate();
    Ok(Some(ranks.map(|(rank, half)| half.with(layout, rank, memory.clone(), limit)).collect()))
}

/// One-shot all-reduces of this process's device among those of other
/// processes. `None` where a process cannot open the memory of all.
///
/// # Errors
/// Those of an exchange.
pub fn of_processes(
    device: &dyn Device,
    control: &HostCommunicator,
    limit: Duration,
) -> Result<Option<OneShot>, HalError> {
    let exchange = control.exchange();
    let (rank, world) = (exchange.rank(), exchange.world());
    // An empty message says that this rank cannot.
    let give = |about: &str, bytes: Option<Vec<u8>>| {
        let all = exchange.exchange(Message { about: about.into(), bytes: bytes.unwrap_or_default() })?;
        let can = all.iter().all(|message| !message.bytes.is_empty());
        Ok::<_, HalError>(can.then_some(all))
    };
    let own = longest(device.info().units, world);
    let Some(all) = give("longest one-shot message", (own > 0).then(|| (own as u64).to_le_bytes().to_vec()))? else {
        return Ok(None);
    };
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let longest = all.iter().map(|message| number(&message.bytes)).min().unwrap_or(0).min(own as u64);
    let layout = Layout::new(longest as usize, world);
    let half = Half::new(device, layout).and_then(|half| Ok((half.memory.handle()?, half)));
    let handle = half.as_ref().ok().map(|(handle, _)| handle.to_vec());
    let Some(all) = give("memory of one-shot messages", handle)? else {
        return Ok(refused(half.err()));
    };
    let opened = half.and_then(|(_, half)| {
        let memory = all.iter().enumerate().map(|(other, message)| match message.bytes.as_slice().try_into() {
            _ if other == rank => Ok(Arc::clone(&half.memory)),
            Ok(handle) => PeerMemory::open(&half.context, handle).map(Arc::new),
            Err(_) => Err(HalError::BadGroup {
                expected: format!("a handle of {HANDLE_BYTES} bytes"),
                got: format!("{} bytes", message.bytes.len()),
            }),
        });
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        // Other processes may write to it until they end, so that it
        // lives as long as this one.
        std::mem::forget(Arc::clone(&half.memory));
        Ok(half.with(layout, rank, memory, limit))
    });
    match give("access to one-shot messages", opened.as_ref().ok().map(|_| vec![1]))? {
        Some(_) => Ok(opened.ok()),
        None => Ok(refused(opened.err())),
    }
}

/// No one-shot all-reduces, with the reason in the log.
pub fn refused<T>(error: Option<HalError>) -> Option<T> {
    if let Some(error) = error {
        tracing::warn!(%error, "all-reduces run without peer memory");
    }
    None
}

impl OneShot {
    /// Longest message in bytes.
    pub fn longest(&self) -> usize {
        self.params.packets as usize * PACKET_MESSAGE
    }

    /// Sums D over all ranks, in place.
    ///
    /// # Safety
    /// D is memory of this rank's device with room for `count` elements, until
    /// the stream has done the work. It has at most [`OneShot::longest`] bytes, and at least one.
    pub unsafe fn launch(&self, stream: &Stream, d: u64, dtype: DType, count: usize) -> Result<(), HalError> {
        let dtype_code = qgemm_hal::abi::dtype_code(dtype);
        let params = OneShotParams { d, count: count as u64, dtype: dtype_code, ..self.params };
        let grid = [one_shot::ctas(count, dtype), 1, 1];
        // SAFETY: the parameter is the kernel's. D is the caller's; packets
        // and words live as long as `self`, which waits for its kernels
        // when it is dropped. The kernel waits for the one before.
        unsafe { self.function.launch(stream, grid, THREADS, 0, bytemuck::bytes_of(&params), self.start) }
    }

    /// The error of a kernel that waited too long.
    pub fn failure(&self) -> Option<HalError> {
        let rank = self.host.load(FAILED).checked_sub(1)? as usize;
        Some(HalError::RankSilent { rank, limit: self.limit, what: "a one-shot all_reduce".into() })
    }

    /// Ends kernels that wait.
    pub fn stop(&self) {
        self.host.store(STOP, 1);
    }
}

impl Drop for OneShot {
    fn drop(&mut self) {
        self.stop();
        let ended =
            self.context.bind().and_then(|()| self.context.check("cuCtxSynchronize", result::ctx::synchronize()));
        if let Err(error) = ended {
            tracing::warn!(%error, "all-reduces of a group did not end");
        }
    }
}

/// Type and number of elements of a collective that may be one-shot.
pub fn message(collective: &Collective) -> Option<(DType, usize)> {
    match collective {
        Collective::AllReduce { dtype, count } => Some((*dtype, *count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_room_for_the_longest_message() {
        let layout = Layout::new(100_000, 4);
        assert!(layout.packets * PACKET_MESSAGE >= 100_000 && layout.packets.is_multiple_of(THREADS as usize));
        assert_eq!(layout.calls, 2 * 4 * layout.packets * 16);
        assert_eq!(layout.bytes, layout.calls + 4 * layout.packets + 4);
        for dtype in DType::ALL {
            let count = layout.packets * PACKET_MESSAGE / dtype.bytes();
            assert_eq!(one_shot::ctas(count, dtype) as usize * THREADS as usize, layout.packets);
            assert_eq!(one_shot::ctas(1, dtype), 1);
        }
    }

    #[test]
    fn groups_of_one_or_too_many_have_no_one_shot() {
        assert_eq!([0, 1, MOST_RANKS + 1].map(|world| longest(132, world)), [0; 3]);
        if std::env::var_os(ONE_SHOT_VARIABLE).is_none() {
            assert_eq!([2, 4, 8].map(|world| longest(132, world)), [512 << 10, 256 << 10, 128 << 10]);
        }
        assert!(longest(1, 2) <= RESIDENT * PACKET_MESSAGE);
    }
}
