//! [`Network::of_rank`]: what one of several ranks reads.

use super::parallel::Part;
use super::ranks::Ranks;
use crate::architecture::{ExpertTensors, FeedForward, Matrix, Mixer, Network, RecurrentNumbers};
use crate::error::Error;

impl Network {
    /// The part of a rank: its heads, and the bytes of its weights. `expert_parallel` is that of
    /// [`PlanOptions`](super::PlanOptions).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a rank beyond the world, [`Error::Indivisible`] for a network that
    /// cannot be divided.
    pub fn of_rank(&self, ranks: Ranks, expert_parallel: bool) -> Result<Self, Error> {
        let part = Part::of(self, Some(ranks), false, expert_parallel)?;
        let mut own = part.network(self).clone();
        let [[all, all_experts], [kept, kept_experts]] = [self, &own].map(divided_bytes);
        own.weight_bytes.shared = (self.weight_bytes.shared as f64 - (all - kept)).max(0.0) as usize;
        if all_experts > 0.0 {
            own.weight_bytes.experts = (self.weight_bytes.experts as f64 * (kept_experts / all_experts)) as usize;
        }
        let linear = own.layers.iter().find_map(|layer| match &layer.mixer {
            Some((_, Mixer::Linear(linear))) => Some(linear.numbers),
            _ => None,
        });
        if let Some(numbers) = &mut own.numbers {
            (numbers.heads, numbers.kv_heads) = (own.heads.heads, own.heads.kv_heads);
            if let Some(linear) = linear {
                numbers.recurrent = Some(RecurrentNumbers::Linear(linear));
            }
        }
        Ok(own)
    }
}

/// Bytes of products that ranks divide, and of experts among them.
fn divided_bytes(network: &Network) -> [f64; 2] {
    let bytes = |matrix: &Matrix| matrix.n as f64 * matrix.format.row_bytes(matrix.k) as f64;
    let sum = |matrices: &[&Matrix]| matrices.iter().map(|matrix| bytes(matrix)).sum::<f64>();
    let (mut dense, mut of_experts) = (network.head.iter().map(bytes).sum::<f64>(), 0.0);
    for layer in &network.layers {
        dense += match layer.mixer.as_ref().map(|(_, mixer)| mixer) {
            Some(Mixer::Attention(of)) => sum(&[&of.q, &of.k, &of.v, &of.o]) + of.gate.iter().map(bytes).sum::<f64>(),
            Some(Mixer::ShortConv(of)) => sum(&[&of.input, &of.o]),
            Some(Mixer::Linear(of)) => {
                sum(&[&of.qkv, &of.gate, &of.step, &of.o]) + of.beta.iter().map(bytes).sum::<f64>()
            }
            None => 0.0,
        };
        match layer.feed_forward.as_ref().map(|(_, part)| part) {
            Some(FeedForward::Dense { gate, up, down }) => {
                dense += sum(&[up, down]) + gate.iter().map(bytes).sum::<f64>();
            }
            Some(FeedForward::Experts(ExpertTensors { gate, up, down, shared, local, .. })) => {
                of_experts += sum(&[gate, up, down]) * local.len() as f64;
                dense += shared.iter().map(|of| sum(&[&of.gate, &of.up, &of.down])).sum::<f64>();
            }
            None => {}
        }
    }
    [dense, of_experts]
}
