//! TMA (`cp.async.bulk.tensor`): swizzled tiles of tensors with up to five
//! dimensions, completing on an mbarrier.

use super::block::Block;
use super::delivery::Delivery;
use super::shared::Refused;
use crate::fault::{FaultKind, Site};

/// Maximum dimensions of a tensor.
pub const MOST_DIMENSIONS: usize = 5;

/// Magic number of an emulated tensor map.
const MAGIC: u64 = u64::from_le_bytes(*b"qgemmtma");

/// Swizzle of a tile's rows in shared memory, which
/// avoids bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// No swizzle.
    None,
    /// 64-byte swizzle: the 16-byte unit of a row is XORed with
    /// half of the row number modulo 4 (`CU_TENSOR_MAP_SWIZZLE_64B`).
    Bytes64,
    /// 128-byte swizzle: the 16-byte unit of a row is XORed with
    /// the row number modulo 8 (`CU_TENSOR_MAP_SWIZZLE_128B`).
    Bytes128,
}

impl Swizzle {
    /// Swizzled position of shared-memory offset `offset`: address bits 4 to 6,
    /// or 4 and 5, are XORed with as many bits from
    /// bit 7 on (PTX ISA, "Swizzling modes").
    pub(super) fn apply(self, offset: usize) -> usize {
        match self {
            Swizzle::None => offset,
            Swizzle::Bytes64 => offset ^ (offset >> 7 & 3) << 4,
            Swizzle::Bytes128 => offset ^ (offset >> 7 & 7) << 4,
        }
    }
}

/// A tensor map: what `cuTensorMapEncodeTiled` encodes for a GPU.
/// Unused dimensions have one element.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    /// Address of the first element.
    pub address: u64,
    /// Bytes of an element.
    pub element_bytes: u32,
    /// Elements along each dimension, contiguous one first.
    pub size: [u64; MOST_DIMENSIONS],
    /// Byte strides of all dimensions but the contiguous one.
    pub strides: [u64; MOST_DIMENSIONS - 1],
    /// Box: elements of a tile along each dimension.
    pub tile: [u32; MOST_DIMENSIONS],
    /// Swizzle of the tile.
    pub swizzle: Swizzle,
}

impl TensorMap {
    /// Encodes the map as 128 bytes for a kernel parameter.
    pub fn encode(&self) -> [u64; 16] {
        let swizzle = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes64 => 1,
            Swizzle::Bytes128 => 2,
        };
        let mut words = [0; 16];
        words[..3].copy_from_slice(&[MAGIC, self.address, u64::from(self.element_bytes) << 32 | swizzle]);
        words[3..8].copy_from_slice(&self.size);
        words[8..12].copy_from_slice(&self.strides);
        for (i, &elements) in self.tile.iter().enumerate() {
            words[12 + i / 2] |= u64::from(elements) << (i % 2 * 32);
        }
        words
    }

    pub(super) fn decode(words: &[u64; 16]) -> Option<Self> {
        let &[MAGIC, address, kind, s0, s1, s2, s3, s4, t0, t1, t2, t3, tiles @ .., _] = words else { return None };
        let swizzle = match kind as u32 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes64,
            _ => Swizzle::Bytes128,
        };
        Some(Self {
            address,
            element_bytes: (kind >> 32) as u32,
            size: [s0, s1, s2, s3, s4],
            strides: [t0, t1, t2, t3],
            tile: std::array::from_fn(|i| (tiles[i / 2] >> (i % 2 * 32)) as u32),
            swizzle,
        })
    }

    /// Bytes of a tile; `None` on overflow.
    fn tile_bytes(&self) -> Option<usize> {
        self.tile.iter().try_fold(self.element_bytes as usize, |bytes, &size| bytes.checked_mul(size as usize))
    }
}

/// A tile in flight.
#[derive(Debug)]
pub(super) struct TensorCopy {
    map: TensorMap,
    /// Coordinates of the tile's first element.
    at: [i32; MOST_DIMENSIONS],
    /// Offset in shared memory.
    to: usize,
    /// Offset of the mbarrier.
    barrier: usize,
    thread: usize,
    /// Whether the thread was past `griddepcontrol.wait`
    /// when it issued the copy.
    waited: bool,
}

impl Block<'_> {
    /// The running thread issues a tile copy.
    pub(super) fn copy_tensor(
        &mut self,
        to: usize,
        map: Option<TensorMap>,
        at: [i32; MOST_DIMENSIONS],
        barrier: usize,
        site: Site,
    ) -> Result<(), Refused> {
        let Some(map) = map else {
            return Err((FaultKind::BadOperand, "cp.async.bulk.tensor from what is no tensor map".into()));
        };
        let barrier = self.barrier_for_copy(barrier)?;
        let (alignment, most_row) = match map.swizzle {
            Swizzle::None => (128, usize::MAX),
            Swizzle::Bytes64 => (512, 64),
            Swizzle::Bytes128 => (1024, 128),
        };
        let row = map.tile[0] as usize * map.element_bytes as usize;
        let bytes = match map.tile_bytes() {
            Some(bytes) if row.is_multiple_of(16) && row <= most_row => bytes,
            _ => {
                let detail = format!("a tile with rows of {row} bytes: multiples of 16, at most {most_row}");
                return Err((FaultKind::BadOperand, detail));
            }
        };
        // An H200 also reports an illegal instruction.
        let first_byte = i64::from(at[0]) * i64::from(map.element_bytes);
        if first_byte.rem_euclid(16) != 0 {
            let detail = format!("a tile from byte {first_byte} of its rows on: a multiple of 16");
            return Err((FaultKind::Misaligned, detail));
        }
        let offset = self.grid.shared.offset_of(to, bytes, alignment, "cp.async.bulk.tensor writes")?;
        self.grid.shared.write(offset, bytes, self.current, &self.clocks)?;
        self.grid.shared.take_off(offset, bytes);
        let (thread, waited) = (self.current, self.threads[self.current].waited);
        let copy = TensorCopy { map, at, to: offset, barrier, thread, waited };
        self.pending_deliveries.push(thread, site, Delivery::Tensor(copy));
        Ok(())
    }

    pub(super) fn deliver_tile(&mut self, copy: &TensorCopy) -> Result<(), Refused> {
        let thread = copy.thread;
        let bytes = copy.map.tile_bytes().unwrap_or(0);
        self.grid.shared.land(copy.to, bytes);
        let size = copy.map.element_bytes as usize;
        for element in 0..bytes / size {
            let mut value = [0u8; 16];
            if let Some(address) = copy.map.address_of(copy.at, element) {
                let place = self.grid.memory.place(address, size, "cp.async.bulk.tensor reads")?;
                self.grid.memory.read(place, thread, &self.clocks, false, copy.waited)?;
                // SAFETY: the element is in an operand of the launch
                // (`place`), which the launch may read.
                unsafe {
                    let from = std::ptr::with_exposed_provenance::<u8>(address);
                    value.as_mut_ptr().copy_from_nonoverlapping(from, size);
                }
            }
            self.grid.shared.set(copy.map.swizzle.apply(copy.to + element * size), &value[..size]);
        }
        let stamp = self.clocks.engine_event();
        self.grid.shared.written_by_engine(copy.to, bytes, stamp);
        let known = self.clocks.engine_release();
        self.bytes_came(copy.barrier, bytes, &known);
        Ok(())
    }
}

impl TensorMap {
    /// Address of element `element` of the tile at `first`,
    /// if it is inside the tensor.
    fn address_of(&self, first: [i32; MOST_DIMENSIONS], mut element: usize) -> Option<usize> {
        let mut address = self.address;
        let strides = std::iter::once(u64::from(self.element_bytes)).chain(self.strides);
        for (i, stride) in strides.enumerate() {
            let at = i64::from(first[i]) + (element % self.tile[i] as usize) as i64;
            element /= self.tile[i] as usize;
            let inside = u64::try_from(at).ok().filter(|&at| at < self.size[i])?;
            address += inside * stride;
        }
        usize::try_from(address).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_survive_the_kernels_parameter() {
        let map = TensorMap {
            address: 4096,
            element_bytes: 2,
            size: [320, 27, 3, 1, 1],
            strides: [640, 32 * 640, 0, 0],
            tile: [64, 32, 2, 1, 1],
            swizzle: Swizzle::Bytes64,
        };
        let decoded = TensorMap::decode(&map.encode()).expect("a map");
        assert_eq!((decoded.tile, decoded.size, decoded.swizzle), (map.tile, map.size, map.swizzle));
        assert_eq!((decoded.strides, decoded.element_bytes), (map.strides, map.element_bytes));
        assert!(TensorMap::decode(&[0; 16]).is_none());
        let of = |at| map.address_of(at, 0);
        assert_eq!(of([319, 26, 0, 0, 0]), Some(4096 + 26 * 640 + 638));
        assert_eq!(map.address_of([256, 0, 1, 0, 0], 63 + 64 * 5), Some(4096 + 32 * 640 + 5 * 640 + 638));
        assert_eq!(map.address_of([256, 0, 1, 0, 0], 64 * 32), Some(4096 + 64 * 640 + 512));
        assert_eq!((of([320, 0, 0, 0, 0]), of([0, 27, 0, 0, 0]), of([-1, 0, 0, 0, 0])), (None, None, None));
    }

    #[test]
    fn the_swizzle_exchanges_units_by_row() {
        let unit = |row: usize, unit: usize| Swizzle::Bytes128.apply(row * 128 + unit * 16);
        assert_eq!((unit(0, 5), unit(1, 0), unit(3, 5), unit(8, 2)), (80, 128 + 16, 3 * 128 + 6 * 16, 1024 + 32));
        let unit = |row: usize, unit: usize| Swizzle::Bytes64.apply(row * 64 + unit * 16);
        assert_eq!((unit(1, 3), unit(2, 0), unit(7, 1), unit(8, 2)), (112, 128 + 16, 7 * 64 + 2 * 16, 512 + 32));
    }
}
