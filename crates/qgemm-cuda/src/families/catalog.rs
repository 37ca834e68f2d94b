//! The backend's operations: families, launch sequences and kernels of
//! every operation in the list of `qgemm-hal`.

use qgemm_hal::{Catalog, DeviceInfo, HalError, LaunchSequence, Operation, Variant, with_operations};

use super::kernel_launch::MakeKernel;
use crate::spec::KernelSpec;

/// An operation with CUDA kernels.
pub trait CudaOperation: Operation {
    /// Launch sequence of a plan. `make` prepares each kernel.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when the device has no kernel for the
    /// operation, and errors of `make`.
    fn sequence(
        &self,
        plan: &Self::Plan,
        info: &DeviceInfo,
        make: &mut MakeKernel<'_>,
    ) -> Result<LaunchSequence, HalError>;
}

macro_rules! catalog {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        /// Families of CUDA devices.
        pub static CATALOG: Catalog = Catalog { $($name: super::$name::FAMILIES,)* };

        $(impl CudaOperation for qgemm_hal::$op {
            fn sequence(
                &self,
                plan: &Self::Plan,
                info: &DeviceInfo,
                make: &mut MakeKernel<'_>,
            ) -> Result<LaunchSequence, HalError> {
                super::$name::sequence(self, plan, info, make)
            }
        })*

        /// Kernels of all operations for `variant`.
        pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
            std::iter::empty()$(.chain(super::$name::specs(variant)))*
        }
    };
}
with_operations!(catalog);
