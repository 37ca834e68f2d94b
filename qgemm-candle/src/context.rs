//! [`Context`]: qgemm on a device of candle.

use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use qgemm_api::{Buffer, Stream, Workspace, XPrecision};

use crate::per_thread::PerThread;

#[cfg(feature = "cuda")]
use crate::operands::cuda::Cuda;

/// qgemm on a device of candle: its memory, and on CUDA its stream. Cheap to clone.
///
/// Layers of one context share plans and a workspace, one a thread.
#[derive(Clone, Debug)]
pub struct Context(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    qgemm: qgemm_api::Context,
    stream: Stream,
    device: Device,
    x_precision: XPrecision,
    workspaces: PerThread<Workspace>,
    #[cfg(feature = "cuda")]
    cuda: Option<Cuda>,
}

impl Context {
    /// qgemm on `device`. Tensors of its layers must be on this device.
    ///
    /// # Errors
    /// When qgemm has no backend for the device, or cannot open it.
    pub fn new(device: &Device) -> Result<Self> {
        Self::with_x_precision(device, XPrecision::default())
    }

    /// [`Context::new`] with a permission to round activations: see
    /// [`Problem::x_precision`](qgemm_api::Problem::x_precision).
    ///
    /// # Errors
    /// As [`Context::new`].
    pub fn with_x_precision(device: &Device, x_precision: XPrecision) -> Result<Self> {
        let workspaces = PerThread::default();
        let inner = match device {
            Device::Cpu => {
                let qgemm = qgemm_api::Context::open("cpu").map_err(Error::wrap)?;
                let (stream, device) = (qgemm.default_stream(), device.clone());
                #[cfg(feature = "cuda")]
                let cuda = None;
                Inner {
                    qgemm,
                    stream,
                    device,
                    x_precision,
                    workspaces,
                    #[cfg(feature = "cuda")]
                    cuda,
                }
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(of) => {
                let (qgemm, stream, cuda) = Cuda::open(of)?;
                Inner { qgemm, stream, device: device.clone(), x_precision, workspaces, cuda: Some(cuda) }
            }
            other => bail!("qgemm-candle has no layers for {other:?} in this build"),
        };
        Ok(Self(Arc::new(inner)))
    }

    /// Device of the layers' tensors.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// qgemm's context, for all of its other operations.
    pub fn qgemm(&self) -> &qgemm_api::Context {
        &self.0.qgemm
    }

    /// candle's stream as one of qgemm.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Permission to round activations.
    pub fn x_precision(&self) -> XPrecision {
        self.0.x_precision
    }

    /// Values of a tensor in f32, copied
    /// to memory of qgemm.
    pub(crate) fn upload(&self, tensor: &Tensor) -> Result<Buffer> {
        let values: Vec<f32> = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        self.qgemm().upload(&values).map_err(Error::wrap)
    }

    /// Views of candle's CUDA storage.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(&self) -> Result<&Cuda> {
        match &self.0.cuda {
            Some(cuda) => Ok(cuda),
            None => bail!("the layer is on {:?}, the tensor on CUDA", self.0.device),
        }
    }

    /// Runs with the thread's workspace, of at least `bytes`.
    pub(crate) fn with_workspace<R>(&self, bytes: usize, run: impl FnOnce(&mut Workspace) -> Result<R>) -> Result<R> {
        let mut workspace = match self.0.workspaces.take() {
            Some(workspace) if workspace.len() >= bytes => workspace,
            _ => self.0.qgemm.workspace(bytes.next_power_of_two()).map_err(Error::wrap)?,
        };
        let result = run(&mut workspace);
        self.0.workspaces.put(workspace);
        result
    }
}

/// qgemm's name of an element type of activations.
pub(crate) fn dtype_of(dtype: DType) -> Result<qgemm_api::DType> {
    Ok(match dtype {
        DType::F32 => qgemm_api::DType::F32,
        DType::F16 => qgemm_api::DType::F16,
        DType::BF16 => qgemm_api::DType::BF16,
        other => bail!("activations: expected f32, f16 or bf16, got {}", other.as_str()),
    })
}
