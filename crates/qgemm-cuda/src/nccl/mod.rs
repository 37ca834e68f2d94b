//! NCCL: collectives of several GPUs, loaded at run time. Short
//! all-reduces run over peer memory instead, in one launch.
//!
//! These are bindings of our own: cudarc's look for other names
//! of the library than packages install, and panic when it is
//! missing.
//!
//! On hosts that are shared, set `NCCL_NVLS_ENABLE=0`: NVLink
//! multicast needs resources of the whole machine.

mod api;
mod one_shot;
mod peer_memory;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use qgemm_formats::DType;
use qgemm_hal::{
    BufferMut, BufferRef, Collective, Communicator, Device, HalError, HostCommunicator, Message, Stream, ThreadGroup,
};

use crate::driver::DeviceContext;
use crate::gpu::Gpu;
use crate::memory::device_address;
use crate::stream::CudaStream;
use api::UniqueId;
use api::{Api, Elements, Handle, Type};
pub use api::{ID_BYTES, LIBRARY_VARIABLE};
pub use one_shot::ONE_SHOT_VARIABLE;
use one_shot::OneShot;
use watch::Watched;

/// Identity of a new group, which its maker gives to all ranks
/// ([`of_id`]).
///
/// # Errors
/// [`HalError::NoLibrary`], or what NCCL says.
pub fn unique_id() -> Result<[u8; ID_BYTES], HalError> {
    let id = Api::get()?.unique_id();
    id.map(|id| id.0).map_err(|message| HalError::BadGroup { expected: "a new group".into(), got: message })
}

/// Communicators of ranks of this process, a device each, in
/// order.
///
/// A rank waits up to `limit` for the others. One that drops its
/// communicator, by a return or a panic, is gone for the others
/// at once.
///
/// # Errors
/// [`HalError::NoLibrary`]; [`HalError::GroupSilent`] when NCCL
/// does not connect the devices in time; what NCCL says.
pub fn of_devices(devices: &[Arc<dyn Device>], limit: Duration) -> Result<Vec<NcclCommunicator>, HalError> {
    let id = unique_id()?;
    let world = devices.len();
    let controls = ThreadGroup::create(world, limit)?;
    let joining = devices.iter().enumerate().map(|(rank, device)| Joining::begin(&**device, id, [rank, world]));
    let joining = joining.collect::<Result<Vec<_>, _>>()?;
    let deadline = Instant::now() + limit;
    let one_shots = one_shot::of_devices(devices, limit).unwrap_or_else(|error| one_shot::refused(Some(error)));
    let mut one_shots = one_shots.into_iter().flatten();
    let joined = joining.into_iter().zip(controls).map(|(rank, control)| {
        let one_shot = one_shots.next();
        rank.end(Some(control), one_shot, limit, deadline)
    });
    joined.collect()
}

/// Communicator of a process among `control`'s, which
/// [`qgemm_hal::Rendezvous`] joins. A process that dies is gone
/// for the others at once.
///
/// # Errors
/// As [`of_devices`], and those of an exchange.
pub fn of_processes(
    device: &dyn Device,
    control: HostCommunicator,
    limit: Duration,
) -> Result<NcclCommunicator, HalError> {
    let ranks = [control.rank(), control.world()];
    let id = if ranks[0] == 0 { unique_id()?.to_vec() } else { Vec::new() };
    let all = control.exchange().exchange(Message { about: "the id of an NCCL group".into(), bytes: id })?;
    let wrong =
        || HalError::BadGroup { expected: "an id of NCCL".into(), got: format!("{} bytes", all[0].bytes.len()) };
    let id = all[0].bytes.as_slice().try_into().map_err(|_| wrong())?;
    let joining = Joining::begin(device, id, ranks)?;
    let one_shot = one_shot::of_processes(device, &control, limit)?;
    joining.end(Some(control), one_shot, limit, Instant::now() + limit)
}

/// Communicator of `rank` of `world`, whose group has an
/// [id](unique_id) of the caller's. A rank that is gone is known
/// by the time limit alone, and all collectives are NCCL's.
///
/// # Errors
/// As [`of_devices`].
pub fn of_id(
    device: &dyn Device,
    id: [u8; ID_BYTES],
    [rank, world]: [usize; 2],
    limit: Duration,
) -> Result<NcclCommunicator, HalError> {
    if rank >= world || world > i32::MAX as usize {
        let expected = format!("a rank below {world}");
        return Err(HalError::BadGroup { expected, got: format!("rank {rank}") });
    }
    Joining::begin(device, id, [rank, world])?.end(None, None, limit, Instant::now() + limit)
}

/// A rank that waits for the others to join, in a thread of its
/// own: nothing ends that wait.
struct Joining {
    context: Arc<DeviceContext>,
    ranks: [usize; 2],
    made: Receiver<Result<Made, String>>,
}

/// A handle on its way to another thread.
struct Made(Handle);

// SAFETY: NCCL's communicators may be used from every thread.
unsafe impl Send for Made {}

impl Joining {
    fn begin(device: &dyn Device, id: [u8; ID_BYTES], [rank, world]: [usize; 2]) -> Result<Self, HalError> {
        let (api, context) = (Api::get()?, Gpu::of(device)?.context().clone());
        let (send, made) = channel();
        let own = Arc::clone(&context);
        let join = move || {
            let bound = own.bind().map_err(|error| error.to_string());
            let joined = bound.and_then(|()| api.init_rank(UniqueId(id), rank, world).map(Made));
            if let Err(unsent) = send.send(joined)
                && let Ok(late) = unsent.0
            {
                // SAFETY: the handle was just made, and nobody has it.
                let ended = unsafe { api.abort(late.0) };
                tracing::warn!(?ended, "a communicator came too late");
            }
        };
        let started = thread::Builder::new().name("qgemm-nccl-join".into()).spawn(join);
        started.map_err(|error| not_started(&context, &error))?;
        Ok(Self { context, ranks: [rank, world], made })
    }

    fn end(
        self,
        control: Option<HostCommunicator>,
        one_shot: Option<OneShot>,
        limit: Duration,
        deadline: Instant,
    ) -> Result<NcclCommunicator, HalError> {
        let Self { context, ranks: [rank, world], made } = self;
        let device = context.id();
        let handle = match made.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(Made(handle))) => handle,
            Ok(Err(message)) => return Err(HalError::Driver { device, call: "NCCL", message }),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(HalError::GroupSilent { limit, what: format!("rank {rank} of {world} joining") });
            }
        };
        let one_shot_bytes = one_shot.as_ref().map_or(0, OneShot::longest);
        tracing::info!(%device, rank, world, one_shot_bytes, "joined a group");
        let watched = Watched::new(Api::get()?, Arc::clone(&context), handle, control, one_shot, limit);
        let watched = Arc::new(watched);
        let own = Arc::clone(&watched);
        let watch = thread::Builder::new().name("qgemm-nccl-watch".into()).spawn(move || own.watch());
        let watch = Some(watch.map_err(|error| not_started(&context, &error))?);
        Ok(NcclCommunicator { rank, world, one_shot_bytes, watched, watch })
    }
}

fn not_started(context: &DeviceContext, error: &std::io::Error) -> HalError {
    HalError::Driver { device: context.id(), call: "start of a thread", message: error.to_string() }
}

/// A rank's end of a group of GPUs. Collectives are work of the
/// stream, which a graph can capture.
///
/// Where all devices can access each other's memory, all-reduces up
/// to [a limit](NcclCommunicator::one_shot_bytes) run in one launch of
/// each rank (one-shot): every rank writes its message to all
/// others and adds all in the order of ranks, in f32.
///
/// A thread watches the other ranks. When one is gone, or work
/// takes too long, it ends the communicator with the kernels that
/// wait for that rank.
pub struct NcclCommunicator {
    rank: usize,
    world: usize,
    one_shot_bytes: usize,
    watched: Arc<Watched>,
    watch: Option<JoinHandle<()>>,
}

impl NcclCommunicator {
    /// Longest message of a one-shot all-reduce, in bytes. 0 where
    /// devices cannot access each other's memory.
    pub fn one_shot_bytes(&self) -> usize {
        self.one_shot_bytes
    }

    /// Lowers [`NcclCommunicator::one_shot_bytes`], on all ranks alike.
    /// [`ONE_SHOT_VARIABLE`] also raises it, before the group is made.
    pub fn with_one_shot_bytes(mut self, bytes: usize) -> Self {
        self.one_shot_bytes = self.one_shot_bytes.min(bytes);
        self
    }

    /// The one-shot all-reduce that a collective runs as, with type and
    /// number of its elements.
    fn one_shot(&self, collective: &Collective) -> Option<(&OneShot, DType, usize)> {
        let (dtype, count) = one_shot::message(collective)?;
        let is_short = (1..=self.one_shot_bytes).contains(&count.checked_mul(dtype.bytes())?);
        self.watched.one_shot.as_ref().filter(|_| is_short).map(|one_shot| (one_shot, dtype, count))
    }

    fn run(&self, collective: &Collective, [x, d]: [u64; 2], handle: Handle, stream: CUstream) -> Result<(), String> {
        let api = self.watched.api;
        match collective {
            Collective::AllReduce { dtype, count } => {
                let on = Elements { from: d, to: d, count: *count, element: of(*dtype) };
                // SAFETY: the operands have room for the collective
                // (`Collective::check`) and are on the device; the stream orders
                // their use, and the handle is alive during the call.
                unsafe { api.all_reduce(on, handle, stream) }
            }
            Collective::AllGather { dtype, rows: 1, columns } if are_equal(columns) => {
                let on = Elements { from: x, to: d, count: columns[self.rank], element: of(*dtype) };
                // SAFETY: as above.
                unsafe { api.all_gather(on, handle, stream) }
            }
            Collective::AllGather { dtype, rows, columns } => api.grouped(|| {
                let (bytes, total) = (dtype.bytes() as u64, columns.iter().sum::<usize>() as u64);
                let mut first = 0;
                for (root, &count) in columns.iter().enumerate() {
                    for row in 0..*rows as u64 {
                        // Only the root's address is read.
                        let own = if root == self.rank { row * count as u64 } else { 0 };
                        let (from, to) = (x + own * bytes, d + (row * total + first) * bytes);
                        // SAFETY: as above.
                        unsafe {
                            api.broadcast(Elements { from, to, count, element: of(*dtype) }, root, handle, stream)?
                        };
                    }
                    first += count as u64;
                }
                Ok(())
            }),
            Collective::ReduceScatter { dtype, counts } if are_equal(counts) => {
                let on = Elements { from: x, to: d, count: counts[self.rank], element: of(*dtype) };
                // SAFETY: as above.
                unsafe { api.reduce_scatter(on, handle, stream) }
            }
            Collective::ReduceScatter { dtype, counts } => api.grouped(|| {
                let mut from = x;
                for (root, &count) in counts.iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { api.reduce(Elements { from, to: d, count, element: of(*dtype) }, root, handle, stream)? };
                    from += (count * dtype.bytes()) as u64;
                }
                Ok(())
            }),
            Collective::Broadcast { bytes, root } => {
                let on = Elements { from: d, to: d, count: *bytes, element: Type::U8 };
                // SAFETY: as above.
                unsafe { api.broadcast(on, *root, handle, stream) }
            }
            other => Err(format!("no {}", other.name())),
        }
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn submit(
        &self,
        device: &dyn Device,
        stream: &Stream,
        collective: &Collective,
        x: Option<BufferRef<'_>>,
        d: BufferMut<'_>,
    ) -> Result<(), HalError> {
        let x_len = x.as_ref().map_or(0, |x| x.len());
        collective.check([self.rank, self.world], x_len, d.view().len())?;
        let context = Gpu::of(device)?.context();
        if context.id() != self.watched.context.id() {
            return Err(HalError::WrongDevice { device: self.watched.context.id(), what: "a collective" });
        }
        let cuda_stream = CudaStream::of(context.id(), stream)?;
        let x = x.map_or(Ok(0), |x| device_address(context.id(), x, "X of a collective"))?;
        let d = device_address(context.id(), d.view(), "D of a collective")?;
        context.bind()?;
        self.watched.call(&collective.to_string(), |handle| match self.one_shot(collective) {
            // SAFETY: D has room for the elements (`Collective::check`) and is on the
            // device; the stream orders its use. The message is short.
            Some((one_shot, dtype, count)) => unsafe { one_shot.launch(stream, d, dtype, count) },
            None => {
                let ran = self.run(collective, [x, d], handle, cuda_stream.handle());
                ran.map_err(|why| self.watched.error(why))
            }
        })
    }

    fn algorithm(&self, collective: &Collective) -> &'static str {
        if self.one_shot(collective).is_some() { "one_shot" } else { "nccl" }
    }

    fn is_captured(&self) -> bool {
        true
    }

    fn agree(&self, what: &str) -> Result<(), HalError> {
        // A group of the caller's id has no other way than its
        // collectives.
        self.watched.control.as_ref().map_or(Ok(()), |control| control.agree(what))
    }

    fn wait(&self, device: &dyn Device, stream: &Stream) -> Result<(), HalError> {
        self.watched.call("work of a stream", |_| device.synchronize(stream))
    }

    fn abort(&self, why: &str) {
        self.watched.fail(HalError::RankGone { rank: self.rank, why: why.to_owned() });
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        self.watched.stop();
        if let Some(watch) = self.watch.take()
            && watch.join().is_err()
        {
            tracing::warn!("a communicator's watch panicked");
        }
    }
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclCommunicator({}, rank {} of {})", self.watched.context.id(), self.rank, self.world)
    }
}

fn of(dtype: DType) -> Type {
    match dtype {
        DType::F32 => Type::F32,
        DType::F16 => Type::F16,
        DType::BF16 => Type::BF16,
    }
}

fn are_equal(parts: &[usize]) -> bool {
    parts.iter().all(|part| *part == parts[0])
}
