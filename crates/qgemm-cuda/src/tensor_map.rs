//! Tensor maps (TMA descriptors).

use std::mem::MaybeUninit;

use cudarc::driver::sys;
use qgemm_formats::DType;
use qgemm_hal::{DeviceId, HalError};

use crate::driver;

/// Maximum dimensions of a tensor.
pub const MOST_DIMENSIONS: usize = 5;

/// Element type of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapElement {
    /// Floating-point elements.
    Number(DType),
    /// Bytes.
    Byte,
    /// Eight-byte units.
    Bytes8,
}

impl MapElement {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            MapElement::Number(dtype) => dtype.bytes(),
            MapElement::Byte => 1,
            MapElement::Bytes8 => 8,
        }
    }
}

/// Swizzle of a tile in shared memory, which avoids bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapSwizzle {
    /// No swizzle.
    None,
    /// 64-byte swizzle, for rows of up to 64 bytes.
    Bytes64,
    /// 128-byte swizzle, for rows of up to 128 bytes.
    Bytes128,
}

/// Description of a tensor for TMA. Elements outside
/// the tensor read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileMap {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Element type.
    pub element: MapElement,
    /// Number of dimensions in use.
    pub dimensions: usize,
    /// Elements along each dimension, contiguous one first; 1 for unused ones.
    pub size: [u64; MOST_DIMENSIONS],
    /// Byte strides of all dimensions but the
    /// contiguous one, multiples of 16.
    pub strides: [u64; MOST_DIMENSIONS - 1],
    /// Box: elements of a tile along each
    /// dimension; 1 for unused ones.
    pub tile: [u32; MOST_DIMENSIONS],
    /// Swizzle of the tile.
    pub swizzle: MapSwizzle,
}

impl TileMap {
    /// A matrix in tiles with 128-byte rows. `size` and `tile` are
    /// (columns, rows); `row_bytes` is the row stride.
    pub(crate) fn matrix(address: u64, element: MapElement, size: [u64; 2], row_bytes: u64, tile: [u32; 2]) -> Self {
        Self {
            address,
            element,
            dimensions: 2,
            size: [size[0], size[1], 1, 1, 1],
            strides: [row_bytes, 0, 0, 0],
            tile: [tile[0], tile[1], 1, 1, 1],
            swizzle: MapSwizzle::Bytes128,
        }
    }
}

/// A tensor map as kernels take it: the output of
/// `cuTensorMapEncodeTiled`, or the emulator's format.
pub type EncodedMap = [u64; 16];

/// Encodes a tensor map into 128 bytes. Nothing
/// is sent to the device.
///
/// # Errors
/// [`HalError::Driver`] when the driver rejects sizes or addresses.
pub(crate) fn encode(device: DeviceId, tensor: &TileMap) -> Result<EncodedMap, HalError> {
    use sys::CUtensorMapDataType as Type;
    let element = match tensor.element {
        MapElement::Number(DType::F16) => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        MapElement::Number(DType::BF16) => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        MapElement::Number(DType::F32) => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        MapElement::Byte => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        MapElement::Bytes8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
    };
    let swizzle = match tensor.swizzle {
        MapSwizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        MapSwizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        MapSwizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let mut map = MaybeUninit::<sys::CUtensorMap>::zeroed();
    let steps = [1u32; MOST_DIMENSIONS];
    // SAFETY: sizes, strides, boxes and steps are arrays with at least
    // as many entries as the call reads for this number of
    // dimensions, at most five. The map is written to a value
    // with its alignment. The address is not dereferenced.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            element,
            tensor.dimensions.min(MOST_DIMENSIONS) as u32,
            std::ptr::with_exposed_provenance_mut(tensor.address as usize),
            tensor.size.as_ptr(),
            tensor.strides.as_ptr(),
            tensor.tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status.result().map_err(|e| HalError::Driver {
        device,
        call: "cuTensorMapEncodeTiled",
        message: format!("{}: {tensor:?}", driver::describe(e)),
    })?;
    // SAFETY: all bytes were zeroed before, and the
    // call has written the rest.
    Ok(unsafe { map.assume_init() }.opaque)
}
