//! Choice of tensors to quantize: llama.cpp's rules, overridden
//! by patterns.

use anyhow::ensure;
use qgemm_api::printable;

/// Name parts of two-dimensional tensors that stay unquantized,
/// in the names of llama.cpp and `transformers`.
/// They are small, and their errors affect everything.
const KEPT: [(&str, &[&str]); 6] = [
    ("norm", &["_norm.weight", "norm.weight", "Norm.weight"]),
    (
        "embedding of positions or types",
        &[
            "position_embd",
            "token_types",
            "position_embeddings",
            "token_type_embeddings",
            "embed_positions",
            "wpe.weight",
        ],
    ),
    (
        "expert gating",
        &[
            "ffn_gate_inp.weight",
            "ffn_gate_tid2eid.weight",
            "mlp.gate.weight",
            "block_sparse_moe.gate.weight",
            "router.weight",
        ],
    ),
    ("position bias", &["attn_rel_b.weight", "relative_attention_bias.weight", ".rel_pos"]),
    (
        "small",
        &[
            "altup",
            "laurel",
            "per_layer_model_proj",
            "ssm_conv1d",
            "shortconv.conv",
            "conv1d.weight",
            "indexer.k_proj",
            "indexer.q_proj",
            ".patch_embd",
            ".patch_merger",
            "patch_embed",
            "sam.pos_embd",
            "sam.neck.",
            "sam.net_",
            "a.rvq.codebook",
            "mm.a.code_embd",
        ],
    ),
    (
        "small (RWKV)",
        &[
            "time_mix_first.weight",
            "time_mix_w0.weight",
            "time_mix_w1.weight",
            "time_mix_w2.weight",
            "time_mix_v0.weight",
            "time_mix_v1.weight",
            "time_mix_v2.weight",
            "time_mix_a0.weight",
            "time_mix_a1.weight",
            "time_mix_a2.weight",
            "time_mix_g1.weight",
            "time_mix_g2.weight",
            "time_mix_decay_w1.weight",
            "time_mix_decay_w2.weight",
            "time_mix_lerp_fused.weight",
        ],
    ),
];

/// Treatment of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is quantized.
    Quantized,
    /// It is copied, for this reason if worth telling.
    Copied(Option<String>),
    /// It is left out.
    LeftOut,
}

/// Patterns of the command line.
#[derive(clap::Args, Default)]
pub struct Patterns {
    /// Quantize exactly the tensors of these names, instead of those
    /// by the rules; `*` matches any letters, `?` one.
    #[arg(long, value_name = "PATTERN,…", value_delimiter = ',')]
    only: Vec<String>,
    /// Copy the tensors of these names.
    #[arg(long, value_name = "PATTERN,…", value_delimiter = ',')]
    keep: Vec<String>,
    /// Leave out the tensors of these names, such as those of types
    /// that GGUF lacks.
    #[arg(long, value_name = "PATTERN,…", value_delimiter = ',')]
    skip: Vec<String>,
    /// Copy `output.weight` or `lm_head.weight`.
    #[arg(long)]
    leave_output_tensor: bool,
}

impl Patterns {
    /// Checks that every pattern matches a tensor. A misspelt pattern
    /// would silently change nothing.
    ///
    /// # Errors
    /// When a pattern matches none.
    pub fn check<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> anyhow::Result<()> {
        for pattern in self.only.iter().chain(&self.keep).chain(&self.skip) {
            let found = names.clone().any(|name| matches(pattern, name));
            ensure!(found, "no tensor's name matches the pattern `{}`", printable(pattern));
        }
        Ok(())
    }

    /// Treatment of the tensor `name` with `dimensions` dimensions.
    pub fn fate(&self, name: &str, dimensions: usize) -> Fate {
        let is_one_of = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        if is_one_of(&self.skip) {
            return Fate::LeftOut;
        }
        if is_one_of(&self.keep) {
            return Fate::Copied(Some("--keep".into()));
        }
        if self.leave_output_tensor && ["output.weight", "lm_head.weight"].contains(&name) {
            return Fate::Copied(Some("--leave-output-tensor".into()));
        }
        if dimensions < 2 {
            return Fate::Copied(None);
        }
        if !self.only.is_empty() {
            return if is_one_of(&self.only) { Fate::Quantized } else { Fate::Copied(None) };
        }
        if !name.ends_with("weight") {
            return Fate::Copied(None);
        }
        match KEPT.iter().find(|(_, parts)| parts.iter().any(|part| name.contains(part))) {
            Some((why, _)) => Fate::Copied(Some((*why).into())),
            None => Fate::Quantized,
        }
    }
}

/// Whether `name` matches `pattern`, in which `*` matches any
/// letters and `?` one.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // The last star, and the position after the letters that it
    // matches so far.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if p < pattern.len() && pattern[p] == '*' {
            star = Some((p, n));
            p += 1;
        } else if p < pattern.len() && (pattern[p] == '?' || pattern[p] == name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((at, end)) = star {
            star = Some((at, end + 1));
            (p, n) = (at + 1, end + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("a*c", "abc", true),
            ("a*c", "abcd", false),
            ("*.weight", "blk.0.weight", true),
            ("blk.?.ffn_*", "blk.7.ffn_up.weight", true),
            ("blk.?.ffn_*", "blk.17.ffn_up.weight", false),
            ("*ab*ab", "abaabab", true),
            ("weight", "a.weight", false),
            ("a?", "a", false),
            ("**", "x", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn small_and_sensitive_tensors_are_kept() {
        let fate = |name: &str, dimensions| Patterns::default().fate(name, dimensions);
        for name in [
            "blk.0.attn_q.weight",
            "token_embd.weight",
            "output.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "blk.0.ffn_gate.weight",
        ] {
            assert_eq!(fate(name, 2), Fate::Quantized, "{name}");
            assert_eq!(fate(name, 1), Fate::Copied(None), "{name}");
        }
        for name in [
            "blk.0.attn_norm.weight",
            "encoder.layer.0.LayerNorm.weight",
            "position_embd.weight",
            "embeddings.token_type_embeddings.weight",
            "blk.3.ffn_gate_inp.weight",
            "model.layers.1.mlp.gate.weight",
            "blk.0.ssm_conv1d.weight",
        ] {
            assert!(matches!(fate(name, 2), Fate::Copied(Some(_))), "{name}");
        }
        assert_eq!(fate("ffn_up.bias", 2), Fate::Copied(None));
    }

    #[test]
    fn patterns_overrule_the_rules() {
        let patterns = |only: &str, keep: &str, skip: &str| {
            let list = |text: &str| text.split(' ').filter(|p| !p.is_empty()).map(str::to_owned).collect();
            Patterns { only: list(only), keep: list(keep), skip: list(skip), ..Patterns::default() }
        };
        let only = patterns("*_norm.weight", "", "");
        assert_eq!(only.fate("a_norm.weight", 2), Fate::Quantized);
        assert_eq!(only.fate("b.weight", 2), Fate::Copied(None));
        let both = patterns("*", "*.q.weight", "b.*");
        assert!(matches!(both.fate("a.q.weight", 2), Fate::Copied(Some(_))));
        assert_eq!(both.fate("b.q.weight", 2), Fate::LeftOut);
        assert_eq!(both.fate("c.bias", 2), Fate::Quantized);
        let names = || ["a.q.weight", "b.weight"].into_iter();
        assert!(both.check(names()).is_ok());
        let error = patterns("", "c.*", "").check(names()).expect_err("no such name").to_string();
        assert!(error.contains("`c.*`"), "{error}");
    }
}
