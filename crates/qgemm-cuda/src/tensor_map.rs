//! Tensor maps: tensors as TMA sees them.

use std::mem::MaybeUninit;

use cudarc::driver::sys;
use qgemm_formats::DType;
use qgemm_hal::{DeviceId, HalError};

use crate::driver;

/// Most dimensions of a tensor.
pub const MOST_DIMENSIONS: usize = 5;

/// What a tensor is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapElement {
    /// Numbers.
    Number(DType),
    /// Bytes.
    Byte,
    /// Eight bytes at once.
    Bytes8,
}

impl MapElement {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            MapElement::Number(dtype) => dtype.bytes(),
            MapElement::Byte => 1,
            MapElement::Bytes8 => 8,
        }
    }
}

/// How a tile's rows are stored, those of 64 or 128 bytes against bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapSwizzle {
    /// In their order.
    None,
    /// Rows of up to 64 bytes.
    Bytes64,
    /// Rows of up to 128 bytes.
    Bytes128,
}

/// A tensor as TMA is told of it; zeros outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileMap {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// What it is of.
    pub element: MapElement,
    /// How many of its dimensions count.
    pub dimensions: usize,
    /// Elements along each, the contiguous one first; 1 beyond.
    pub size: [u64; MOST_DIMENSIONS],
    /// Bytes from an element to the next along each but the contiguous one, multiples of 16.
    pub strides: [u64; MOST_DIMENSIONS - 1],
    /// Elements of a tile along each; 1 beyond.
    pub tile: [u32; MOST_DIMENSIONS],
    /// How a tile is stored.
    pub swizzle: MapSwizzle,
}

impl TileMap {
    /// Of a matrix in tiles of rows of 128 bytes: columns and rows of it and of a tile, and bytes from one row to the next.
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

/// A tensor map as kernels take it: what `cuTensorMapEncodeTiled` writes, or the emulator's own.
pub type EncodedMap = [u64; 16];

/// The map of a tensor. Computes 128 bytes; nothing is sent to the device.
///
/// # Errors
/// [`HalError::Driver`] when the driver finds sizes or addresses that the engine cannot take.
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
    // SAFETY: sizes, strides, boxes and steps are arrays of at least as many entries as the call reads for so many dimensions,
    // five at most; the map is written where its type has its alignment. The address is not dereferenced.
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
    // SAFETY: all bytes were zeroed before, and the call has written what it needs.
    Ok(unsafe { map.assume_init() }.opaque)
}
