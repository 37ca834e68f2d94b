//! candle's storage as operands of qgemm, in place.

use candle_core::{CpuStorage, DType, Error, Layout, Result, WithDType, bail};
use qgemm_api::cpu::{HostSlice, HostSliceMut};
use qgemm_api::half::{bf16, f16};
use qgemm_api::{BufferRef, Element, cpu};

/// Alignment of candle's allocations,
/// in bytes.
pub(crate) const WIDE: usize = 16;

/// Elements of a contiguous tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a> {
    pub view: BufferRef<'a>,
    pub dtype: DType,
    pub dims: &'a [usize],
}

impl Input<'_> {
    /// Features of a row, and rows.
    pub fn matrix(&self, name: &'static str) -> Result<(usize, usize)> {
        match self.dims {
            [rows @ .., columns] => Ok((*columns, rows.iter().product())),
            [] => bail!("{name}: expected rows, got a scalar"),
        }
    }
}

/// The range of a contiguous tensor within its storage.
pub(crate) fn offsets(name: &'static str, layout: &Layout) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => Err(Error::RequiresContiguous { op: name }.bt()),
    }
}

/// Runs `$body` with `$T` as the type of elements of `$dtype`.
macro_rules! with_type {
    ($name:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F16 => {
                type $T = qgemm_api::half::f16;
                $body
            }
            DType::BF16 => {
                type $T = qgemm_api::half::bf16;
                $body
            }
            DType::U32 => {
                type $T = u32;
                $body
            }
            other => bail!("{}: expected f32, f16, bf16 or u32, got {}", $name, other.as_str()),
        }
    };
}
pub(crate) use with_type;

/// Elements of a tensor in host memory.
pub(crate) fn host<'a>(name: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<HostSlice<'a>> {
    let range = offsets(name, layout)?;
    Ok(match storage {
        CpuStorage::F32(values) => cpu::slice(&values[range]),
        CpuStorage::F16(values) => cpu::slice::<f16>(&values[range]),
        CpuStorage::BF16(values) => cpu::slice::<bf16>(&values[range]),
        CpuStorage::U32(values) => cpu::slice(&values[range]),
        other => bail!("{name}: expected f32, f16, bf16 or u32, got {}", dtype_of(other).as_str()),
    })
}

/// Elements of a tensor in host memory, to be changed in place.
pub(crate) fn host_mut<'a>(
    name: &'static str,
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<HostSliceMut<'a>> {
    let range = offsets(name, layout)?;
    Ok(match storage {
        CpuStorage::F32(values) => cpu::slice_mut(&mut values[range]),
        CpuStorage::F16(values) => cpu::slice_mut::<f16>(&mut values[range]),
        CpuStorage::BF16(values) => cpu::slice_mut::<bf16>(&mut values[range]),
        other => bail!("{name}: expected f32, f16 or bf16, got {}", dtype_of(other).as_str()),
    })
}

/// Element type of a storage.
pub(crate) fn dtype_of(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// A new tensor of `count` elements in host memory, which `write` fills.
pub(crate) fn new_on_host<T: Element + WithDType + Default>(
    count: usize,
    write: impl FnOnce(&mut HostSliceMut<'_>) -> Result<()>,
) -> Result<CpuStorage> {
    let mut values = vec![T::default(); count];
    write(&mut cpu::slice_mut(&mut values))?;
    Ok(T::to_cpu_storage_owned(values))
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! candle's CUDA storage: pointers on candle's stream.

    use std::sync::Arc;

    use candle_core::backend::{BackendDevice, BackendStorage};
    use candle_core::cuda_backend::CudaDType;
    use candle_core::{CudaDevice, CudaStorage, DType, DeviceLocation, Error, Layout, Result, bail};
    use qgemm_api::cuda::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop};
    use qgemm_api::cuda::{AddressSpace, from_cudarc_stream};
    use qgemm_api::{BufferMut, BufferRef, DeviceId, DeviceKind, Element, Stream};

    use super::offsets;

    /// candle's device, and views of its memory.
    pub(crate) struct Cuda {
        device: CudaDevice,
        stream: Arc<CudaStream>,
        space: AddressSpace,
    }

    /// A view of a tensor, and cudarc's record of its use on the stream.
    pub(crate) struct Read<'a> {
        pub view: BufferRef<'a>,
        _used: SyncOnDrop<'a>,
    }

    impl Cuda {
        /// Opens qgemm on the primary context of `device`, which candle uses, too.
        pub fn open(device: &CudaDevice) -> Result<(qgemm_api::Context, Stream, Self)> {
            let DeviceLocation::Cuda { gpu_id } = device.location() else { bail!("a CUDA device without an ordinal") };
            let id = DeviceId { kind: DeviceKind::Cuda, ordinal: gpu_id as u32 };
            let qgemm = qgemm_api::Context::open(id).map_err(Error::wrap)?;
            let stream = device.cuda_stream();
            let ours = from_cudarc_stream(&**qgemm.device(), stream.clone()).map_err(Error::wrap)?;
            let space = AddressSpace::new(&**qgemm.device()).map_err(Error::wrap)?;
            Ok((qgemm, ours, Self { device: device.clone(), stream, space }))
        }

        /// Elements of a tensor.
        pub fn read<'a>(&'a self, name: &'static str, storage: &'a CudaStorage, layout: &Layout) -> Result<Read<'a>> {
            self.check_device(name, storage)?;
            with_type!(name, storage.dtype(), T => {
                let range = offsets(name, layout)?;
                let (pointer, used) = storage.as_cuda_slice::<T>()?.device_ptr(&self.stream);
                let address = pointer + (range.start * size_of::<T>()) as u64;
                // SAFETY: candle's layout is within its storage, which is borrowed. Launches go to
                // `stream`, on which cudarc orders later writes and the free.
                let view = unsafe { self.space.view(address, range.len() * size_of::<T>()) };
                Ok(Read { view: view.typed(T::TYPE), _used: used })
            })
        }

        /// Changes the elements of a tensor in place.
        pub fn update(
            &self,
            name: &'static str,
            storage: &mut CudaStorage,
            layout: &Layout,
            update: impl FnOnce(BufferMut<'_>) -> Result<()>,
        ) -> Result<()> {
            self.check_device(name, storage)?;
            with_type!(name, storage.dtype(), T => {
                let range = offsets(name, layout)?;
                let (pointer, _used) = storage.as_cuda_slice_mut::<T>()?.device_ptr_mut(&self.stream);
                let address = pointer + (range.start * size_of::<T>()) as u64;
                // SAFETY: as in `read`, and the storage is borrowed for writing.
                let view = unsafe { self.space.view_mut(address, range.len() * size_of::<T>()) };
                update(view.typed(T::TYPE))
            })
        }

        /// A new tensor of `count` elements, which `write` fills.
        pub fn new_tensor<T: Element + CudaDType + DeviceRepr>(
            &self,
            count: usize,
            write: impl FnOnce(BufferMut<'_>) -> Result<()>,
        ) -> Result<CudaStorage> {
            // SAFETY: `write` launches kernels that write every element, or fails.
            let mut slice = unsafe { self.device.alloc::<T>(count)? };
            {
                let (address, _used) = slice.device_ptr_mut(&self.stream);
                // SAFETY: as in `update`.
                let view = unsafe { self.space.view_mut(address, count * size_of::<T>()) };
                write(view.typed(T::TYPE))?;
            }
            Ok(CudaStorage::wrap_cuda_slice(slice, self.device.clone()))
        }

        /// Tensors of another device of candle have another stream, even on the same GPU.
        fn check_device(&self, name: &'static str, storage: &CudaStorage) -> Result<()> {
            match storage.device().same_device(&self.device) {
                true => Ok(()),
                false => bail!("{name}: expected a tensor of {:?}, got one of {:?}", self.device, storage.device()),
            }
        }
    }

    impl std::fmt::Debug for Cuda {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Cuda").field("device", &self.device).finish_non_exhaustive()
        }
    }
}
