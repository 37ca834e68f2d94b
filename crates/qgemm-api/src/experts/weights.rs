//! Expert weights on a device ([`Experts`]).

use std::sync::Arc;

use qgemm_formats::packed_file::{k_step, padded_k_order};
use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format, FormatError, HostExperts};
use qgemm_hal::{Buffer, Device, DeviceId, ExpertOperand, Operands, Stream};

use crate::error::Error;
use crate::operand::check_dimension;
use crate::weight::{Memory, WeightShape};

/// Weights of a layer of experts on a device, packed once for all forms of
/// [`ExpertProblem`](crate::ExpertProblem).
///
/// Made by [`Context::load_experts`](crate::Context::load_experts).
/// Clones share the memory.
#[derive(Clone, Debug)]
pub struct Experts {
    shape: ExpertsShape,
    memory: Arc<Memory>,
}

/// Properties of expert weights that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertsShape {
    /// Shape of one expert.
    pub each: WeightShape,
    pub experts: usize,
    /// Row distance between experts. 0 when all share one weight.
    pub row_pitch: usize,
}

impl ExpertsShape {
    /// Whether a plan for these weights may run with `other`.
    pub(crate) fn serves(&self, other: &Self) -> bool {
        self.each.serves(&other.each) && self.experts == other.experts && self.row_pitch == other.row_pitch
    }

    /// Checks that [a plan for these weights](ExpertsShape::serves) may run with `other`.
    pub(crate) fn check_serves(&self, other: &Self) -> Result<(), Error> {
        let wrong = || Error::WrongWeight { expected: self.to_string(), got: other.to_string() };
        if self.serves(other) { Ok(()) } else { Err(wrong()) }
    }
}

impl std::fmt::Display for ExpertsShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} experts, each {}", self.experts, self.each)
    }
}

impl Experts {
    pub(crate) fn load(device: &dyn Device, stream: &Stream, host: &HostExperts) -> Result<Self, Error> {
        let (format, stacked) = (host.format(), host.stacked());
        let _span = tracing::info_span!("load experts", %format, experts = host.experts(), n = host.n(), k = host.k())
            .entered();
        check_dimension("N of all experts", stacked.n())?;
        check_dimension("K", host.stored_k())?;
        let class = device.fragment_layout(format);
        let layout = PackedLayout::new(format, class);
        let k_step = k_step(format, layout.as_ref());
        let orders = |orders: &[Vec<u32>]| orders.iter().flat_map(|order| padded_k_order(order, k_step)).collect();
        let scales: Option<Vec<u8>> = stacked.row_scale().map(|scales| DType::F32.encode(scales));
        let orders: Option<Vec<u8>> = host.k_orders().map(orders);
        let room = |bytes: &Option<Vec<u8>>, what| match bytes {
            None => Ok(None),
            Some(bytes) => device.allocate(bytes.len(), what).map(Some),
        };
        // All memory is allocated before any upload, since packing allocates its own first.
        let mut row_scale = room(&scales, "row scales of experts")?;
        let mut k_order = room(&orders, "column orders of experts")?;
        let data = device.pack(stream, stacked)?;
        for (bytes, buffer) in [(&scales, &mut row_scale), (&orders, &mut k_order)] {
            if let (Some(bytes), Some(buffer)) = (bytes, buffer) {
                device.upload(stream, bytes, buffer.into())?;
            }
        }
        device.synchronize(stream)?;
        let each = WeightShape {
            device: device.info().id,
            format,
            class,
            rows: host.rows(),
            n: host.n(),
            gated: host.is_gated(),
            k: host.k(),
            stored_k: host.stored_k(),
            row_scale: row_scale.is_some(),
            k_order: k_order.is_some(),
            fits_f16: stacked.fits_f16(),
            fits_f16_scaled: stacked.fits_f16_scaled(),
            stated_x: stacked.stated_x(),
        };
        let shape = ExpertsShape { each, experts: host.experts(), row_pitch: host.row_pitch() };
        Ok(Self { shape, memory: Arc::new(Memory { data, row_scale, k_order }) })
    }

    /// One weight that `experts` experts share.
    pub(crate) fn sharing(each: WeightShape, memory: &Arc<Memory>, experts: usize) -> Result<Self, Error> {
        check_dimension("groups", experts)?;
        if experts == 0 {
            return Err(FormatError::NoExperts.into());
        }
        Ok(Self { shape: ExpertsShape { each, experts, row_pitch: 0 }, memory: Arc::clone(memory) })
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.shape.experts
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.shape.each.format
    }

    /// Output features of an expert. A gated pair counts one of its weights.
    pub fn n(&self) -> usize {
        self.shape.each.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.shape.each.k
    }

    /// Whether each expert is a gated pair.
    pub fn is_gated(&self) -> bool {
        self.shape.each.gated
    }

    /// Device of the weights.
    pub fn device(&self) -> DeviceId {
        self.shape.each.device
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let Memory { data, row_scale, k_order } = &*self.memory;
        data.len() + row_scale.as_ref().map_or(0, Buffer::len) + k_order.as_ref().map_or(0, Buffer::len)
    }

    pub(crate) fn shape(&self) -> &ExpertsShape {
        &self.shape
    }

    /// Device memory of the weights.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Adds the operands of the weights to a launch.
    pub(crate) fn give<'a>(&'a self, operands: &mut Operands<'a>) {
        operands.read(ExpertOperand::W, (&self.memory.data).into());
        operands.read_if_any(ExpertOperand::RowScale, self.memory.row_scale.as_ref().map(Into::into));
        operands.read_if_any(ExpertOperand::KOrder, self.memory.k_order.as_ref().map(Into::into));
    }
}
