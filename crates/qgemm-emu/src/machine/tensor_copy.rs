//! The TMA (`cp.async.bulk.tensor`): tiles of matrices and of batches of them, swizzled, completing on an mbarrier.

use super::block::Block;
use super::delivery::Delivery;
use super::shared::Refused;
use crate::fault::{FaultKind, Site};

/// What marks the 128 bytes as one of ours.
const MAGIC: u64 = u64::from_le_bytes(*b"qgemmtma");

/// How rows of a tile are stored in shared memory, against bank conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// One after another.
    None,
    /// The 16-byte unit of a 128-byte row is exchanged with another, by the row's number modulo 8
    /// (`CU_TENSOR_MAP_SWIZZLE_128B`).
    Bytes128,
}

impl Swizzle {
    /// Where the byte of a tile at shared-memory offset `offset` is stored: address bits 4 to 6 are exclusive-or'ed with
    /// bits 7 to 9 (PTX ISA, "Swizzling modes").
    pub(super) fn apply(self, offset: usize) -> usize {
        match self {
            Swizzle::None => offset,
            Swizzle::Bytes128 => offset ^ (offset >> 7 & 7) << 4,
        }
    }
}

/// Matrices as TMA sees them: what `cuTensorMapEncodeTiled` makes for a GPU.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    /// Address of the first element.
    pub address: u64,
    /// Bytes of an element.
    pub element_bytes: u32,
    /// Elements along the contiguous dimension, and rows.
    pub size: [u64; 2],
    /// Bytes from one row to the next.
    pub row_bytes: u64,
    /// Elements and rows of a tile.
    pub tile: [u32; 2],
    /// Matrices, and bytes from one to the next.
    pub matrices: [u64; 2],
    /// How a tile is stored.
    pub swizzle: Swizzle,
}

impl TensorMap {
    /// The 128 bytes for a kernel's parameter.
    pub fn encode(&self) -> [u64; 16] {
        let swizzle = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes128 => 1,
        };
        let mut words = [0; 16];
        words[..11].copy_from_slice(&[
            MAGIC,
            self.address,
            u64::from(self.element_bytes),
            self.size[0],
            self.size[1],
            self.row_bytes,
            u64::from(self.tile[0]),
            u64::from(self.tile[1]),
            swizzle,
            self.matrices[0],
            self.matrices[1],
        ]);
        words
    }

    pub(super) fn decode(words: &[u64; 16]) -> Option<Self> {
        let &[MAGIC, address, element_bytes, width, height, row_bytes, columns, rows, swizzle, count, stride, ..] =
            words
        else {
            return None;
        };
        Some(Self {
            address,
            element_bytes: element_bytes as u32,
            size: [width, height],
            row_bytes,
            tile: [columns as u32, rows as u32],
            matrices: [count, stride],
            swizzle: if swizzle == 1 { Swizzle::Bytes128 } else { Swizzle::None },
        })
    }

    fn tile_bytes(&self) -> usize {
        self.tile[0] as usize * self.tile[1] as usize * self.element_bytes as usize
    }
}

/// A tile on its way.
#[derive(Debug)]
pub(super) struct TensorCopy {
    map: TensorMap,
    x: i32,
    y: i32,
    matrix: i32,
    /// Offset in shared memory.
    to: usize,
    /// Offset of the mbarrier.
    barrier: usize,
    thread: usize,
    /// Whether the thread had waited for the kernel before when it asked.
    waited: bool,
}

impl Block<'_> {
    /// The running thread asks for a tile.
    pub(super) fn copy_tensor(
        &mut self,
        to: usize,
        map: Option<TensorMap>,
        [x, y, matrix]: [i32; 3],
        barrier: usize,
        site: Site,
    ) -> Result<(), Refused> {
        let Some(map) = map else {
            return Err((FaultKind::BadOperand, "cp.async.bulk.tensor from what is no tensor map".into()));
        };
        let barrier = self.barrier_for_copy(barrier)?;
        let bytes = map.tile_bytes();
        let alignment = if map.swizzle == Swizzle::None { 128 } else { 1024 };
        let row = map.tile[0] as usize * map.element_bytes as usize;
        if !row.is_multiple_of(16) || (map.swizzle != Swizzle::None && row > 128) {
            let detail = format!("a tile with rows of {row} bytes: multiples of 16, at most 128 with a swizzle");
            return Err((FaultKind::BadOperand, detail));
        }
        let offset = self.grid.shared.offset_of(to, bytes, alignment, "cp.async.bulk.tensor writes")?;
        self.grid.shared.write(offset, bytes, self.current, &self.clocks)?;
        self.grid.shared.take_off(offset, bytes);
        let (thread, waited) = (self.current, self.threads[self.current].waited);
        let copy = TensorCopy { map, x, y, matrix, to: offset, barrier, thread, waited };
        self.on_their_way.push(thread, site, Delivery::Tensor(copy));
        Ok(())
    }

    pub(super) fn deliver_tile(&mut self, copy: &TensorCopy) -> Result<(), Refused> {
        let thread = copy.thread;
        let TensorMap { element_bytes, tile: [columns, rows], .. } = copy.map;
        let bytes = copy.map.tile_bytes();
        self.grid.shared.land(copy.to, bytes);
        let size = element_bytes as usize;
        for row in 0..rows {
            for column in 0..columns {
                let at = copy.to + (row * columns + column) as usize * size;
                let (x, y) = (i64::from(copy.x) + i64::from(column), i64::from(copy.y) + i64::from(row));
                let mut element = [0u8; 16];
                if let Some(address) = copy.map.address_of(x, y, copy.matrix.into()) {
                    let place = self.grid.memory.place(address, size, "cp.async.bulk.tensor reads")?;
                    self.grid.memory.read(place, thread, &self.clocks, false, copy.waited)?;
                    // SAFETY: the element lies in an operand of the launch (`place`), which the launch may read.
                    unsafe {
                        let from = std::ptr::with_exposed_provenance::<u8>(address);
                        element.as_mut_ptr().copy_from_nonoverlapping(from, size);
                    }
                }
                self.grid.shared.set(copy.map.swizzle.apply(at), &element[..size]);
            }
        }
        let stamp = self.clocks.engine_event();
        self.grid.shared.written_by_engine(copy.to, bytes, stamp);
        let known = self.clocks.engine_release();
        self.bytes_came(copy.barrier, bytes, &known);
        Ok(())
    }
}

impl TensorMap {
    /// Address of an element, when it lies in the tensor.
    fn address_of(&self, x: i64, y: i64, matrix: i64) -> Option<usize> {
        let inside = |at: i64, size: u64| u64::try_from(at).ok().filter(|&at| at < size);
        let (x, y, matrix) = (inside(x, self.size[0])?, inside(y, self.size[1])?, inside(matrix, self.matrices[0])?);
        let of_matrix = y * self.row_bytes + x * u64::from(self.element_bytes);
        usize::try_from(self.address + matrix * self.matrices[1] + of_matrix).ok()
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
            size: [320, 27],
            row_bytes: 640,
            tile: [64, 32],
            matrices: [2, 1 << 20],
            swizzle: Swizzle::Bytes128,
        };
        let decoded = TensorMap::decode(&map.encode()).expect("a map");
        assert_eq!((decoded.tile, decoded.size, decoded.swizzle), (map.tile, map.size, map.swizzle));
        assert!(TensorMap::decode(&[0; 16]).is_none());
        assert_eq!(map.address_of(319, 26, 1), Some(4096 + (1 << 20) + 26 * 640 + 638));
        assert_eq!(
            [(320, 0, 0), (0, 27, 0), (-1, 0, 0), (0, 0, 2)].map(|(x, y, z)| map.address_of(x, y, z)),
            [None; 4]
        );
    }

    #[test]
    fn the_swizzle_exchanges_units_by_row() {
        let unit = |row: usize, unit: usize| Swizzle::Bytes128.apply(row * 128 + unit * 16);
        assert_eq!((unit(0, 5), unit(1, 0), unit(3, 5), unit(8, 2)), (80, 128 + 16, 3 * 128 + 6 * 16, 1024 + 32));
    }
}
