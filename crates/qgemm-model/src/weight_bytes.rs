//! Bytes of weights that a step reads.

use qgemm_api::Model;

use crate::architecture::TensorNames;
use crate::hyperparameters::{ExpertNumbers, Hyperparameters};

/// Bytes of a checkpoint's tensors, by what reads them.
#[derive(Clone, Copy, Debug)]
pub struct WeightBytes {
    /// Read by every step.
    shared: u64,
    /// Bytes that every step reads.
    experts: u64,
    numbers: Option<ExpertNumbers>,
}

impl WeightBytes {
    /// Adds up the tensors of `model`, without an embedding that is
    /// only looked up.
    pub fn new(model: &Model, names: &TensorNames, numbers: &Hyperparameters) -> Self {
        let embedding = match names.head.is_empty() || model.info(names.head).is_err() {
            true => 0,
            false => model.info(names.embedding).map_or(0, |tensor| tensor.bytes as u64),
        };
        let (mut shared, mut experts) = (0, 0);
        for tensor in model.tensors() {
            *if is_of_expert(names, &tensor.name) { &mut experts } else { &mut shared } += tensor.bytes as u64;
        }
        Self { shared: shared - embedding, experts, numbers: numbers.experts }
    }

    /// Average bytes that a step of `tokens` tokens reads. Tokens
    /// choose their experts evenly and independently.
    pub fn of_step(self, tokens: usize) -> f64 {
        let idle = |numbers: ExpertNumbers| 1.0 - numbers.per_token as f64 / numbers.count as f64;
        let idle = self.numbers.map_or(0.0, |numbers| idle(numbers).powf(tokens as f64));
        self.shared as f64 + self.experts as f64 * (1.0 - idle)
    }
}

/// Whether a tensor is part of a layer's experts, alone or stacked.
fn is_of_expert(names: &TensorNames, tensor: &str) -> bool {
    let part = tensor.strip_prefix(names.layer).and_then(|rest| rest.split_once('.'));
    let Some((_, part)) = part else { return false };
    let part = part.strip_suffix(".weight").unwrap_or(part);
    let experts = &names.experts;
    [experts.gate, experts.up, experts.down].into_iter().any(|pattern| match pattern.split_once("{}") {
        None => part == pattern,
        Some((before, after)) => {
            let number = part.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::architecture::architecture;

    #[test]
    fn experts_are_told_by_their_names() {
        let names = |name: &str, is_gguf| architecture(name).expect("served").names(is_gguf);
        let (gguf, hugging_face) = (names("qwen3moe", true), names("qwen3moe", false));
        for (names, tensor, expected) in [
            (gguf, "blk.3.ffn_gate_exps.weight", true),
            (gguf, "blk.12.ffn_down_exps.weight", true),
            (gguf, "blk.3.ffn_gate_inp.weight", false),
            (gguf, "blk.3.ffn_gate.weight", false),
            (gguf, "token_embd.weight", false),
            (hugging_face, "model.layers.3.mlp.experts.17.up_proj.weight", true),
            (hugging_face, "model.layers.3.mlp.up_proj.weight", false),
            (names("mixtral", false), "model.layers.0.block_sparse_moe.experts.7.w2.weight", true),
            (names("mixtral", false), "model.layers.0.block_sparse_moe.gate.weight", false),
        ] {
            assert_eq!(is_of_expert(names, tensor), expected, "{tensor}");
        }
    }

    #[test]
    fn a_step_reads_the_experts_of_its_tokens() {
        let numbers = ExpertNumbers { count: 8, per_token: 2, intermediate: 1, renormalized: true };
        let bytes = WeightBytes { shared: 100, experts: 800, numbers: Some(numbers) };
        assert_eq!(bytes.of_step(1), 300.0);
        assert_eq!(bytes.of_step(2), 100.0 + 800.0 * (1.0 - 0.75 * 0.75));
        assert!(bytes.of_step(1000) > 899.9);
        assert_eq!(WeightBytes { experts: 0, numbers: None, ..bytes }.of_step(5), 100.0);
    }
}
