//! Tensor maps: matrices as TMA sees them.

use std::mem::MaybeUninit;

use cudarc::driver::sys;
use qgemm_formats::DType;
use qgemm_hal::{DeviceId, HalError};

use crate::driver;

/// X, or a batch of matrices, as TMA is told of it: tiles in the 128-byte swizzle, zeros outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XMap {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// f16 or bf16.
    pub dtype: DType,
    /// Columns and tokens.
    pub size: [u64; 2],
    /// Bytes from one token to the next, a multiple of 16.
    pub row_bytes: u64,
    /// Columns and tokens of a tile.
    pub tile: [u32; 2],
    /// Matrices, and bytes from one to the next, a multiple of 16, of a map of three dimensions.
    pub matrices: Option<[u64; 2]>,
}

/// A tensor map as kernels take it: what `cuTensorMapEncodeTiled` writes, or the emulator's own.
pub type EncodedMap = [u64; 16];

/// The map of X. Computes 128 bytes; nothing is sent to the device.
///
/// # Errors
/// [`HalError::Driver`] when the driver finds sizes or addresses that the engine cannot take.
pub(crate) fn encode(device: DeviceId, x: &XMap) -> Result<EncodedMap, HalError> {
    let dtype = match x.dtype {
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    };
    let mut map = MaybeUninit::<sys::CUtensorMap>::zeroed();
    let [count, matrix_bytes] = x.matrices.unwrap_or([1, 0]);
    let rank = if x.matrices.is_some() { 3 } else { 2 };
    let size = [x.size[0], x.size[1], count];
    let stride_bytes = [x.row_bytes, matrix_bytes];
    let tile = [x.tile[0], x.tile[1], 1];
    let steps = [1u32; 3];
    // SAFETY: sizes, strides and boxes are arrays of as many entries as the call reads for three dimensions; the map is
    // written where its type has its alignment. The address is not dereferenced.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            dtype,
            rank,
            std::ptr::with_exposed_provenance_mut(x.address as usize),
            size.as_ptr(),
            stride_bytes.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status.result().map_err(|e| HalError::Driver {
        device,
        call: "cuTensorMapEncodeTiled",
        message: format!("{}: {x:?}", driver::describe(e)),
    })?;
    // SAFETY: all bytes were zeroed before, and the call has written what it needs.
    Ok(unsafe { map.assume_init() }.opaque)
}
