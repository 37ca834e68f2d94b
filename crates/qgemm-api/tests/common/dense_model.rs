//! A decoder without experts.

use super::models::*;

/// A decoder without experts. Its head is the embedding.
pub fn dense(layers: usize) -> Vec<Tensor> {
    let mut tensors = vec![("token_embd.weight".to_owned(), vec![VOCABULARY, HIDDEN], "q8_0")];
    tensors.push(norm("output_norm", HIDDEN));
    for layer in 0..layers {
        tensors.extend(attention(layer));
        tensors.extend(["attn_norm", "ffn_norm"].map(|role| norm(&format!("blk.{layer}.{role}"), HIDDEN)));
        for (role, n, k) in [("ffn_gate", INNER, HIDDEN), ("ffn_up", INNER, HIDDEN), ("ffn_down", HIDDEN, INNER)] {
            tensors.push((format!("blk.{layer}.{role}.weight"), vec![n, k], "q4_0"));
        }
    }
    tensors
}
