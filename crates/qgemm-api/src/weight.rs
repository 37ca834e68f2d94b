//! Packed weights on a device.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::packed_file::{PackedParts, PackedWeight, k_step, padded_k_order};
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{DType, Format, FormatError, HostWeight, SharedBytes, XFormat};
use qgemm_hal::{Buffer, Device, DeviceId, GemmOperand, Operands, Stream};

use crate::error::Error;
use crate::experts::Experts;
use crate::operand::check_dimension;

/// Storage order of an unquantized weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightOrder {
    /// `W[N, K]` row-major, as in PyTorch's `nn.Linear`: the weights of one
    /// output feature are contiguous.
    #[default]
    NK,
    /// `W[K, N]` row-major, for `X·W`: the weights of one input feature are contiguous.
    KN,
}

/// Properties of a weight that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightShape {
    pub device: DeviceId,
    pub format: Format,
    pub class: FragmentLayout,
    /// Stored rows, of both weights of a gated pair.
    pub rows: usize,
    /// Output features. A gated pair counts one of its weights.
    pub n: usize,
    pub gated: bool,
    pub k: usize,
    pub stored_k: usize,
    pub row_scale: bool,
    pub k_order: bool,
    /// Whether values fit f16, without and with row scales.
    pub fits_f16: bool,
    pub fits_f16_scaled: bool,
    /// X format that the checkpoint states.
    pub stated_x: Option<XFormat>,
}

impl WeightShape {
    /// Whether a plan for this weight may run with `other`.
    ///
    /// A kernel for values beyond f16's range serves all values. A kernel without a stated
    /// X format serves every statement.
    pub(crate) fn serves(&self, other: &WeightShape) -> bool {
        let WeightShape { fits_f16, fits_f16_scaled, stated_x, .. } = *self;
        *self == WeightShape { fits_f16, fits_f16_scaled, stated_x, ..*other }
            && (stated_x.is_none() || stated_x == other.stated_x)
            && (other.fits_f16 || !fits_f16)
            && (other.fits_f16_scaled || !fits_f16_scaled)
    }

    /// Checks that [a plan for this weight](WeightShape::serves) may run with `other`.
    pub(crate) fn check_serves(&self, other: &WeightShape) -> Result<(), Error> {
        let wrong = || Error::WrongWeight { expected: self.to_string(), got: other.to_string() };
        if self.serves(other) { Ok(()) } else { Err(wrong()) }
    }
}

impl fmt::Display for WeightShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.gated {
            f.write_str("a gated pair, ")?;
        }
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
        if !self.fits_f16 {
            f.write_str(" with values unfit for f16")?;
        }
        if let Some(stated) = self.stated_x {
            write!(f, " for activations in {stated}")?;
        }
        write!(f, ", layout {:?}, on {}", self.class, self.device)
    }
}

/// Weight `W[N, K]` on a device, in the packed layout of its kernels.
///
/// Made by [`Context::load`](crate::Context::load), or of two weights by
/// [`Context::load_gated`](crate::Context::load_gated). Clones share the memory,
/// which the last one frees.
#[derive(Clone, Debug)]
pub struct Weight {
    shape: WeightShape,
    memory: Arc<Memory>,
}

/// Device memory of a weight.
#[derive(Debug)]
pub(crate) struct Memory {
    pub data: Buffer,
    pub row_scale: Option<Buffer>,
    pub k_order: Option<Buffer>,
}

impl Weight {
    /// Loads a gated pair with `n` output features.
    pub(crate) fn load_pair(device: &dyn Device, stream: &Stream, pair: &HostWeight, n: usize) -> Result<Self, Error> {
        let mut pair = Self::load(device, stream, pair)?;
        pair.shape = WeightShape { n, gated: true, ..pair.shape };
        Ok(pair)
    }

    pub(crate) fn load(device: &dyn Device, stream: &Stream, host: &HostWeight) -> Result<Self, Error> {
        let format = host.format();
        let _span = tracing::info_span!("load", %format, n = host.n(), k = host.k()).entered();
        check_dimension("N", host.n())?;
        check_dimension("K", host.stored_k())?;
        let class = device.fragment_layout(format);
        let layout = PackedLayout::new(format, class);
        let upload = |bytes: &[u8], what| upload(device, stream, bytes, what);
        let data = device.pack(stream, host)?;
        let row_scale = match host.row_scale() {
            None => None,
            Some(scales) => Some(upload(&DType::F32.encode(scales), "row scales of a weight")?),
        };
        let k_step = k_step(format, layout.as_ref());
        let k_order = match host.k_order() {
            None => None,
            Some(order) => Some(upload(&padded_k_order(order, k_step), "column order of a weight")?),
        };
        device.synchronize(stream)?;
        let shape = WeightShape {
            device: device.info().id,
            format,
            class,
            rows: host.n(),
            n: host.n(),
            gated: false,
            k: host.k(),
            stored_k: host.stored_k(),
            row_scale: row_scale.is_some(),
            k_order: k_order.is_some(),
            fits_f16: host.fits_f16(),
            fits_f16_scaled: host.fits_f16_scaled(),
            stated_x: host.stated_x(),
        };
        Ok(Self { shape, memory: Arc::new(Memory { data, row_scale, k_order }) })
    }

    /// Uploads a result of [`Weight::to_packed`].
    pub(crate) fn from_packed(device: &dyn Device, stream: &Stream, packed: &PackedWeight) -> Result<Self, Error> {
        let &PackedParts {
            format,
            class: got,
            n: rows,
            features: n,
            gated,
            k,
            stored_k,
            fits_f16,
            fits_f16_scaled,
            stated_x,
            ..
        } = &**packed;
        let _span = tracing::info_span!("load packed", %format, n, k).entered();
        let class = device.fragment_layout(format);
        if got != class {
            return Err(Error::WrongLayout { format, device: device.info().id, expected: class, got });
        }
        let upload = |bytes: &[u8], what| upload(device, stream, bytes, what);
        let data = upload(&packed.data, "a weight")?;
        let row_scale = packed.row_scale.as_deref().map(|s| upload(s, "row scales of a weight")).transpose()?;
        let k_order = packed.k_order.as_deref().map(|s| upload(s, "column order of a weight")).transpose()?;
        device.synchronize(stream)?;
        let (row_scaled, permuted) = (row_scale.is_some(), k_order.is_some());
        let device = device.info().id;
        let shape = WeightShape {
            device,
            format,
            class,
            rows,
            n,
            gated,
            k,
            stored_k,
            row_scale: row_scaled,
            k_order: permuted,
            fits_f16,
            fits_f16_scaled,
            stated_x,
        };
        Ok(Self { shape, memory: Arc::new(Memory { data, row_scale, k_order }) })
    }

    /// Downloads the weight as stored on `device`.
    pub(crate) fn to_packed(&self, device: &dyn Device, stream: &Stream) -> Result<PackedWeight, Error> {
        let download = |buffer: &Buffer| -> Result<SharedBytes, Error> {
            let mut bytes = vec![0; buffer.len()];
            device.download(stream, buffer.into(), &mut bytes)?;
            Ok(bytes.into())
        };
        let WeightShape { format, class, rows, n, gated, k, stored_k, fits_f16, fits_f16_scaled, stated_x, .. } =
            self.shape;
        Ok(PackedWeight::new(PackedParts {
            format,
            class,
            n: rows,
            features: n,
            gated,
            k,
            stored_k,
            fits_f16,
            fits_f16_scaled,
            stated_x,
            data: download(&self.memory.data)?,
            row_scale: self.memory.row_scale.as_ref().map(download).transpose()?,
            k_order: self.memory.k_order.as_ref().map(download).transpose()?,
        })?)
    }

    /// Shares this weight and its bias among `groups` experts, to skip some groups of rows.
    ///
    /// With [`ExpertProblem::masked`](crate::ExpertProblem::masked), rows come in tiles of
    /// one capacity. A count per tile in device memory gives the number of rows to compute,
    /// from the first. Tiles of count 0 take no time.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, ExpertArgs, ExpertProblem};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let weight = ctx.load(&qgemm_api::quantize(&[2.0; 32], 1, 32, "q8_0".parse()?)?.0)?;
    /// // Six rows in three tiles of two, of which two, none and one are wanted.
    /// let tiles = weight.shared_by(3)?;
    /// let plan = ctx.plan_experts(&ExpertProblem::masked(&tiles, 2).each(|p| p.x_dtype(DType::F32).d_dtype(DType::F32)))?;
    /// let (x, counts) = (ctx.upload(&[1.0f32; 6 * 32])?, ctx.upload(&[2u32, 0, 1])?);
    /// let (mut d, mut status) = (ctx.upload(&[-1.0f32; 6])?, ctx.allocate(8)?);
    /// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    /// let args = ExpertArgs::new(&x, &tiles, &counts, &mut d).status(&mut status).workspace(&mut workspace);
    /// plan.run(&ctx.default_stream(), args)?;
    /// let d: Vec<i32> = ctx.download::<f32>(&d)?.iter().map(|y| y.round() as i32).collect();
    /// assert_eq!(d, [64, 64, -1, -1, 64, -1]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`FormatError::NoExperts`](qgemm_formats::FormatError::NoExperts) for 0 groups.
    pub fn shared_by(&self, groups: usize) -> Result<Experts, Error> {
        Experts::sharing(self.shape, &self.memory, groups)
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.shape.format
    }

    /// Output features. A gated pair counts one of its weights.
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Whether it is a gated pair of [`Context::load_gated`](crate::Context::load_gated).
    pub fn is_gated(&self) -> bool {
        self.shape.gated
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// Columns of a stored row. More than [`Weight::k`] only with act-order padding.
    pub fn stored_k(&self) -> usize {
        self.shape.stored_k
    }

    /// Packed layout.
    pub fn class(&self) -> FragmentLayout {
        self.shape.class
    }

    /// Whether values can be rounded to f16 ([`HostWeight::fits_f16`]). If not, kernels
    /// that do so are not chosen.
    pub fn fits_f16(&self) -> bool {
        self.shape.fits_f16
    }

    /// X format that the checkpoint states ([`HostWeight::stated_x`]). If its scales are
    /// dynamic, [`XPrecision::Auto`](crate::XPrecision::Auto) permits it.
    pub fn stated_x(&self) -> Option<XFormat> {
        self.shape.stated_x
    }

    /// Device of the weight.
    pub fn device(&self) -> DeviceId {
        self.shape.device
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let Memory { data, row_scale, k_order } = &*self.memory;
        data.len() + row_scale.as_ref().map_or(0, Buffer::len) + k_order.as_ref().map_or(0, Buffer::len)
    }

    pub(crate) fn shape(&self) -> &WeightShape {
        &self.shape
    }

    /// Adds the operands of the weight to a launch.
    pub(crate) fn give<'a>(&'a self, operands: &mut Operands<'a>) {
        let Memory { data, row_scale, k_order } = &*self.memory;
        operands.read(GemmOperand::W, data.into());
        operands.read_if_any(GemmOperand::RowScale, row_scale.as_ref().map(Into::into));
        operands.read_if_any(GemmOperand::KOrder, k_order.as_ref().map(Into::into));
    }

    /// Device memory of the weight.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// New memory that holds `bytes` once `stream` has copied them.
pub(crate) fn upload(device: &dyn Device, stream: &Stream, bytes: &[u8], what: &'static str) -> Result<Buffer, Error> {
    let mut buffer = device.allocate(bytes.len(), what)?;
    device.upload(stream, bytes, (&mut buffer).into())?;
    Ok(buffer)
}

/// Host weight of unquantized little-endian `values`, `n × k` elements in `order`.
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

/// Transposes `[rows, columns]` elements of `width` bytes, by tiles, so that
/// both sides stay in cache.
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
}
