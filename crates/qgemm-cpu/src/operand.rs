//! Dense operands of kernels: bytes with strides, checked once per launch.

use std::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};
use qgemm_formats::DType;
use qgemm_hal::{BufferRef, Dense, DeviceId, HalError, HostMemory, Operand, Operands};

use crate::convert;
use crate::simd::Simd;

/// Elements that are rounded together before they are written.
const PART: usize = 64;

/// An input matrix.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    bytes: &'a [u8],
    layout: Dense,
    columns: usize,
}

impl<'a> Input<'a> {
    /// A matrix of `rows` × `columns` in `bytes`;
    /// `what` names it in errors.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`] when it exceeds `bytes`.
    pub fn new(
        bytes: &'a [u8],
        layout: Dense,
        [rows, columns]: [usize; 2],
        what: &'static str,
    ) -> Result<Self, HalError> {
        check_extent(bytes.len(), &layout, [rows, columns], what)?;
        Ok(Self { bytes, layout, columns })
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Element type and strides.
    pub fn layout(&self) -> &Dense {
        &self.layout
    }

    /// `out.len()` values of `row` from column `first` on.
    pub fn part(&self, simd: &Simd, row: usize, first: usize, out: &mut [f32]) {
        if self.layout.col_stride == 1 {
            self.contiguous(simd, row, first, out);
        } else {
            self.gather(simd, row, |i| first + i, out);
        }
    }

    /// `out.len()` values of `column` from `row` on; zeros when
    /// the column does not exist.
    pub fn down(&self, simd: &Simd, row: usize, column: usize, out: &mut [f32]) {
        if column >= self.columns {
            out.fill(0.0);
        } else if self.layout.row_stride == 1 {
            self.contiguous(simd, row, column, out);
        } else {
            let value = |i| self.layout.dtype.read(self.bytes, element(&self.layout, row + i, column));
            out.iter_mut().enumerate().for_each(|(i, out)| *out = value(i));
        }
    }

    /// Values of `row` in the columns given by `column`; zero
    /// for columns that do not exist.
    pub fn gather(&self, simd: &Simd, row: usize, column: impl Fn(usize) -> usize, out: &mut [f32]) {
        match self.layout.dtype {
            DType::F32 => self.gather_sized::<4>(simd, row, column, out),
            DType::F16 | DType::BF16 => self.gather_sized::<2>(simd, row, column, out),
        }
    }

    /// Elements are converted together, which is much
    /// faster than one by one.
    fn gather_sized<const SIZE: usize>(
        &self,
        simd: &Simd,
        row: usize,
        column: impl Fn(usize) -> usize,
        out: &mut [f32],
    ) {
        let mut elements = [[0; SIZE]; PART];
        for (part, out) in out.chunks_mut(PART).enumerate() {
            for (i, to) in elements[..out.len()].iter_mut().enumerate() {
                let column = column(part * PART + i);
                // Zero is all zero bits in every type.
                *to = match column < self.columns {
                    true => {
                        *self.bytes[element(&self.layout, row, column) * SIZE..].first_chunk().unwrap_or(&[0; SIZE])
                    }
                    false => [0; SIZE],
                };
            }
            simd.to_f32(self.layout.dtype, elements.as_flattened(), out);
        }
    }

    /// Contiguous elements from (`row`, `column`) on.
    fn contiguous(&self, simd: &Simd, row: usize, column: usize, out: &mut [f32]) {
        let start = element(&self.layout, row, column) * self.layout.dtype.bytes();
        simd.to_f32(self.layout.dtype, &self.bytes[start..], out);
    }
}

/// Whether the matrix is closer to column-major than to row-major.
pub fn is_transposed(layout: &Dense) -> bool {
    layout.col_stride > layout.row_stride && layout.col_stride != 1
}

/// An output matrix, shared by the threads of a launch.
#[derive(Debug)]
pub struct Output<'a> {
    start: *mut u8,
    layout: Dense,
    shape: [usize; 2],
    bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: an `Output` is a `&mut [u8]` whose only accesses are
// `store_part` and `load_part`, unsafe methods whose callers must
// leave every element to one thread.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// A matrix of `shape` (rows × columns) in `bytes`;
    /// `what` names it in errors.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`] when it exceeds `bytes`,
    /// [`HalError::Unsupported`] when its elements overlap.
    pub fn new(bytes: &'a mut [u8], layout: Dense, shape: [usize; 2], what: &'static str) -> Result<Self, HalError> {
        check_extent(bytes.len(), &layout, shape, what)?;
        if !is_injective(&layout, shape) {
            return Err(HalError::Unsupported {
                device: DeviceId::CPU,
                what: "an output with overlapping elements".into(),
                why: format!("the strides of {shape:?} are {} and {}", layout.row_stride, layout.col_stride),
            });
        }
        Ok(Self { start: bytes.as_mut_ptr(), layout, shape, bytes: PhantomData })
    }

    /// Reads the matrix from (`row`, `first`) on along the row.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    ///
    /// # Panics
    /// When the range exceeds the matrix.
    pub unsafe fn load_part(&self, simd: &Simd, row: usize, first: usize, out: &mut [f32]) {
        assert!(row < self.shape[0] && first + out.len() <= self.shape[1], "tiles lie in the output");
        let width = self.layout.dtype.bytes();
        let mut held = [0u32; PART];
        let held: &mut [u8] = bytemuck::cast_slice_mut(&mut held);
        for (i, out) in out.chunks_mut(PART).enumerate() {
            if self.layout.col_stride == 1 {
                let at = element(&self.layout, row, first + i * PART) * width;
                // SAFETY: as in `store_part`; the caller guarantees that
                // nobody else writes the elements.
                unsafe { held.as_mut_ptr().copy_from_nonoverlapping(self.start.add(at), out.len() * width) };
                simd.to_f32(self.layout.dtype, held, out);
                continue;
            }
            for (column, element_held) in held.chunks_exact_mut(width).take(out.len()).enumerate() {
                let at = element(&self.layout, row, first + i * PART + column) * width;
                // SAFETY: as in `store_part`; the caller guarantees that
                // nobody else writes the element.
                unsafe { element_held.as_mut_ptr().copy_from_nonoverlapping(self.start.add(at), width) };
            }
            simd.to_f32(self.layout.dtype, held, out);
        }
    }

    /// Writes `values` from (`row`, `first`) on along the row,
    /// rounded to the matrix's type.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    ///
    /// # Panics
    /// When the range exceeds the matrix.
    pub unsafe fn store_part(&self, row: usize, first: usize, values: &[f32]) {
        assert!(row < self.shape[0] && first + values.len() <= self.shape[1], "tiles lie in the output");
        let dtype = self.layout.dtype;
        // Aligned for every type.
        let mut rounded = [0u32; PART];
        let rounded: &mut [u8] = bytemuck::cast_slice_mut(&mut rounded);
        for (i, values) in values.chunks(PART).enumerate() {
            let rounded = &mut rounded[..values.len() * dtype.bytes()];
            convert::from_f32(dtype, values, rounded);
            let at = |column: usize| element(&self.layout, row, first + i * PART + column) * dtype.bytes();
            // SAFETY: `new` checked that the last element, and so every element
            // of the shape (asserted), is in the bytes that `self` borrows
            // mutably, and that no two elements overlap. The caller guarantees
            // that nobody else writes these.
            unsafe {
                let to = |column| self.start.add(at(column));
                if self.layout.col_stride == 1 {
                    to(0).copy_from_nonoverlapping(rounded.as_ptr(), rounded.len());
                } else {
                    for (column, element) in rounded.chunks_exact(dtype.bytes()).enumerate() {
                        to(column).copy_from_nonoverlapping(element.as_ptr(), element.len());
                    }
                }
            }
        }
    }
}

/// Output matrices, one for each product of a batch, shared
/// by the threads of a launch.
#[derive(Debug)]
pub struct OutputBatch<'a> {
    first: Output<'a>,
    /// Elements between matrices.
    stride: usize,
    batch: usize,
}

impl<'a> OutputBatch<'a> {
    /// `batch` matrices of `shape` (rows × columns), `stride` elements apart in
    /// `bytes`; `what` names them in errors.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`] when one exceeds `bytes`,
    /// [`HalError::Unsupported`] when elements overlap.
    pub fn new(
        bytes: &'a mut [u8],
        layout: Dense,
        shape: [usize; 2],
        batch: usize,
        stride: u64,
        what: &'static str,
    ) -> Result<Self, HalError> {
        let [rows, columns] = shape;
        let len = bytes.len();
        let last = (batch as u64 - 1).checked_mul(stride).and_then(|at| at.checked_mul(layout.dtype.bytes() as u64));
        let last = last.and_then(|at| usize::try_from(at).ok()).unwrap_or(usize::MAX);
        check_extent(len.saturating_sub(last), &layout, shape, what)?;
        let one = layout.extent(rows, columns).unwrap_or(u64::MAX);
        // The matrices are consecutive, or they are column
        // ranges of one wide matrix.
        let beside = layout.col_stride == 1
            && stride >= columns as u64
            && (rows < 2 || layout.row_stride >= (batch as u64 - 1) * stride + columns as u64);
        if batch > 1 && stride < one && !beside {
            return Err(HalError::Unsupported {
                device: DeviceId::CPU,
                what: "an output with overlapping matrices".into(),
                why: format!("{batch} of {shape:?} are {stride} elements apart"),
            });
        }
        Ok(Self { first: Output::new(bytes, layout, shape, what)?, stride: stride as usize, batch })
    }

    /// The matrix of a product.
    ///
    /// # Panics
    /// When the product does not exist.
    pub fn of(&self, product: usize) -> Output<'_> {
        assert!(product < self.batch, "the product is one of the batch");
        let Output { start, layout, shape, .. } = self.first;
        // SAFETY: `new` checked that the last matrix, and so
        // every one, is in the bytes that `first` borrows
        // mutably, and that no two overlap.
        let start = unsafe { start.add(product * self.stride * layout.dtype.bytes()) };
        Output { start, layout, shape, bytes: PhantomData }
    }
}

/// Bytes of an operand, which must be in host memory.
///
/// # Errors
/// [`HalError::WrongDevice`].
pub fn host_bytes<'a>(view: BufferRef<'a>, what: &'static str) -> Result<&'a [u8], HalError> {
    HostMemory::of_device(DeviceId::CPU, view, what)
}

/// The `count` values of a read operand.
pub fn read<'a, T: AnyBitPattern>(
    operands: &mut Operands<'a>,
    operand: impl Operand,
    count: usize,
) -> Result<&'a [T], HalError> {
    let (what, end) = (operand.name(), count * size_of::<T>());
    let bytes = host_bytes(operands.take(operand).ok_or(absent(what, end))?, what)?;
    let len = bytes.len();
    let bytes = bytes.get(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len })?;
    bytemuck::try_cast_slice(bytes).map_err(|_| misaligned(what))
}

/// The `count` values of a written operand.
pub fn written<'a, T: AnyBitPattern + NoUninit>(
    operands: &mut Operands<'a>,
    operand: impl Operand,
    count: usize,
) -> Result<&'a mut [T], HalError> {
    let (what, end) = (operand.name(), count * size_of::<T>());
    let view = operands.take_mut(operand).ok_or(absent(what, end))?;
    let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, what)?;
    let len = bytes.len();
    let bytes = bytes.get_mut(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len })?;
    bytemuck::try_cast_slice_mut(bytes).map_err(|_| misaligned(what))
}

fn misaligned(what: &'static str) -> HalError {
    let why = "its address is no multiple of 4".into();
    HalError::Unsupported { device: DeviceId::CPU, what: what.into(), why }
}

/// Input plane: rows of bytes.
#[derive(Clone, Copy, Debug)]
pub struct PlaneRows<'a> {
    bytes: &'a [u8],
    row_stride: usize,
    row_bytes: usize,
}

impl<'a> PlaneRows<'a> {
    /// `rows` rows of `row_bytes` bytes, `row_stride` apart;
    /// `what` names them in errors.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`] when they exceed `bytes`.
    pub fn new(
        bytes: &'a [u8],
        rows: usize,
        row_stride: u64,
        row_bytes: usize,
        what: &'static str,
    ) -> Result<Self, HalError> {
        let row_stride = usize::try_from(row_stride).unwrap_or(usize::MAX);
        let end = rows.saturating_sub(1).saturating_mul(row_stride).saturating_add(row_bytes);
        match bytes.len() {
            len if rows > 0 && end > len => Err(HalError::OutOfBounds { what, start: 0, end, len }),
            _ => Ok(Self { bytes, row_stride, row_bytes }),
        }
    }

    /// An existing row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_stride..][..self.row_bytes]
    }
}

/// The error for a missing operand of at least `len` bytes.
pub fn absent(what: &'static str, len: usize) -> HalError {
    HalError::OutOfBounds { what, start: 0, end: len, len: 0 }
}

fn element(layout: &Dense, row: usize, column: usize) -> usize {
    row * layout.row_stride as usize + column * layout.col_stride as usize
}

/// Whether distinct positions are distinct elements.
fn is_injective(layout: &Dense, [rows, columns]: [usize; 2]) -> bool {
    let apart = |outer: u64, outer_len: usize, inner: u64, inner_len: usize| {
        (outer_len <= 1 || outer > inner * (inner_len as u64 - 1)) && (inner_len <= 1 || inner > 0)
    };
    apart(layout.row_stride, rows, layout.col_stride, columns)
        || apart(layout.col_stride, columns, layout.row_stride, rows)
}

fn check_extent(len: usize, layout: &Dense, shape: [usize; 2], what: &'static str) -> Result<(), HalError> {
    let end = || {
        let [rows, columns] = [shape[0] as u64, shape[1] as u64];
        let last = (rows.checked_sub(1)?.checked_mul(layout.row_stride)?)
            .checked_add(columns.checked_sub(1)?.checked_mul(layout.col_stride)?)?;
        usize::try_from(last.checked_add(1)?.checked_mul(layout.dtype.bytes() as u64)?).ok()
    };
    let end = end().unwrap_or(usize::MAX);
    if end > len { Err(HalError::OutOfBounds { what, start: 0, end, len }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dtype: DType, row_stride: u64, col_stride: u64) -> Dense {
        Dense { dtype, row_stride, col_stride, aligned16: false }
    }

    #[test]
    fn rows_and_elements_follow_the_strides() {
        let bytes = DType::F16.encode(&(0..12).map(|i| i as f32).collect::<Vec<_>>());
        let rows = Input::new(&bytes, layout(DType::F16, 5, 1), [2, 4], "X").expect("fits");
        let columns = Input::new(&bytes, layout(DType::F16, 1, 3), [3, 4], "X").expect("fits");
        let mut out = [0.0; 4];
        rows.part(Simd::best(), 1, 0, &mut out);
        assert_eq!(out, [5.0, 6.0, 7.0, 8.0]);
        columns.part(Simd::best(), 2, 0, &mut out);
        assert_eq!(out, [2.0, 5.0, 8.0, 11.0]);
        columns.gather(Simd::best(), 1, |i| [3, usize::MAX, 0, 4][i], &mut out);
        assert_eq!(out, [10.0, 0.0, 1.0, 0.0]);
        rows.down(Simd::best(), 0, 2, &mut out[..2]);
        columns.down(Simd::best(), 1, 3, &mut out[2..]);
        assert_eq!(out, [2.0, 7.0, 10.0, 11.0]);
        rows.down(Simd::best(), 0, 4, &mut out);
        assert_eq!(out, [0.0; 4]);
    }

    #[test]
    fn a_matrix_beyond_its_bytes_is_refused() {
        let bytes = [0u8; 2 * (5 + 4)];
        assert!(Input::new(&bytes, layout(DType::F16, 5, 1), [2, 4], "X").is_ok());
        assert!(Input::new(&bytes[1..], layout(DType::F16, 5, 1), [2, 4], "X").is_err());
        assert!(Input::new(&bytes, layout(DType::F16, u64::MAX / 2, 1), [4, 4], "X").is_err());
    }

    #[test]
    fn an_output_whose_elements_overlap_is_refused() {
        let mut bytes = [0u8; 400];
        let mut accepts = |row, col, shape| Output::new(&mut bytes, layout(DType::F32, row, col), shape, "d").is_ok();
        assert!(accepts(4, 1, [3, 4]) && accepts(1, 3, [3, 4]) && accepts(0, 1, [1, 4]) && accepts(2, 9, [3, 4]));
        assert!(!accepts(3, 1, [3, 4]) && !accepts(1, 1, [2, 2]) && !accepts(0, 1, [2, 2]) && !accepts(4, 0, [3, 4]));
    }

    #[test]
    fn stores_round_to_nearest_even_and_leave_gaps_alone() {
        for dtype in DType::ALL {
            let mut bytes = vec![0xee; 5 * dtype.bytes()];
            let d = Output::new(&mut bytes, layout(dtype, 3, 1), [2, 2], "d").expect("fits");
            for (i, value) in [1.0, 0.1, -2.5, 65519.0].into_iter().enumerate() {
                // SAFETY: this is the only thread.
                unsafe { d.store_part(i / 2, i % 2, &[value]) };
            }
            let mut expected = vec![0xee; 5 * dtype.bytes()];
            for (at, value) in [(0, 1.0), (1, 0.1), (3, -2.5), (4, 65519.0)] {
                dtype.write(&mut expected, at, value);
            }
            assert_eq!(bytes, expected, "{dtype}");

            let values: Vec<f32> = (0..150).map(|i| i as f32 * 0.1 - 3.0).collect();
            let mut bytes = vec![0xee; 3 * 150 * dtype.bytes()];
            let d = Output::new(&mut bytes, layout(dtype, 1, 3), [2, 150], "d").expect("fits");
            // SAFETY: this is the only thread.
            unsafe { d.store_part(1, 0, &values) };
            for (column, &value) in values.iter().enumerate() {
                assert_eq!(dtype.read(&bytes, 3 * column + 1), dtype.decode(&dtype.encode(&[value]))[0], "{dtype}");
            }
            assert!(bytes[..dtype.bytes()].iter().all(|&byte| byte == 0xee), "{dtype}");
        }
    }
}
