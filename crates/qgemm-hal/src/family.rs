//! Kernel families: the kernels of a backend for an operation,
//! which the scheduler chooses from.

use std::fmt;

use crate::caps::DeviceInfo;
use crate::device::Device;
use crate::error::{HalError, Unsupported};
use crate::op::Operation;
use crate::operations::OperationInfo;
use crate::sequence::LaunchSequence;

/// One kernel algorithm of one backend for one operation. Families are
/// `static`s listed in the device's [`Catalog`].
pub trait Family<O: Operation>: Send + Sync + fmt::Debug {
    /// Name: `gemv`, `gemm`.
    fn name(&self) -> &'static str;

    /// Candidate configs for the operation on a device; never empty.
    ///
    /// # Errors
    /// Why the family does not support the operation.
    fn configs(&self, op: &O, info: &DeviceInfo) -> Result<Vec<O::Config>, Unsupported>;

    /// Prepares the kernels of a plan: finds or compiles them,
    /// and loads them on the device.
    ///
    /// # Errors
    /// [`HalError::Compile`],
    /// [`HalError::KernelUnavailable`] or a driver error.
    fn prepare(&self, device: &dyn Device, op: &O, plan: &O::Plan) -> Result<LaunchSequence, HalError>;

    /// Hash of the sources of a config's kernels. Measurements
    /// with another hash are ignored.
    fn source_hash(&self, op: &O, config: &O::Config) -> u64;
}

/// The families of one operation.
pub type Families<O> = &'static [&'static dyn Family<O>];

macro_rules! catalog {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        /// Kernel families of a device for each operation,
        /// in no particular order.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Catalog {
            $(
                #[doc = concat!($summary, ".")]
                pub $name: Families<$crate::op::$name::$op>,
            )*
        }

        impl Catalog {
            /// Every operation with the names of its families.
            pub fn operations(&self) -> Vec<(OperationInfo, Vec<&'static str>)> {
                fn names<O: Operation>(families: &[&'static dyn Family<O>]) -> (OperationInfo, Vec<&'static str>) {
                    (O::INFO, families.iter().map(|family| family.name()).collect())
                }
                vec![$(names(self.$name)),*]
            }
        }
    };
}
crate::with_operations!(catalog);
