//! [`Operation`]: a layer as custom ops of candle.

use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, bail};
use qgemm_api::BufferMut;

use crate::context::Context;
use crate::operands::{self, Input, with_type};

/// A layer that writes one tensor.
pub(crate) trait Operation {
    const NAME: &'static str;

    fn context(&self) -> &Context;

    /// Shape and type of the result. Refuses inputs that do not fit.
    fn result(&self, inputs: &[Input<'_>]) -> Result<(Shape, DType)>;

    /// Submits the layer, which writes every element of `d`.
    fn run(&self, inputs: &[Input<'_>], d: BufferMut<'_>) -> Result<()>;
}

/// A run of a layer, for `Tensor::apply_op1_no_bwd` and its siblings.
pub(crate) struct Run<'l, L>(pub &'l L);

fn on_host<L: Operation>(layer: &L, tensors: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
    if !layer.context().device().is_cpu() {
        bail!("{}: the layer is on {:?}, the tensor on the CPU", L::NAME, layer.context().device());
    }
    let slices: Vec<_> =
        tensors.iter().map(|(storage, layout)| operands::host(L::NAME, storage, layout)).collect::<Result<_>>()?;
    let inputs: Vec<Input<'_>> = (slices.iter().zip(tensors))
        .map(|(slice, (storage, layout))| Input {
            view: slice.into(),
            dtype: operands::dtype_of(storage),
            dims: layout.dims(),
        })
        .collect();
    let (shape, dtype) = layer.result(&inputs)?;
    let storage = with_type!(L::NAME, dtype, T => {
        operands::new_on_host::<T>(shape.elem_count(), |d| layer.run(&inputs, d.into()))?
    });
    Ok((storage, shape))
}

#[cfg(feature = "cuda")]
fn on_cuda<L: Operation>(layer: &L, tensors: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
    use candle_core::backend::BackendStorage;
    let cuda = layer.context().cuda()?;
    let reads: Vec<_> =
        tensors.iter().map(|(storage, layout)| cuda.read(L::NAME, storage, layout)).collect::<Result<_>>()?;
    let inputs: Vec<Input<'_>> = (reads.iter().zip(tensors))
        .map(|(read, (storage, layout))| Input { view: read.view, dtype: storage.dtype(), dims: layout.dims() })
        .collect();
    let (shape, dtype) = layer.result(&inputs)?;
    let storage = with_type!(L::NAME, dtype, T => {
        cuda.new_tensor::<T>(shape.elem_count(), |d| layer.run(&inputs, d))?
    });
    Ok((storage, shape))
}

#[cfg(not(feature = "cuda"))]
fn on_cuda<L: Operation>(_: &L, _: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
    bail!("{}: built without the feature cuda", L::NAME)
}

macro_rules! custom_op {
    ($op:ident: $($storage:ident $layout:ident),+) => {
        impl<L: Operation> $op for Run<'_, L> {
            fn name(&self) -> &'static str {
                L::NAME
            }

            fn cpu_fwd(&self, $($storage: &CpuStorage, $layout: &Layout),+) -> Result<(CpuStorage, Shape)> {
                on_host(self.0, &[$(($storage, $layout)),+])
            }

            fn cuda_fwd(&self, $($storage: &CudaStorage, $layout: &Layout),+) -> Result<(CudaStorage, Shape)> {
                on_cuda(self.0, &[$(($storage, $layout)),+])
            }
        }
    };
}

custom_op!(CustomOp1: s1 l1);
custom_op!(CustomOp2: s1 l1, s2 l2);
custom_op!(CustomOp3: s1 l1, s2 l2, s3 l3);
