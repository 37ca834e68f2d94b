//! Weights on a device: packed into the layout that its kernels read, and uploaded.

use std::fmt;

use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_formats::{DType, Format, FormatError, HostWeight, NO_COLUMN};
use qgemm_hal::{Buffer, Device, DeviceId, Stream, WeightArgs};

use crate::error::Error;

/// The largest M, N or K: kernels count rows and columns in 32 bits (offsets in 64).
pub(crate) const MAX_DIMENSION: usize = u32::MAX as usize;

/// How an unquantized weight is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightOrder {
    /// `W[N, K]` row-major: the weights of one output feature are contiguous (PyTorch's `nn.Linear`).
    #[default]
    NK,
    /// `W[K, N]` row-major: the weights of one input feature are contiguous (`X·W` as it is written).
    KN,
}

/// Everything about a weight that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightShape {
    pub device: DeviceId,
    pub format: Format,
    pub class: PackClass,
    pub n: usize,
    pub k: usize,
    pub stored_k: usize,
    pub row_scale: bool,
    pub k_order: bool,
}

impl fmt::Display for WeightShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} x {}", self.format, self.n, self.k)?;
        if self.stored_k != self.k {
            write!(f, " ({} columns stored)", self.stored_k)?;
        }
        if self.row_scale {
            f.write_str(" with row scales")?;
        }
        if self.k_order {
            f.write_str(" in act-order")?;
        }
        write!(f, ", layout {:?}, on {}", self.class, self.device)
    }
}

/// A weight `W[N, K]` on a device, in the layout that the device's kernels read. Made by
/// [`Context::load`](crate::Context::load).
#[derive(Debug)]
pub struct Weight {
    shape: WeightShape,
    data: Buffer,
    row_scale: Option<Buffer>,
    k_order: Option<Buffer>,
}

impl Weight {
    pub(crate) fn load(device: &dyn Device, stream: &Stream, host: &HostWeight) -> Result<Self, Error> {
        let format = host.format();
        let _span = tracing::info_span!("load", %format, n = host.n(), k = host.k()).entered();
        for (name, got) in [("N", host.n()), ("K", host.stored_k())] {
            if got > MAX_DIMENSION {
                return Err(Error::DimensionTooLarge { name, got, limit: MAX_DIMENSION });
            }
        }
        let class = device.pack_class(format);
        let layout = PackedLayout::new(format, class);
        let upload = |bytes: &[u8], what| -> Result<Buffer, Error> {
            let mut buffer = device.allocate(bytes.len(), what)?;
            device.upload(stream, bytes, (&mut buffer).into())?;
            Ok(buffer)
        };
        let data = match &layout {
            None => upload(host.blocks(), "a weight")?,
            Some(layout) => upload(&layout.pack(host), "a weight")?,
        };
        let row_scale = match host.row_scale() {
            None => None,
            Some(scales) => Some(upload(&DType::F32.encode(scales), "row scales of a weight")?),
        };
        let k_step = layout.map_or(format.block_len, |l| l.slab_k);
        let k_order = match host.k_order() {
            None => None,
            Some(order) => Some(upload(&padded_k_order(order, k_step), "column order of a weight")?),
        };
        device.synchronize(stream)?;
        let shape = WeightShape {
            device: device.info().id,
            format,
            class,
            n: host.n(),
            k: host.k(),
            stored_k: host.stored_k(),
            row_scale: row_scale.is_some(),
            k_order: k_order.is_some(),
        };
        Ok(Self { shape, data, row_scale, k_order })
    }

    /// The format of its values.
    pub fn format(&self) -> Format {
        self.shape.format
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// Values in a stored row; more than [`Weight::k`] only where act-order pads.
    pub fn stored_k(&self) -> usize {
        self.shape.stored_k
    }

    /// The layout on the device.
    pub fn class(&self) -> PackClass {
        self.shape.class
    }

    /// The device it lives on.
    pub fn device(&self) -> DeviceId {
        self.shape.device
    }

    /// Bytes that it occupies on the device.
    pub fn bytes(&self) -> usize {
        self.data.len() + self.row_scale.as_ref().map_or(0, Buffer::len) + self.k_order.as_ref().map_or(0, Buffer::len)
    }

    pub(crate) fn shape(&self) -> &WeightShape {
        &self.shape
    }

    pub(crate) fn args(&self) -> WeightArgs<'_> {
        WeightArgs {
            data: (&self.data).into(),
            row_scale: self.row_scale.as_ref().map(Into::into),
            k_order: self.k_order.as_ref().map(Into::into),
        }
    }
}

/// `order` as kernels read it: `u32` little-endian, padded to a multiple of `k_step` columns.
fn padded_k_order(order: &[u32], k_step: usize) -> Vec<u8> {
    let padded = order.len().next_multiple_of(k_step);
    order.iter().copied().chain(std::iter::repeat(NO_COLUMN)).take(padded).flat_map(u32::to_le_bytes).collect()
}

/// A host weight over unquantized `values` (little-endian) of `n × k` elements stored in `order`.
pub(crate) fn dense(values: &[u8], dtype: DType, n: usize, k: usize, order: WeightOrder) -> Result<HostWeight, Error> {
    let format: Format = dtype.name().parse()?;
    let width = dtype.bytes();
    let expected = n
        .checked_mul(k)
        .and_then(|c| c.checked_mul(width))
        .ok_or_else(|| FormatError::Overflow { what: format!("{dtype} weight"), dims: vec![n as u64, k as u64] })?;
    if values.len() != expected {
        let what = format!("{dtype} weight of {n} x {k}");
        return Err(FormatError::WrongLength { what, expected, got: values.len() }.into());
    }
    let rows = match order {
        WeightOrder::NK => values.to_vec(),
        WeightOrder::KN => transpose(values, k, n, width),
    };
    Ok(HostWeight::new(format, n, k, rows.into())?)
}

/// `[rows, columns]` elements of `width` bytes as `[columns, rows]`, tile by tile so that both sides stay in cache.
fn transpose(values: &[u8], rows: usize, columns: usize, width: usize) -> Vec<u8> {
    const TILE: usize = 32;
    let mut out = vec![0; values.len()];
    for first_row in (0..rows).step_by(TILE) {
        for first_column in (0..columns).step_by(TILE) {
            for column in first_column..columns.min(first_column + TILE) {
                for row in first_row..rows.min(first_row + TILE) {
                    let (from, to) = ((row * columns + column) * width, (column * rows + row) * width);
                    out[to..to + width].copy_from_slice(&values[from..from + width]);
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_moves_every_element() {
        for (rows, columns) in [(1, 1), (1, 70), (70, 1), (33, 65), (64, 32)] {
            let values: Vec<u8> = (0..rows * columns).flat_map(|i| (i as u16).to_le_bytes()).collect();
            let transposed = transpose(&values, rows, columns, 2);
            for row in 0..rows {
                for column in 0..columns {
                    let at = 2 * (column * rows + row);
                    let expected = (row * columns + column) as u16;
                    assert_eq!(u16::from_le_bytes([transposed[at], transposed[at + 1]]), expected);
                }
            }
        }
    }

    #[test]
    fn the_column_order_is_padded_to_whole_steps() {
        let words: Vec<u32> = padded_k_order(&[2, 0, 1], 4)
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        assert_eq!(words, [2, 0, 1, NO_COLUMN]);
        assert_eq!(padded_k_order(&[0; 8], 4).len(), 32);
    }
}
