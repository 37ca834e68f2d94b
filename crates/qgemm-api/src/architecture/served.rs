//! Architectures by name: supported ones, and the operations that
//! unsupported ones need.

use super::description::Architecture;
use super::{
    gemma, gemma3, gpt_oss, lfm2, llama, mistral, mixtral, nemotron_h, qwen2, qwen3, qwen3moe, qwen3next, qwen35,
};
use crate::error::Error;

/// Architectures that run.
const SERVED: &[&Architecture] = &[
    &gemma::GEMMA,
    &gemma3::GEMMA3,
    &gpt_oss::GPT_OSS,
    &lfm2::LFM2,
    &llama::LLAMA,
    &mistral::MISTRAL,
    &mixtral::MIXTRAL,
    &nemotron_h::NEMOTRON_H,
    &qwen2::QWEN2,
    &qwen3::QWEN3,
    &qwen35::QWEN35,
    &qwen3moe::QWEN3_MOE,
    &qwen3next::QWEN3_NEXT,
];

/// Known architectures, and the operation that each needs besides.
const UNSERVED: &[(&[&str], &str)] = &[
    (&["qwen2moe", "qwen2_moe"], "a shared expert with a gate of its own"),
    (&["olmoe"], "norms of queries and keys over all heads"),
    (&["dbrx"], "LayerNorm decoders"),
    (&["llama4"], "layers without rotary embedding, and chunked attention"),
    (&["glm4moe", "glm4_moe", "ernie4_5-moe", "ernie4_5_moe"], "sigmoid routing with a bias, and shared experts"),
    (&["gemma2"], "a soft cap of logits"),
    (&["gemma3n"], "embeddings of layers, and layers that share caches"),
    (&["phi3", "phi4"], "fused QKV and gate·up tensors"),
    (
        &["phi2", "phi", "gptneox", "gpt_neox", "falcon", "stablelm", "gpt2", "starcoder2", "bloom", "mpt"],
        "LayerNorm decoders",
    ),
    (&["deepseek2", "deepseek_v2", "deepseek_v3", "kimi_k2"], "multi-head latent attention and layers of experts"),
    (&["qwen3_5", "qwen3_5_moe", "qwen35moe"], "images beside text, or experts, which Qwen3.5 has in other tensors"),
    (&["lfm2moe", "lfm2_moe", "nemotron_h_moe"], "sigmoid routing with a bias"),
    (
        &["mamba", "mamba2", "falcon_h1", "granitehybrid", "jamba"],
        "state-space layers of other kinds than Nemotron-H's",
    ),
    (&["cohere", "cohere2", "command-r"], "parallel attention and scaled logits"),
    (&["granite", "minicpm"], "scaled residuals and logits"),
    (&["olmo2"], "norms behind attention and feed-forward parts"),
    (&["nomic-bert", "nomic_bert", "modernbert", "roberta", "xlm-roberta"], "encoders of other kinds than BERT"),
    (&["t5", "whisper", "bart"], "cross-attention"),
];

/// Encoders that run.
pub const ENCODERS: [&str; 1] = ["bert"];

/// Every architecture of a plan.
pub(crate) const NAMES: &[&str] = &{
    let mut names = [ENCODERS[0]; SERVED.len() + ENCODERS.len()];
    let mut i = 0;
    while i < SERVED.len() {
        names[i] = SERVED[i].name;
        i += 1;
    }
    names
};

/// The decoder called `name`.
///
/// # Errors
/// [`Error::UnservedArchitecture`] with the missing operation; [`Error::UnknownArchitecture`].
pub(crate) fn architecture(name: &str) -> Result<&'static Architecture, Error> {
    let is_called = |architecture: &&Architecture| [architecture.name, architecture.model_type].contains(&name);
    if let Some(found) = SERVED.iter().find(|served| is_called(served)) {
        return Ok(found);
    }
    let (architecture, served) = (name.to_owned(), NAMES);
    match UNSERVED.iter().find(|(names, _)| names.contains(&name)) {
        Some(&(_, missing)) => Err(Error::UnservedArchitecture { architecture, missing, served }),
        None => Err(Error::UnknownArchitecture { architecture, served }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_is_found_or_refused_by_name() {
        assert_eq!(architecture("llama").expect("served").name, "llama");
        assert_eq!(architecture("qwen3_moe").expect("served").name, "qwen3moe");
        let moe = architecture("qwen2_moe").expect_err("not served").to_string();
        assert!(moe.starts_with("architecture `qwen2_moe`: needs a shared expert"), "{moe}");
        assert!(matches!(architecture("abc"), Err(Error::UnknownArchitecture { .. })));
    }

    #[test]
    fn a_name_is_either_served_or_not() {
        let unserved = || UNSERVED.iter().flat_map(|(names, _)| names.iter());
        assert!(unserved().all(|name| SERVED.iter().all(|served| ![served.name, served.model_type].contains(name))));
        assert_eq!(unserved().collect::<std::collections::BTreeSet<_>>().len(), unserved().count());
        assert!(NAMES.contains(&"llama") && NAMES.ends_with(&ENCODERS));
    }
}
