//! Contexts of ranks that run a model together.

use std::sync::Arc;
use std::time::Duration;

use qgemm_hal::{Communicator, Device, DeviceKind, HostCommunicator, Rendezvous, ThreadGroup};

use super::Context;
use crate::backends::{self, DeviceChoice};
use crate::error::Error;

impl Context {
    /// Contexts of `world` ranks of this process, in order, each for
    /// a thread of its own. A rank waits up to `limit` for the
    /// others.
    ///
    /// CUDA ranks have a GPU each, from the named one on, and
    /// collectives of NCCL. CPU ranks share the cores. Ranks of other
    /// devices share the named one. Without NCCL, collectives pass
    /// through host memory.
    ///
    /// ```
    /// use std::time::Duration;
    /// use qgemm_api::{Collective, Context, DType};
    ///
    /// let ranks = Context::open_ranks("cpu", 2, Duration::from_secs(10))?;
    /// std::thread::scope(|scope| {
    ///     for ctx in &ranks {
    ///         scope.spawn(move || -> Result<(), qgemm_api::Error> {
    ///             let mut part = ctx.upload(&[1.5f32; 8])?; // such as D of a row-parallel product
    ///             let sum = Collective::AllReduce { dtype: DType::F32, count: 8 };
    ///             ctx.submit(&ctx.default_stream(), &sum, None, &mut part)?;
    ///             assert_eq!(ctx.download::<f32>(&part)?, [3.0; 8]);
    ///             Ok(())
    ///         });
    ///     }
    /// });
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Context::open`]. [`Error::Hal`] for no ranks, and when
    /// NCCL is missing or fails.
    pub fn open_ranks<'a>(
        device: impl Into<DeviceChoice<'a>>,
        world: usize,
        limit: Duration,
    ) -> Result<Vec<Self>, Error> {
        let first = backends::open(device.into())?;
        let id = first.info().id;
        if id.kind == DeviceKind::Cuda {
            return cuda_ranks(first, world, limit);
        }
        let group = ThreadGroup::create(world, limit)?;
        let cores = first.info().units as usize;
        let device = |_: &_| match id.kind {
            DeviceKind::Cpu => qgemm_cpu::open_with_threads((cores / world).max(1)),
            _ => Ok(Arc::clone(&first)),
        };
        let ranks = group.into_iter().map(|rank| {
            let device = device(&rank)?;
            Ok(Self::from_device(device).with_communicator(Arc::new(rank)))
        });
        ranks.collect()
    }

    /// Context of `rank` of `world`, whose others are processes that
    /// meet at `place`: of NCCL on CUDA, otherwise through host
    /// memory. A rank waits up to `limit` for the others.
    ///
    /// # Errors
    /// As [`Context::open`] and [`Rendezvous::join`]. [`Error::Hal`]
    /// when NCCL is missing or fails.
    pub fn join_rank<'a>(
        device: impl Into<DeviceChoice<'a>>,
        place: &Rendezvous,
        [rank, world]: [usize; 2],
        limit: Duration,
    ) -> Result<Self, Error> {
        let device = backends::open(device.into())?;
        let group = place.join(rank, world, limit)?;
        let communicator = match device.info().id.kind {
            DeviceKind::Cuda => cuda_rank(&*device, group, limit)?,
            _ => Arc::new(group),
        };
        Ok(Self::from_device(device).with_communicator(communicator))
    }
}

#[cfg(feature = "cuda")]
fn cuda_rank(device: &dyn Device, group: HostCommunicator, limit: Duration) -> Result<Arc<dyn Communicator>, Error> {
    Ok(Arc::new(qgemm_cuda::nccl::of_processes(device, group, limit)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda_rank(_: &dyn Device, _: HostCommunicator, _: Duration) -> Result<Arc<dyn Communicator>, Error> {
    Err(Error::BackendNotBuilt { kind: DeviceKind::Cuda, feature: "cuda" })
}

#[cfg(feature = "cuda")]
fn cuda_ranks(first: Arc<dyn Device>, world: usize, limit: Duration) -> Result<Vec<Context>, Error> {
    let id = first.info().id;
    let others =
        (1..u32::try_from(world).unwrap_or(u32::MAX)).map(|rank| qgemm_cuda::open(id.ordinal.saturating_add(rank)));
    let devices = std::iter::once(Ok(first)).chain(others).collect::<Result<Vec<_>, _>>()?;
    let group = qgemm_cuda::nccl::of_devices(&devices, limit)?;
    let context = |(device, rank)| Context::from_device(device).with_communicator(Arc::new(rank));
    Ok(devices.into_iter().zip(group).map(context).collect())
}

#[cfg(not(feature = "cuda"))]
fn cuda_ranks(_: Arc<dyn Device>, _: usize, _: Duration) -> Result<Vec<Context>, Error> {
    Err(Error::BackendNotBuilt { kind: DeviceKind::Cuda, feature: "cuda" })
}
