//! Measured configurations, which overrule the cost model.

use std::collections::HashMap;

use qgemm_hal::{CheckedGemm, TileConfig};

/// The shape that a measurement stands for. M is rounded up to a power of two: tiles come in such sizes, and a
/// server sees every M.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape {
    m_bucket: usize,
    n: usize,
    k: usize,
}

impl Shape {
    /// The shape of `m` tokens, `n` output features and `k` input features.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { m_bucket: m.checked_next_power_of_two().unwrap_or(m), n, k }
    }

    /// The shape of an operation.
    pub fn of(op: &CheckedGemm) -> Self {
        Self::new(op.m, op.n, op.k)
    }
}

/// A measured configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuned {
    /// The configuration.
    pub config: TileConfig,
    /// Parts that K was cut into.
    pub splits: u32,
    /// The time measured, in seconds.
    pub seconds: f64,
}

/// The best configuration measured for each device, kernel name ([`CheckedGemm::kernel_name`]) and shape.
#[derive(Clone, Debug, Default)]
pub struct TunedTable {
    devices: HashMap<String, HashMap<(String, Shape), Tuned>>,
}

impl TunedTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records a measurement; a slower one than is already known is dropped.
    pub fn insert(&mut self, device: &str, kernel: &str, shape: Shape, tuned: Tuned) {
        let kernels = self.devices.entry(device.to_owned()).or_default();
        let best = kernels.entry((kernel.to_owned(), shape)).or_insert(tuned);
        if tuned.seconds < best.seconds {
            *best = tuned;
        }
    }

    /// The best measurement, if there is one.
    pub fn find(&self, device: &str, kernel: &str, shape: Shape) -> Option<&Tuned> {
        self.devices.get(device)?.get(&(kernel.to_owned(), shape))
    }

    /// Measurements in the table.
    pub fn len(&self) -> usize {
        self.devices.values().map(HashMap::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }
}
